"""Measure every combination of the given values, each in its own process.

Each cell is stored when it ends. Cells that run out of memory, crash or time out are stored as failures.

Exit codes: 0 if any cell was measured, 1 if all failed.

For example: steplab sweep --model small,medium --context 128,256 --precision fp32,bf16
"""

from typing import Annotated, Literal

from cyclopts import Parameter

from steplab.cli.options import OutputOptions, StepOptions, StudyOptions


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
    out: OutputOptions = OutputOptions(),
) -> int:
    from steplab.cli.sweeps import run_study
    from steplab.errors import UserError
    from steplab.specs.study import Part, StudySpec, study_from_grids

    grid = step.grid()
    if not grid:
        raise UserError("no cells to measure; list values (`--context 128,256`), or use `steplab study quick`")
    asked = study_from_grids(name, "", [grid])
    if watch:
        parts = tuple(Part(kind=watch, step=cell) for cell in asked.cells)
        asked = StudySpec(name=name, description="", cells=(), parts=parts)
    return run_study(asked, how, out)
