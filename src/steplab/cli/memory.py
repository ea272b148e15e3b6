"""steplab memory"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from steplab.cli.options import OutputOptions, ProcessOptions, StepOptions
from steplab.errors import Unsupported

if TYPE_CHECKING:
    from steplab.records.memory_references import MemoryReferences
    from steplab.records.prediction import MemoryPrediction
    from steplab.records.run import Run


def memory(
    *,
    step: StepOptions = StepOptions(),
    processes: ProcessOptions = ProcessOptions(),
    snapshot: Annotated[
        Path | None,
        Parameter(
            help="Keep the raw history, which pytorch.org/memory_viz shows, in this file (.pickle), and beside it in "
            "FILE.marks.json whose memory it is: import-snapshot reads both again"
        ),
    ] = None,
    predict: Annotated[
        bool,
        Parameter(help="Set the peak against its prediction, as `plan memory` makes it, if it makes one", negative=""),
    ] = False,
    name: Annotated[str, Parameter(help="What to call it in listings")] = "",
    timeout: Annotated[str | None, Parameter(help="Give up after this time: 90s, 5min, 2h")] = None,
    out: OutputOptions = OutputOptions(),
) -> int:
    """Measure one training step, see what its memory is made of, and store the record.

    The step is measured as `run` does, and only then one step more is watched. The parts of the peak sum to it.

    For example: steplab memory --model small --context 256 --precision bf16
    """
    from steplab.cli.output import chosen_format, say
    from steplab.cli.progress import ProgressLine
    from steplab.lab.memory import memory as measure_and_watch
    from steplab.lab.memory import predicted_memory
    from steplab.lab.memory_reading import marks_beside
    from steplab.lab.memory_references import memory_references
    from steplab.lab.processes import fields_here
    from steplab.specs.model import refuse_planning_only
    from steplab.specs.resolve import resolve_step
    from steplab.units import parse_duration

    spec = resolve_step(fields_here(step.fields(), processes.gpus, processes.processes))
    marks = marks_beside(snapshot) if snapshot else None
    chosen = chosen_format(out.format, out, beside=[snapshot, marks])
    prediction = None
    if predict:
        try:
            prediction = predicted_memory(spec)
        except Unsupported as unsupported:  # said first; what can be measured is
            refuse_planning_only(spec.model)
            say(f"steplab: no prediction, measured alone: {unsupported.why}")
    with ProgressLine() as line:
        record = measure_and_watch(
            spec,
            name=name,
            store=out.store,
            snapshot=snapshot,
            force=out.force,
            timeout_s=parse_duration(timeout) if timeout else None,
            on_progress=line.within,
        )
    references = memory_references([record], out.store) if chosen not in ("json", "csv") else None
    show_memory(record, chosen, out, prediction=prediction, references=references)
    if record.failure:
        say(f"steplab: {record.status.replace('_', ' ')}: {record.failure.message}")
        return 1
    if record.memory_profile is None:
        say(f"steplab: {'; '.join(note for note in record.notes if note.startswith('memory: '))}")
        return 1
    say(next_step(record))
    return 0


def next_step(record: "Run") -> str:
    """Which record was stored, and what can be done with it."""
    return f"record {record.id}; `steplab report {record.id} --output page.html` draws it"


def show_memory(
    record: "Run",
    format: str,
    out: OutputOptions,
    *,
    prediction: "MemoryPrediction | None" = None,
    references: "MemoryReferences | None" = None,
) -> None:
    """Write what a run's memory profile says, or, for a run without one, what is said of any run."""
    from steplab.cli.output import emit, stdout_color
    from steplab.report.kit.rendering import render
    from steplab.report.memory.document import memory_document
    from steplab.report.run.document import run_document

    color = stdout_color() and out.output is None
    if record.memory_profile is None:
        document = run_document(record)
    else:
        document = memory_document(record, prediction=prediction, references=references)
    emit(render(document, format, color=color), out, format)
