"""Steps that differ only in their attention, side by side: time, memory and speed relative to plain attention."""

import dataclasses
from collections.abc import Sequence

from steplab.records.rows import Row, run_row
from steplab.records.run import Run
from steplab.report.kit.document import Column, Table
from steplab.report.kit.grouping import grouped
from steplab.report.kit.quantities import TIMES, quotient
from steplab.report.run.columns import COLUMNS, rows_table
from steplab.specs.step import STEP_FIELDS

_LAST = ("attention", "compile", "forward_s", "backward_s", "step_time_s", "peak_allocated_bytes", "failure")
"""The fields in which the rows differ and the measured ones, which come after the other fields of the step."""
_BASELINES = {"eager": ("plain", "off"), "compiled": ("plain", "default")}
"""Attention and compile mode of the steps that speeds are relative to."""


def attention_step_rows(runs: Sequence[Run]) -> list[Row]:
    """One row per run, with its speed relative to plain attention, eager and compiled; steps of one kind together.

    Empty where no step was measured with two kinds of attention.
    """
    # a factory's model brings its own attention
    pairs = [(run.spec, run) for run in runs if run.spec and run.spec.model.kind != "factory"]
    rows: list[Row] = []
    for group in grouped(pairs, lambda pair: dataclasses.replace(pair[0], attention="plain", compile="off")).values():
        if len({spec.attention for spec, _ in group}) > 1:
            rows += _rows([run for _, run in group])
    return rows


def _rows(group: Sequence[Run]) -> list[Row]:
    """Rows of steps that differ only in attention and compilation."""
    found = [run_row(run) for run in group]
    plain = {(row["attention"], row["compile"]): row["step_time_s"] for row in found}
    return [
        row | {f"{name}_speed": quotient(plain.get(base), row["step_time_s"]) for name, base in _BASELINES.items()}
        for row in found
    ]


def attention_steps(runs: Sequence[Run]) -> Table:
    """The rows as a table."""
    known = {column.key: column for column in COLUMNS}
    columns = [known[key] for key in (*(f.column for f in STEP_FIELDS if f.column not in _LAST), *_LAST)]
    speeds = [Column(key=f"{name}_speed", header=f"vs plain, {name}", quantity=TIMES, rank=1) for name in _BASELINES]
    return rows_table(attention_step_rows(runs), (*columns[:-2], *speeds, *columns[-2:]))
