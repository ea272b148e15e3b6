"""Steps that differ in who computes their attention alone, side by side: time, memory, and what is gained."""

import dataclasses
from collections.abc import Sequence

from steplab.records.rows import Row, Scalar, run_row
from steplab.records.run import Run
from steplab.report.columns import COLUMNS, Column, figure_column, make_sheet
from steplab.report.grid import Grid
from steplab.specs.step import STEP_FIELDS, StepSpec

_LAST = ("attention", "compile", "forward_s", "backward_s", "step_time_s", "peak_allocated_bytes", "failure")
"""What the rows differ in, and what was measured; the rest of the step stands before it."""
_BASELINES = {"eager": ("plain", "off"), "compiled": ("plain", "default")}
"""Attention and compile mode of the steps that the others are compared with."""


def _times(value: Scalar) -> str:
    return f"{value:.2f}×" if isinstance(value, (int, float)) else str(value)


def attention_step_rows(runs: Sequence[Run]) -> list[Row]:
    """A row a run, with its speed against that of plain attention, eager and compiled; steps of one kind together.

    Empty where no step was measured with two kinds of attention.
    """
    groups: dict[StepSpec, list[Run]] = {}
    for run in runs:
        if run.spec and run.spec.model.kind != "factory":  # whose model brings its own attention
            groups.setdefault(dataclasses.replace(run.spec, attention="plain", compile="off"), []).append(run)
    rows: list[Row] = []
    for group in groups.values():
        specs = [run.spec for run in group if run.spec]
        if len({spec.attention for spec in specs}) > 1:
            rows += _rows(group)
    return rows


def _rows(group: Sequence[Run]) -> list[Row]:
    """Rows of steps alike but for their attention and its compilation."""
    found = [run_row(run) for run in group]
    plain = {(row["attention"], row["compile"]): row["step_time_s"] for row in found}
    return [
        row | {f"{name}_speed": _over(plain.get(baseline), row["step_time_s"]) for name, baseline in _BASELINES.items()}
        for row in found
    ]


def _over(before: Scalar, after: Scalar) -> float | None:
    return before / after if isinstance(before, (int, float)) and isinstance(after, (int, float)) else None


def _columns() -> tuple[Column, ...]:
    known = {column.key: column for column in COLUMNS}
    columns = [known[key] for key in (*(f.column for f in STEP_FIELDS if f.column not in _LAST), *_LAST)]
    speeds = [figure_column(f"{name}_speed", f"vs plain, {name}", _times, 1) for name in _BASELINES]
    return (*columns[:-2], *speeds, *columns[-2:])


def attention_step_grid(runs: Sequence[Run]) -> Grid | None:
    """The rows as a page has them; None without any."""
    rows = attention_step_rows(runs)
    if not rows:
        return None
    sheet = make_sheet(rows, _columns())
    return Grid(
        headers=tuple(column.header for column in sheet.columns),
        rows=sheet.cells,
        numeric=tuple(column.numeric for column in sheet.columns),
        caption=sheet.caption,
        bad_rows=frozenset(index for index, row in enumerate(rows) if row["status"] != "ok"),
        open_rows=60,
    )
