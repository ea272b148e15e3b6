"""What a study of precisions found as rows, for programs and for tables in every format."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from steplab.records.numerics import Accumulation, Elements, ModuleAudit, Numerics
from steplab.records.rows import Row, Scalar, run_row
from steplab.records.run import Run
from steplab.report import accumulation_words
from steplab.report.columns import COLUMNS, Column, figure_column
from steplab.report.formats import render_rows
from steplab.report.precision_figures import KINDS, THE_MODEL, elements_of
from steplab.report.precision_words import rule_words, why

_TEXT = 24  # least width a sentence is wrapped to on a terminal


def _text(key: str, header: str | None = None, rank: int = 1) -> Column:
    return Column(key=key, header=header or key.replace("_", " "), shared=False, rank=rank)


def _number(key: str, header: str | None = None) -> Column:
    return figure_column(key, header or key.replace("_", " "), _plain_number, 2)


def _plain_number(value: Scalar) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else str(value)


_SPEED_UP = figure_column("speed_up", "vs fp32", lambda value: f"{value:.2f}×", 0)
_MEMORY_RATIO = figure_column("memory_ratio", "memory vs fp32", lambda value: f"{value:.2f}×", 2)


_RANKS = {"id": 9, "forward_s": 1, "backward_s": 1, "optimizer_s": 1, "mfu": 4, "host_peak_bytes": 5}
"""What gives way first on a narrow terminal, where it is not as in a table of runs: phases are what differs here."""


def _timing_columns() -> Iterator[Column]:
    """Those of a table of runs, the ratios beside what they are of."""
    for column in COLUMNS:
        if column.key not in ("name", "created_utc", "peak_flops_per_s", "peak_source"):
            yield replace(column, rank=_RANKS.get(column.key, column.rank))
        if column.key == "step_time_s":
            yield _SPEED_UP
        if column.key == "peak_allocated_bytes":
            yield _MEMORY_RATIO


TIMING_COLUMNS: tuple[Column, ...] = tuple(_timing_columns())
MODULE_COLUMNS: tuple[Column, ...] = (
    Column(key="precision", header="precision"),
    *(_text(key) for key in ("module", "class", "parameters", "inputs", "outputs", "gradients", "output_gradients")),
    *(
        _number(f"{kind.replace(' ', '_')}_{count}", f"{kind} {words}")
        for kind in KINDS
        for count, words in (
            ("num_overflowed", "overflowed"),
            ("num_underflowed", "underflowed"),
            ("num_subnormal", "subnormal"),
        )
    ),
    Column(key="failure", header="result", shared=False, wraps_from=_TEXT),
)
OPERATION_COLUMNS: tuple[Column, ...] = (
    Column(key="precision", header="precision"),
    *(_text(key) for key in ("operation", "rule", "inputs", "outputs")),
    _number("calls"),
    Column(key="why", header="why", shared=False, wraps_from=_TEXT),
)
MATMUL_COLUMNS: tuple[Column, ...] = (
    Column(key="precision", header="precision"),
    *(_text(key) for key in ("pass", "module", "operator", "node", "inputs", "outputs")),
    _number("calls"),
)
SCALING_COLUMNS: tuple[Column, ...] = (
    Column(key="precision", header="precision"),
    _number("loss_scale"),
    *(_number(key, key.removeprefix("num_").replace("_", " ")) for key in (f.name for f in fields(Elements))),
)
ACCUMULATION_COLUMNS: tuple[Column, ...] = (
    *(_text(key) for key in ("accumulator", "addend", "cast")),
    figure_column("result", "result", lambda value: f"{value:.4f}", 0),
    _number("num_rounded", "additions rounded"),
    Column(key="why", header="why", shared=False, wraps_from=_TEXT),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of one kind."""

    key: str
    """Name in JSON."""
    title: str
    """Heading."""
    rows: list[Row]
    """In base units."""
    columns: tuple[Column, ...]
    """What the formats for people show of them."""


def tables(
    audits: Sequence[Numerics] = (), accumulations: Sequence[Accumulation] = (), runs: Sequence[Run] = ()
) -> list[Table]:
    """The tables that have rows, the most telling of each part first."""
    found = (
        Table(key="audit", title="Types and losses by module", rows=module_rows(audits), columns=MODULE_COLUMNS),
        Table(key="operations", title="Operations", rows=operation_rows(audits), columns=OPERATION_COLUMNS),
        Table(key="matmuls", title="Products of matrices", rows=matmul_rows(audits), columns=MATMUL_COLUMNS),
        Table(key="loss_scaling", title="Loss scaling", rows=scaling_rows(audits), columns=SCALING_COLUMNS),
        Table(
            key="accumulation",
            title="Sums",
            rows=[_accumulation_row(a) for a in accumulations],
            columns=ACCUMULATION_COLUMNS,
        ),
        Table(key="timings", title="Time and memory of a step", rows=timing_rows(runs), columns=TIMING_COLUMNS),
    )
    return [table for table in found if table.rows]


def render_tables(found: Sequence[Table], format: str) -> str:
    """The tables as json, csv (the first of them alone), md or latex. Raises UserError for another format."""
    if format == "json":
        return json.dumps({table.key: table.rows for table in found}, indent=2, ensure_ascii=False, allow_nan=False)
    if format == "csv":
        return render_rows(found[0].rows if found else [], "csv")
    heading = {"md": "## {}\n\n", "latex": "% {}\n"}.get(format, "{}\n")
    return "\n\n".join(
        heading.format(table.title) + render_rows(table.rows, format, columns=table.columns) for table in found
    )


def timing_rows(runs: Sequence[Run]) -> list[Row]:
    """A row a run, with its speed and its memory as multiples of those of the run in fp32."""
    baseline = next((run for run in runs if run.spec and run.spec.precision == "fp32" and not run.failure), None)
    base = run_row(baseline) if baseline else {}
    return [
        run_row(run)
        | {
            "speed_up": _ratio(base.get("step_time_s"), run_row(run)["step_time_s"]),
            "memory_ratio": _ratio(run_row(run)["peak_allocated_bytes"], base.get("peak_allocated_bytes")),
        }
        for run in runs
    ]


def _ratio(over: Scalar, under: Scalar) -> float | None:
    return over / under if isinstance(over, (int, float)) and isinstance(under, (int, float)) and under else None


def module_rows(audits: Sequence[Numerics]) -> list[Row]:
    """A row a module and audit, the counts of its elements by kind of tensor; a failed audit is one row."""
    rows: list[Row] = []
    for numerics in audits:
        head = _head(numerics)
        if numerics.audit is None:
            rows.append(head | {"module": None, "failure": numerics.failure.message if numerics.failure else None})
        else:
            rows += [head | _module_row(module) for module in numerics.audit.modules]
    return rows


def _head(numerics: Numerics) -> Row:
    return {
        "id": numerics.id,
        "precision": numerics.spec.precision if numerics.spec else None,
        "status": numerics.status,
    }


def _module_row(module: ModuleAudit) -> Row:
    row: Row = {
        "module": module.module or THE_MODEL,
        "class": module.kind,
        "parameters": _types(module.parameters),
        "inputs": _types(module.inputs),
        "outputs": _types(module.outputs),
        "gradients": _types(module.gradients),
        "output_gradients": _types(module.output_gradients),
    }
    for kind in KINDS:
        elements = elements_of(module, kind)
        for field in fields(Elements):
            row[f"{kind.replace(' ', '_')}_{field.name}"] = getattr(elements, field.name) if elements else None
    return row


def operation_rows(audits: Sequence[Numerics]) -> list[Row]:
    """A row an operation and audit."""
    return [
        _head(numerics)
        | {
            "operation": operation.op,
            "rule": rule_words(operation),
            "inputs": _types(operation.inputs),
            "outputs": _types(operation.outputs),
            "calls": operation.calls,
            "why": why(operation),
        }
        for numerics in audits
        if numerics.audit
        for operation in numerics.audit.operations
    ]


def matmul_rows(audits: Sequence[Numerics]) -> list[Row]:
    """A row a kind of product, module and audit."""
    return [
        _head(numerics)
        | {
            "pass": matmul.phase,
            "module": matmul.module or THE_MODEL,
            "operator": matmul.op,
            "node": matmul.node,
            "inputs": _types(matmul.inputs),
            "outputs": _types(matmul.outputs),
            "calls": matmul.calls,
        }
        for numerics in audits
        if numerics.audit
        for matmul in numerics.audit.matmuls
    ]


def scaling_rows(audits: Sequence[Numerics]) -> list[Row]:
    """Two rows an audit that has a suggestion: the gradients without the factor on the loss, and with it."""
    rows: list[Row] = []
    for numerics in audits:
        if numerics.audit and (scaling := numerics.audit.loss_scaling):
            for scale, elements in ((1.0, scaling.unscaled), (scaling.suggested_scale, scaling.scaled)):
                counts: Row = {field.name: getattr(elements, field.name) for field in fields(Elements)}
                rows.append(_head(numerics) | {"loss_scale": scale} | counts)
    return rows


def _accumulation_row(accumulation: Accumulation) -> Row:
    return {
        "accumulator": accumulation.accumulator,
        "addend": accumulation.addend,
        "cast": "cast first" if accumulation.cast else "as it is",
        "number": accumulation.number,
        "addend_value": accumulation.addend_value,
        "num_additions": accumulation.num_additions,
        "num_rounded": accumulation.num_rounded,
        "result": accumulation.result,
        "why": accumulation_words.explanation(accumulation),
    }


def _types(names: Sequence[str]) -> str | None:
    return " ".join(names) or None
