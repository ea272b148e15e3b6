"""Measure every combination of the given values, each in a process of its own.

Every cell is stored as soon as it ends; one that runs out of memory, crashes or times out is stored as a failure.

Exit codes: 0 if at least one cell was measured, because a cell that fails is a result, too; 1 if all failed.

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
            help="Also profile every cell (profile), break its memory down (memory), or audit it in place of timing "
            "(precision)"
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        Parameter(
            help="List the cells without measuring them, with the time and the peak that are predicted; with --resume, "
            "those that are missing",
            negative="",
        ),
    ] = False,
    gpu: Annotated[
        str, Parameter(help="GPU of the catalogue for which --dry-run predicts, such as A100 SXM 80GB")
    ] = "H200 SXM",
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

    if layout := processes.as_layout():  # a sweep may list layouts, some of which the number would contradict
        raise UserError(f"`sweep` takes the number of processes from --layout; give {layout}")
    grid = step.grid()
    if not grid:
        raise UserError("no cells to measure; give values (`--context 128,256`), or a study (`steplab study quick`)")
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
