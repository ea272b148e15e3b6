"""Measure every combination of the given values, each in its own process.

Each cell is stored when it ends. Cells that run out of memory, crash or time out are stored as failures.

Exit codes: 0 if any cell was measured, 1 if all failed.

For example: steplab sweep --model small,medium --context 128,256 --precision fp32,bf16
"""

import dataclasses
from typing import Annotated, Literal

from cyclopts import Parameter

from steplab.cli.options import OutputOptions, ProcessOptions, StepOptions, StudyOptions


def sweep(
    *,
    step: StepOptions = StepOptions(),
    name: Annotated[str, Parameter(help="Name of the sweep in listings")] = "sweep",
    how: StudyOptions = StudyOptions(),
    watch: Annotated[
        Literal["profile", "memory", "precision"] | None,
        Parameter(
            help="Also profile each cell (profile) or break its memory down (memory); or audit its precision "
            "instead of timing (precision)"
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        Parameter(
            help="Only list the cells, with predicted time and peak; with --resume, the missing ones",
            negative="",
        ),
    ] = False,
    gpu: Annotated[str, Parameter(help="GPU for which --dry-run predicts, such as A100 SXM 80GB")] = "H200 SXM",
    processes: Annotated[ProcessOptions, Parameter(show=False)] = ProcessOptions(),
    out: OutputOptions = OutputOptions(),
) -> int:
    from steplab.cli.output import emit, say
    from steplab.cli.sweeps import run_study
    from steplab.errors import UserError
    from steplab.lab.planning import plan_steps
    from steplab.lab.sweeping import jobs_of, missing_jobs
    from steplab.report.plan.steps import forecast_lines, forecast_summary
    from steplab.specs.hardware import hardware_named
    from steplab.specs.study import Part, StudySpec, study_from_grids

    if layout := processes.as_layout():  # it could contradict a layout that the sweep lists
        raise UserError(f"`sweep` takes the number of processes from --layout; use {layout}")
    grid = step.grid()
    if not grid:
        raise UserError("no cells to measure; list values (`--context 128,256`), or use `steplab study quick`")
    asked = study_from_grids(name, "", [grid])
    if watch:
        parts = tuple(Part(kind=watch, step=cell) for cell in asked.cells)
        asked = StudySpec(name=name, description="", cells=(), parts=parts)
    steps = [*asked.cells, *(part.step for part in asked.parts if part.step)]
    if dry_run:
        if how.resume:
            missing = {job.key for job in missing_jobs(asked, store=out.store)}
            steps = [step for step, job in zip(steps, jobs_of(asked), strict=True) if job.key in missing]
            if not steps:
                say("nothing is missing")
                return 0
        name_of_gpu = hardware_named(gpu).name
        planned = plan_steps(steps, gpu=name_of_gpu)
        emit("\n".join(forecast_lines(planned, name_of_gpu)), dataclasses.replace(out, output=None))
        say(forecast_summary(planned, name_of_gpu))
        return 0
    return run_study(asked, how, out)
