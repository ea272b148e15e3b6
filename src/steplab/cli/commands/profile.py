"""Measure one training step, profile where its time goes, and store the record.

The step is measured as `run` measures it; then further steps are profiled, whose times never count as step times.

For example: steplab profile --model small --context 256 --precision bf16
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from steplab.cli.options import OutputOptions, ProcessOptions, Recipe, StepOptions

if TYPE_CHECKING:
    from steplab.records.run import Run


def profile(
    *,
    step: StepOptions = StepOptions(),
    recipe: Recipe = None,
    processes: ProcessOptions = ProcessOptions(),
    profiled_steps: Annotated[int, Parameter(help="Number of steps to profile, after the timed ones")] = 3,
    trace: Annotated[
        Path | None,
        Parameter(help="File for the raw trace (.json or .json.gz), which Perfetto opens"),
    ] = None,
    nsys: Annotated[
        bool,
        Parameter(help="Profile with Nsight Systems; --trace is then the file for its SQLite export", negative=""),
    ] = False,
    name: Annotated[str, Parameter(help="Name of the run in listings")] = "",
    timeout: Annotated[
        str | None, Parameter(help="Time after which the measurement is given up: 90s, 5min, 2h [default: none]")
    ] = None,
    out: OutputOptions = OutputOptions(),
) -> int:
    from steplab.cli.output import chosen_format, say
    from steplab.cli.progress import ProgressLine
    from steplab.lab.machine import device_kind_here
    from steplab.lab.processes import fields_here
    from steplab.lab.profiling import is_recorded_elsewhere
    from steplab.lab.profiling import profile as measure_and_profile
    from steplab.specs.recipe import resolve_with_recipe
    from steplab.units import parse_duration

    fields = step.fields() | {"recipe": recipe}
    spec = resolve_with_recipe(fields_here(fields, processes.gpus, processes.processes), device_kind_here)
    chosen = chosen_format(out.format, out, beside=[trace])
    with ProgressLine(num_steps=spec.warmup + spec.steps) as line:
        record = measure_and_profile(
            spec,
            name=name,
            store=out.store,
            profiled_steps=profiled_steps,
            trace=trace,
            force=out.force,
            nsys=nsys,
            timeout_s=parse_duration(timeout) if timeout else None,
            on_progress=line.within,
        )
    show_profile(record, chosen, out)
    if record.failure:
        say(f"steplab: {record.status.replace('_', ' ')}: {record.failure.message}")
        return 1
    if record.profile is None:
        reasons = [note for note in record.notes if note.startswith("profile: ")]
        say(f"steplab: {'; '.join(reasons)}")
        return 0 if is_recorded_elsewhere(record) else 1
    return 0


def show_profile(record: "Run", format: str, out: OutputOptions) -> None:
    """Write the profile of a run, or, for a run without one, its ordinary report."""
    from steplab.cli.output import emit, stdout_color
    from steplab.lab.explaining import findings_of
    from steplab.report.kit.rendering import render
    from steplab.report.profile.document import profile_document
    from steplab.report.sections import SECTIONS, Context

    if record.profile:
        document = profile_document(record, findings_of([record], out.store)[record.id])
    else:
        document = SECTIONS["run"].document(record, Context())
    emit(render(document, format, color=stdout_color() and out.output is None), out, format)
