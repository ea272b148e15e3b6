"""Measure every combination of the given values, each in a process of its own.

Every cell is stored as soon as it ends; one that runs out of memory, crashes or times out is stored as a failure.

For example: steplab sweep --model small,medium --context 128,256 --precision fp32,bf16
"""

import dataclasses
from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import OutputOptions, ProcessOptions, StepOptions


def sweep(
    study: Annotated[
        str | None,
        Parameter(
            help="Preset (quick, sizes, compiled, warmup, attention) or TOML file, whose fields the options replace"
        ),
    ] = None,
    /,
    *,
    step: StepOptions = StepOptions(),
    name: Annotated[
        str | None, Parameter(help="Name of the study in listings [default: that of the preset or the file]")
    ] = None,
    resume: Annotated[
        bool,
        Parameter(
            help="Continue the newest sweep over the same cells; measure only those that are missing", negative=""
        ),
    ] = False,
    timeout: Annotated[str, Parameter(help="Time after which a cell is given up: 90s, 5min, 2h")] = "1h",
    dry_run: Annotated[bool, Parameter(help="List the cells without measuring them", negative="")] = False,
    processes: Annotated[ProcessOptions, Parameter(show=False)] = ProcessOptions(),
    out: OutputOptions = OutputOptions(),
) -> int:
    from steplab.cli.output import chosen_format, emit, say, stdout_color
    from steplab.cli.progress import ProgressLine
    from steplab.errors import UserError
    from steplab.lab.sweeping import sweep as run_sweep
    from steplab.records.rows import run_row
    from steplab.report.kit.rendering import render
    from steplab.report.run.columns import rows_document
    from steplab.report.run.words import describe
    from steplab.specs.study import load_study, study_from_grids
    from steplab.units import counted, parse_duration

    if (
        layout := processes.as_layout()
    ):  # a study may list layouts, some of which the number of processes would contradict
        raise UserError(f"`sweep` takes the number of processes from --layout; give {layout}")
    grid = step.grid()
    if not study and not grid:
        raise UserError("no cells to measure; name a preset (`steplab sweep quick`) or values (`--context 128,256`)")
    asked = load_study(study, grid) if study else study_from_grids("sweep", "", [grid])
    if name:
        asked = dataclasses.replace(asked, name=name)
    timeout_s = parse_duration(timeout)
    if dry_run:
        emit("\n".join(describe(cell) for cell in asked.cells), out)
        say(f"{counted(len(asked.cells), 'cell')}, none measured")
        return 0
    chosen = chosen_format(out.format, out)
    with ProgressLine() as line:
        try:
            result = run_sweep(
                asked,
                store=out.store,
                resume=resume,
                timeout_s=timeout_s,
                on_progress=line.sweep,
            )
        except KeyboardInterrupt as error:
            kept = "the finished cells are stored, and the same command with --resume continues"
            raise KeyboardInterrupt(kept) from error
    color = stdout_color() and out.output is None
    emit(render(rows_document([run_row(run) for run in result.runs]), chosen, color=color), out, chosen)
    failed = sum(run.failure is not None for run in result.runs)
    summary = f"{counted(len(result.runs), 'cell')}, {failed} of them failed"
    say(f"study {result.study_id}: {summary}; `steplab report --output page.html` draws it")
    return 1 if failed == len(result.runs) else 0
