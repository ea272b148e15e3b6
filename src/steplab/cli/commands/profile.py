"""Measure one training step, profile where its time goes, and store the record.

Profiled steps follow the timed ones and never count as step times.

For example: steplab profile --model small --context 256 --precision bf16
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from steplab.cli.options import MeasurementOptions, OutputOptions

if TYPE_CHECKING:
    from steplab.records.run import Run


def profile(
    *,
    measured: MeasurementOptions = MeasurementOptions(),
    profiled_steps: Annotated[int, Parameter(help="Steps to profile, after the timed ones")] = 3,
    trace: Annotated[Path | None, Parameter(help="File for the raw trace (.json or .json.gz), for Perfetto")] = None,
    out: OutputOptions = OutputOptions(),
) -> int:
    from steplab.cli.output import chosen_format, say
    from steplab.cli.progress import measuring_step, say_failed
    from steplab.lab import profiling

    spec = measured.spec()
    chosen = chosen_format(out.format, out, beside=[trace])
    with measuring_step(spec, measured, out) as how:
        record = profiling.profile(spec, profiled_steps=profiled_steps, trace=trace, force=out.force, **how)
    show_profile(record, chosen, out)
    if record.failure:
        say_failed(record)
        return 1
    if record.profile is None:
        reasons = [note for note in record.notes if note.startswith("profile: ")]
        say(f"steplab: {'; '.join(reasons)}")
        return 0 if profiling.is_recorded_elsewhere(record) else 1
    return 0


def show_profile(record: "Run", format: str, out: OutputOptions) -> None:
    from steplab.cli.output import emit_document
    from steplab.lab.explaining import findings_of
    from steplab.report.profile.document import profile_document
    from steplab.report.runs import REPORT

    if record.profile:
        document = profile_document(record, findings_of([record], out.store)[record.id])
    else:
        document = REPORT.documents([record])[0]
    emit_document(document, format, out, stored=record.id)
