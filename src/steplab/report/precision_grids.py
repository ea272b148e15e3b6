"""Tables of an audit of precision and of the accumulation study, for the terminal and for the page."""

from collections.abc import Iterator, Sequence

from steplab.records.numerics import Accumulation, Audit, Elements, LossScaling
from steplab.report import accumulation_words
from steplab.report.grid import Grid
from steplab.report.kit.text import ABSENT
from steplab.report.precision_figures import (
    KINDS,
    all_elements,
    matmul_groups,
    module_groups,
    not_finite,
    num_lost,
    short,
    shorts,
    without_numbers,
)
from steplab.report.precision_words import rule_words, why
from steplab.units import format_share

_WITH_FP32_RUN = ("overflowed", "underflowed", "below range")
_COUNTS = ("elements", "inf or NaN", "overflowed", "zero", "underflowed", "below range", "subnormal", "largest")


def type_grid(audit: Audit) -> Grid:
    """The types at each module, those alike in one row."""
    rows = tuple(
        (
            group.label,
            group.first.kind,
            shorts(group.first.parameters),
            shorts(group.first.inputs),
            shorts(group.first.outputs),
            shorts(group.first.gradients),
            shorts(group.first.output_gradients),
        )
        for group in module_groups(audit)
    )
    headers = ("module", "class", "parameters", "inputs", "outputs", "gradients", "output gradients")
    return Grid(
        headers=headers,
        rows=rows,
        numeric=(False,) * len(headers),
        caption="gradients: of the parameters; output gradients: what backward hands to the module",
    )


def operation_grid(audit: Audit) -> Grid:
    """The operations of the forward pass, and what autocast does with each."""
    rows = tuple(
        (op.op, rule_words(op), shorts(op.inputs), shorts(op.outputs), str(op.calls), why(op))
        for op in audit.operations
    )
    headers = ("operation", "rule", "inputs", "outputs", "calls", "why")
    return Grid(headers=headers, rows=rows, numeric=(False, False, False, False, True, False))


def matmul_grid(audit: Audit) -> Grid:
    """The products of matrices in both passes, as the device was given them."""
    rows = []
    for group in matmul_groups(audit):
        first, name = group[0], without_numbers(group[0].module)
        rows.append(
            (
                first.phase,
                f"{name} × {len(group)}" if len(group) > 1 else name,
                first.op.removeprefix("aten::"),
                first.node or ABSENT,
                " × ".join(map(short, first.inputs)),
                shorts(first.outputs),
                str(sum(matmul.calls for matmul in group)),
            )
        )
    headers = ("pass", "module", "operator", "autograd node", "operands", "result", "calls")
    return Grid(headers=headers, rows=tuple(rows), numeric=(*(False,) * 6, True))


def loss_grid(audit: Audit, most: int | None = None) -> Grid:
    """What was lost: the whole model, then each module that lost any, or the `most` that lost most."""
    rows = [("all", kind, *_counts(found)) for kind in KINDS if (found := all_elements(audit, kind))]
    losers = [
        (group.label, kind, found)
        for group in module_groups(audit)
        for kind in KINDS
        if (found := group.elements(kind)) and num_lost(found)
    ]
    kept = sorted(range(len(losers)), key=lambda index: -num_lost(losers[index][2]))[:most]
    rows += [(label, kind, *_counts(found)) for label, kind, found in (losers[index] for index in sorted(kept))]
    left_out = len(losers) - len(kept)
    shortened = (
        f"the {len(kept)} rows with most losses of {len(losers)}; --format csv has them all · " if left_out else ""
    )
    grid = Grid(
        headers=("module", "of its", *_COUNTS),
        rows=tuple(rows),
        numeric=(False, False, *(True for _ in _COUNTS)),
        caption=shortened
        + (
            "overflowed: not finite here, finite in the fp32 run · underflowed: zero here, not zero in the fp32 run; "
            "below range: those of them whose fp32 value rounds to zero in the low type · subnormal: below the "
            "smallest normal number of the tensor's type · all: outputs of innermost modules, each parameter once"
        ),
    )
    compared = all(found.num_overflowed is not None for module in audit.modules if (found := module.output_elements))
    return grid.without("inf or NaN") if compared else grid.without(*_WITH_FP32_RUN)


def scaling_grid(scaling: LossScaling) -> Grid:
    """The gradients with the suggested factor on the loss, and without."""
    rows = (
        ("1", *_counts(scaling.unscaled)),
        (f"{scaling.suggested_scale:g}", *_counts(scaling.scaled)),
    )
    grid = Grid(headers=("loss times", *_COUNTS), rows=rows, numeric=(True, *(True for _ in _COUNTS)))
    return grid.without("inf or NaN")


def _counts(found: Elements) -> tuple[str, ...]:
    return (
        f"{found.num_elements:,}",
        f"{not_finite(found):,}",
        _count(found.num_overflowed),
        f"{found.num_zero:,}",
        _part(found.num_underflowed, found.num_elements),
        _count(found.num_below_range),
        _part(found.num_subnormal, found.num_elements),
        f"{found.largest:.4g}" if found.largest is not None else ABSENT,
    )


def _count(number: int | None) -> str:
    return ABSENT if number is None else f"{number:,}"


def _part(number: int | None, total: int) -> str:
    """A count with its share."""
    return _count(number) + (f" ({format_share(number / total)})" if number else "")


def accumulation_grid(accumulations: Sequence[Accumulation]) -> Grid:
    """The sums, each with where it comes from."""
    rows = tuple(
        (accumulation_words.line(a), accumulation_words.printed(a), accumulation_words.explanation(a))
        for a in accumulations
    )
    return Grid(headers=("sum", "result", "why"), rows=rows, numeric=(False, True, False))


def accumulation_title(accumulations: Sequence[Accumulation]) -> str:
    """What was added up."""
    return next(_titles(accumulations), "Sums")


def _titles(accumulations: Sequence[Accumulation]) -> Iterator[str]:
    for a in accumulations:
        yield f"{a.number:g} added {a.num_additions} times"
