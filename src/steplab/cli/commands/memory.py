"""Measure one training step, break its peak memory down by category, and store the record.

The memory of one further step is recorded after timing; its categories sum to the peak.

For example: steplab memory --model small --context 256 --precision bf16
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from steplab.cli.options import MeasurementOptions, OutputOptions
from steplab.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steplab.records.prediction import MemoryPrediction
    from steplab.records.run import Run


def memory(
    *,
    measured: MeasurementOptions = MeasurementOptions(),
    snapshot: Annotated[
        Path | None,
        Parameter(
            help="File for the raw history (.pickle), for pytorch.org/memory_viz; categories go to FILE.marks.json"
        ),
    ] = None,
    predict: Annotated[bool, Parameter(help="Compare the peak with the prediction of `plan memory`")] = False,
    out: OutputOptions = OutputOptions(),
) -> int:
    from steplab.cli.output import chosen_format, say, say_stored
    from steplab.cli.progress import measuring_step, say_failed, shown
    from steplab.lab import memory as lab
    from steplab.lab.explaining import memory_references
    from steplab.lab.predicting import memory_of
    from steplab.specs.model import refuse_planning_only

    spec = measured.spec()
    marks = lab.marks_beside(snapshot) if snapshot else None
    chosen = chosen_format(out.format, out, beside=[snapshot, marks])
    prediction = None
    if predict:
        try:
            with shown("predicting"):
                prediction = memory_of(replace(spec, device="auto"))  # of a CUDA device, whatever the step runs on
        except Unsupported as unsupported:  # reported first; the measurement goes on
            refuse_planning_only(spec.model)
            say(f"steplab: measuring without a prediction: {unsupported.why}")
    with measuring_step(spec, measured, out) as how:
        record = lab.memory(spec, snapshot=snapshot, force=out.force, **how)
    references = memory_references([record], out.store) if chosen not in ("json", "csv") else ()
    show_memory(record, chosen, out, prediction=prediction, references=references)
    if record.failure:
        say_failed(record)
        return 1
    if record.memory_profile is None:
        say(f"steplab: {'; '.join(note for note in record.notes if note.startswith('memory: '))}")
        return 1
    say_stored("record", record.id)
    return 0


def show_memory(
    record: "Run",
    format: str,
    out: OutputOptions,
    *,
    prediction: "MemoryPrediction | None" = None,
    references: "Sequence[Run]" = (),
) -> None:
    from steplab.cli.output import emit_document
    from steplab.report.memory.document import memory_document
    from steplab.report.runs import REPORT

    if record.memory_profile is None:
        document = REPORT.documents([record])[0]
    else:
        document = memory_document(record, prediction=prediction, references=references)
    emit_document(document, format, out, stored=record.id)
