"""Measure one training step and store the record.

For example: steplab run --model small --context 256 --precision bf16

On several GPUs: steplab run --model small --gpus 2 --data-parallel bucketed

On several machines: torchrun --nproc-per-node 8 --nnodes 2 ... -m steplab run --model small
"""

from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import OutputOptions, ProcessOptions, Recipe, StepOptions


def run(
    *,
    step: StepOptions = StepOptions(),
    recipe: Recipe = None,
    processes: ProcessOptions = ProcessOptions(),
    name: Annotated[str, Parameter(help="Name of the run in listings")] = "",
    timeout: Annotated[
        str | None, Parameter(help="Time after which the measurement is given up: 90s, 5min, 2h [default: none]")
    ] = None,
    out: OutputOptions = OutputOptions(),
) -> int:
    from steplab.cli.output import chosen_format, emit, say, stdout_color
    from steplab.cli.progress import ProgressLine
    from steplab.lab.machine import device_kind_here
    from steplab.lab.measuring import measure
    from steplab.lab.processes import fields_here, is_first_rank, is_told_here
    from steplab.report.kit.rendering import render
    from steplab.report.sections import SECTIONS, Context
    from steplab.specs.recipe import resolve_with_recipe
    from steplab.units import parse_duration

    fields = step.fields() | {"recipe": recipe}
    spec = resolve_with_recipe(fields_here(fields, processes.gpus, processes.processes), device_kind_here)
    chosen = chosen_format(out.format, out)
    with ProgressLine(num_steps=spec.warmup + spec.steps) as line:
        record = measure(
            spec,
            name=name,
            store=out.store,
            timeout_s=parse_duration(timeout) if timeout else None,
            on_progress=line.within,
        )
    if is_first_rank():
        color = stdout_color() and out.output is None
        text = render(SECTIONS["run"].document(record, Context()), chosen, color=color)
        emit(text, out, chosen)
    if record.failure is None:
        return 0
    if is_told_here(record.failure):
        say(f"steplab: {record.status.replace('_', ' ')}: {record.failure.message}")
    return 1
