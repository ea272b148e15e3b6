"""Tabulates a study of precisions: grouped for people, one row per module for programs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from statistics import median

from steplab.records.numerics import Accumulation, Audit, Elements, LossScaling, MatmulAudit, ModuleAudit, Numerics
from steplab.records.rows import Row, Scalar, run_row
from steplab.records.run import Run
from steplab.report.kit.document import Column, Table, row_of
from steplab.report.kit.quantities import NUMBER, SHARE, TIMES, Quantity, quotient
from steplab.report.precision import figures
from steplab.report.precision.words import RULES, why
from steplab.report.run.columns import COLUMNS, rows_table

_TEXT = 24  # least width of wrapped sentences
_MOST_LOSERS = 12  # rows
_TYPES = Quantity(lambda names: figures.shorts(names.split()), numeric=False)
_ELEMENTS = tuple(field.name for field in fields(Elements))


def type_table(audit: Audit) -> Table:
    groups = figures.module_groups(audit)
    any_layer = "*: any layer. " if any("*" in figures.name_of(group) for group in groups) else ""
    return Table.of(
        "types",
        groups,
        (
            Column(key="name", header="module", value=figures.name_of),
            Column(key="modules", quantity=NUMBER, rank=2, value=len),
            Column(key="class", rank=3, value=lambda group: group[0].kind),
            *(
                Column(key=key, rank=rank, value=_types_of(key))
                for key, rank in zip(figures.TYPES, (0, 1, 0, 1, 1), strict=True)
            ),
        ),
        caption=f"{any_layer}gradients: of the parameters; output gradients: backward's input to the module.",
    )


def _types_of(key: str) -> Callable[[Sequence[ModuleAudit]], str]:
    return lambda group: figures.shorts(getattr(group[0], key))


def operation_table(numerics: Numerics) -> Table:
    return Table(
        name="operations",
        columns=(
            Column(key="operation"),
            Column(key="rule"),
            Column(key="inputs", quantity=_TYPES, rank=1),
            Column(key="outputs", quantity=_TYPES),
            Column(key="calls", quantity=NUMBER, rank=2),
            Column(key="why", wraps_from=_TEXT),
        ),
        rows=tuple(_operation_rows(numerics)),
    )


def matmul_table(audit: Audit) -> Table:
    return Table.of(
        "matmuls",
        figures.matmul_groups(audit),
        (
            Column(key="pass", value=lambda group: group[0].phase),
            Column(key="module", value=figures.name_of),
            Column(key="num_modules", header="modules", quantity=NUMBER, rank=2, value=len),
            Column(key="operator", rank=1, value=lambda group: group[0].op.removeprefix("aten::")),
            Column(key="node", header="autograd node", rank=3, value=lambda group: group[0].node),
            Column(key="operands", value=lambda group: " × ".join(map(figures.short, group[0].inputs))),
            Column(key="result", value=lambda group: figures.shorts(group[0].outputs)),
            Column(key="calls", quantity=NUMBER, value=lambda group: sum(each.calls for each in group)),
            *(_fp8_columns if any(each.fp8 for each in audit.matmuls) else ()),
        ),
    )


def _worst(name: str) -> Callable[[Sequence[MatmulAudit]], float | None]:
    return lambda group: max((getattr(each.fp8, name) for each in group if each.fp8), default=None)


def _amaxes(group: Sequence[MatmulAudit]) -> str | None:
    pairs = [pair for each in group if each.fp8 for pair in each.fp8.amaxes]
    operands = ((min(of), median(of), max(of)) for of in zip(*pairs, strict=True))
    return " × ".join("–".join(f"{value:.2g}" for value in of) for of in operands) or None


_fp8_columns = (
    Column(
        key="error",
        quantity=SHARE,
        value=_worst("error"),
        note="Error is the norm of the difference from the float64 product of the operands before their casts, over "
        "that product's norm. Flushed elements became zero, clamped ones the format's largest number; each is the "
        "largest share of an operand.",
    ),
    Column(key="flushed", quantity=SHARE, value=_worst("flushed")),
    Column(key="clamped", quantity=SHARE, value=_worst("saturated")),
    Column(
        key="amaxes",
        header="largest magnitudes",
        rank=1,
        value=_amaxes,
        note="Largest magnitudes: lowest, median and highest of the first training steps, for both operands.",
    ),
)


_COUNTS = (
    Column(key="num_elements", header="elements", quantity=NUMBER),
    Column(key="num_not_finite", header="inf or NaN", quantity=NUMBER),
    Column(key="num_overflowed", header="overflowed", quantity=NUMBER),
    Column(key="num_zero", header="zero", quantity=NUMBER, rank=2),
    Column(key="num_underflowed", header="underflowed", quantity=NUMBER),
    Column(key="underflowed_share", header="share", quantity=SHARE, rank=1),
    Column(key="num_below_range", header="below range", quantity=NUMBER, rank=4),
    Column(key="num_subnormal", header="subnormal", quantity=NUMBER),
    Column(key="subnormal_share", header="share", quantity=SHARE, rank=1),
    Column(key="largest", quantity=Quantity(lambda value: f"{value:.4g}"), rank=3),
)


def _counts(found: Elements) -> Row:
    counts = ("num_overflowed", "num_zero", "num_underflowed", "num_below_range", "num_subnormal", "largest")
    return row_of(found, "num_elements", *counts) | {
        "num_not_finite": figures.not_finite(found) if found.num_overflowed is None else None,
        "underflowed_share": found.num_underflowed / found.num_elements if found.num_underflowed else None,
        "subnormal_share": found.num_subnormal / found.num_elements if found.num_subnormal else None,
    }


def loss_table(audit: Audit) -> Table:
    whole = [(kind, found) for kind in figures.KINDS if (found := figures.all_elements(audit, kind))]
    rows: list[Row] = [{"module": "all", "of": kind, **_counts(found)} for kind, found in whole]
    losers = [
        (figures.name_of(group), kind, found)
        for group in figures.module_groups(audit)
        for kind in figures.KINDS
        if (found := figures.added(figures.elements_of(module, kind) for module in group)) and figures.num_lost(found)
    ]
    first = len(rows) + _MOST_LOSERS
    rows += [
        {"module": name, "of": kind, **_counts(found)}
        for name, kind, found in sorted(losers, key=lambda loser: -figures.num_lost(loser[2]))
    ]
    return Table(
        name="losses",
        columns=(Column(key="module"), Column(key="of", header="tensors"), *_COUNTS),
        rows=tuple(rows),
        first=first if len(rows) > first else None,
        caption="Overflowed: not finite here, finite in the fp32 run. Underflowed: zero here, not in the fp32 run; "
        "below range: those whose fp32 value rounds to zero in the low type. Subnormal: below the smallest normal "
        "number of the tensor's type. All: the outputs of innermost modules, and each parameter once.",
    )


def scaling_table(scaling: LossScaling) -> Table:
    return Table(
        name="loss_scaling",
        columns=(Column(key="loss_scale", header="loss scale", quantity=NUMBER), *_COUNTS),
        rows=tuple(
            {"loss_scale": int(scale) if scale >= 1 else scale, **_counts(elements)}
            for scale, elements in _by_scale(scaling)
        ),
        caption=f"torch.amp.GradScaler(init_scale={scaling.suggested_scale:g}) brings the largest gradient, "
        f"{scaling.largest_gradient:.3g}, to at most an eighth of fp16's largest number.",
    )


def _by_scale(scaling: LossScaling) -> tuple[tuple[float, Elements], ...]:
    return (1.0, scaling.unscaled), (scaling.suggested_scale, scaling.scaled)


def sum_table(accumulations: Sequence[Accumulation]) -> Table:
    return Table(
        name="accumulation",
        columns=(
            Column(key="sum"),
            Column(key="result", quantity=Quantity(figures.printed)),
            Column(key="num_rounded", header="additions rounded", quantity=NUMBER, rank=1),
            Column(key="why", wraps_from=_TEXT),
        ),
        rows=tuple(
            {
                "sum": figures.line(a),
                **row_of(a, "accumulator", "addend"),
                "cast": "cast first" if a.cast else "as it is",
                **row_of(a, "number", "addend_value", "num_additions", "num_rounded", "result"),
                "why": figures.explanation(a),
            }
            for a in accumulations
        ),
    )


# --- the timed runs ---------------------------------------------------------------------------------------

_RANKS = {"id": 9, "forward_s": 1, "backward_s": 1, "optimizer_s": 1, "mfu": 4, "host_peak_bytes": 5}


def timing_table(runs: Sequence[Run]) -> Table:
    return rows_table(timing_rows(runs), tuple(_timing_columns()))


def _timing_columns() -> Iterator[Column]:
    for column in COLUMNS:
        if column.key not in ("name", "created_utc", "peak_flops_per_s", "peak_source"):
            yield replace(column, rank=_RANKS.get(column.key, column.rank))
        if column.key == "step_time_s":
            yield Column(key="speed_up", header="vs fp32", quantity=TIMES)
        if column.key == "peak_allocated_bytes":
            yield Column(key="memory_ratio", header="memory vs fp32", quantity=TIMES, rank=2)


def timing_rows(runs: Sequence[Run]) -> list[Row]:
    """One row per timed run, with speed and memory relative to fp32."""
    baseline = next((run for run in runs if run.spec and run.spec.precision == "fp32" and not run.failure), None)
    base = run_row(baseline) if baseline else {}
    return [
        row
        | {
            "speed_up": quotient(base.get("step_time_s"), row["step_time_s"]),
            "memory_ratio": quotient(row["peak_allocated_bytes"], base.get("peak_allocated_bytes")),
        }
        for row in map(run_row, runs)
    ]


# --- what programs read -----------------------------------------------------------------------------------


def data_tables(
    audits: Sequence[Numerics], accumulations: Sequence[Accumulation], runs: Sequence[Run]
) -> dict[str, Sequence[Mapping[str, Scalar]]]:
    """Rows by table name: modules, operations, matmuls and sums, with torch's dtype names; empty tables are dropped."""
    seen = [numerics for numerics in audits if numerics.audit]
    found: dict[str, Sequence[Mapping[str, Scalar]]] = {
        "audit": [row for numerics in audits for row in _module_rows(numerics)],
        "operations": [row for numerics in seen for row in _operation_rows(numerics)],
        "matmuls": [row for numerics in seen for row in _matmul_rows(numerics)],
        "loss_scaling": [row for numerics in seen for row in _scaling_rows(numerics)],
        "accumulation": sum_table(accumulations).rows,
        "timings": timing_rows(runs),
    }
    return {name: rows for name, rows in found.items() if rows}


def _head(numerics: Numerics) -> Row:
    precision = numerics.spec.precision if numerics.spec else None
    return {"id": numerics.id, "precision": precision, "status": numerics.status}


def _module_rows(numerics: Numerics) -> list[Row]:
    if numerics.audit is None:
        return [_head(numerics) | {"module": None, "failure": numerics.failure.message if numerics.failure else None}]
    return [_head(numerics) | _module_row(module) for module in numerics.audit.modules]


def _module_row(module: ModuleAudit) -> Row:
    row: Row = {"module": module.module or figures.THE_MODEL, "class": module.kind}
    row |= {name: _types(getattr(module, name)) for name in figures.TYPES}
    for kind in figures.KINDS:
        counted = row_of(figures.elements_of(module, kind), *_ELEMENTS)
        row |= {f"{kind.replace(' ', '_')}_{name}": count for name, count in counted.items()}
    return row


def _operation_rows(numerics: Numerics) -> list[Row]:
    return [
        _head(numerics)
        | {
            "operation": operation.op,
            "rule": RULES[operation.rule],
            "inputs": _types(operation.inputs),
            "outputs": _types(operation.outputs),
            "calls": operation.calls,
            "why": why(operation),
        }
        for operation in (numerics.audit.operations if numerics.audit else ())
    ]


def _matmul_rows(numerics: Numerics) -> list[Row]:
    return [
        _head(numerics)
        | {
            "pass": matmul.phase,
            "module": matmul.module or figures.THE_MODEL,
            "operator": matmul.op,
            "node": matmul.node,
            "inputs": _types(matmul.inputs),
            "outputs": _types(matmul.outputs),
            "calls": matmul.calls,
        }
        for matmul in (numerics.audit.matmuls if numerics.audit else ())
    ]


def _scaling_rows(numerics: Numerics) -> list[Row]:
    scaling = numerics.audit.loss_scaling if numerics.audit else None
    pairs = _by_scale(scaling) if scaling else ()
    return [_head(numerics) | {"loss_scale": scale} | row_of(found, *_ELEMENTS) for scale, found in pairs]


def _types(names: Sequence[str]) -> str | None:
    return " ".join(names) or None
