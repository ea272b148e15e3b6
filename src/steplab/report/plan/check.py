"""What a report says of predicted step times beside measured ones: how far off they are, and where."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import mean, median
from typing import TYPE_CHECKING

from steplab import units
from steplab.records.rows import Row, Scalar
from steplab.records.time_check import RECORDS, TimeCheck
from steplab.report.kit import charts as kit
from steplab.report.kit.charts import Drawing, drawing, put_mark, series_legend
from steplab.report.kit.document import Chart, Column, Document, Section, Table, Verdict, later, row_of
from steplab.report.kit.quantities import LABEL, PERCENT
from steplab.stats import percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WORST = 12


def check_document(checks: Sequence[TimeCheck]) -> Document:
    """How far predictions are from measurements, by group; for programs the rows of `check_rows`, one for each cell."""
    scored = [check for check in checks if check.error is not None]
    return Document(
        title="Predicted and measured step times",
        verdict=Verdict(sentences=_answer(checks, scored)),
        sections=tuple(_sections(checks, scored)),
        data=check_rows(checks),
    )


def _answer(checks: Sequence[TimeCheck], scored: Sequence[TimeCheck]) -> tuple[str, ...]:
    if not scored:
        return (f"None of {units.counted(len(checks), 'measurement')} can be predicted.",)
    errors, show = _errors(scored), units.format_percent
    inside = sum(bool(check.inside) for check in scored)
    return (
        f"Of {units.counted(len(scored), 'measured step')}, the median error is {show(median(errors))}, nine of "
        f"ten are within {show(percentile(errors, 90))}, the worst is {show(max(errors))}; {inside} lie in the "
        f"90 % interval. {units.counted(len(checks) - len(scored), 'other')} cannot be predicted.",
    )


def _errors(checks: Iterable[TimeCheck]) -> list[float]:
    return [abs(check.error) for check in checks if check.error is not None]


def _sections(checks: Sequence[TimeCheck], scored: Sequence[TimeCheck]) -> Iterator[Section]:
    if scored:
        yield Section.of("By group", _groups(scored))
        yield Section.of("Layouts of one job", _ranking(scored))
        yield Section.of("By kind of kernel", _kinds(scored))
        yield Section.of("Predicted over measured", later(_chart, scored))
        yield Section.of("Steps, the worst first", _cells(scored))
    yield Section.of("Not predicted", _unsupported([check for check in checks if check.unsupported]))


def _groups(scored: Sequence[TimeCheck]) -> Table:
    """The whole, then by what records and sources differ in."""
    splits: tuple[tuple[str, Callable[[TimeCheck], str]], ...] = (
        ("source", lambda check: check.source),
        ("seen by the fit", _seen),
        ("host", lambda check: "" if check.source != RECORDS else _host(check)),
        ("host always ahead", lambda check: "" if check.device_waited or check.source != RECORDS else _seen(check)),
        ("GPU", lambda check: f"{check.gpu}, {check.source}"),
        ("host always ahead", lambda c: "" if c.device_waited or c.source != RECORDS else _mode(c)),
    )
    rows = [_group("all", "", scored)]
    for name, key in splits:
        values = sorted({key(check) for check in scored} - {""})
        if values and (len(values) > 1 or name == "seen by the fit"):
            rows += [_group(name, value, [check for check in scored if key(check) == value]) for value in values]
    caption = "Error: predicted over measured, less one. Width: half of the interval over its central value. "
    caption += "A source's constant is the best single share of the peak for it on each GPU, fitted to all of its rows."
    return Table(
        name="groups",
        columns=(
            Column(key="by"),
            Column(key="value", header="group", wraps_from=16),
            Column(key="number", header="steps", quantity=LABEL),
            Column(key="median_error", quantity=PERCENT),
            Column(key="p90_error", header="p90", quantity=PERCENT),
            Column(key="worst_error", header="worst", quantity=PERCENT),
            Column(key="bias", quantity=PERCENT, rank=2),
            Column(key="inside", header="in interval", quantity=PERCENT),
            Column(key="width", quantity=PERCENT, rank=1),
            Column(key="constant_median", header="constant: median", quantity=PERCENT, rank=1),
            Column(key="constant_p90", header="p90", quantity=PERCENT, rank=1),
        ),
        rows=tuple(rows),
        caption=caption,
    )


def _seen(check: TimeCheck) -> str:
    if check.fitted:
        return "yes, or its like"
    return "held out" if check.source == RECORDS else "held out, or no fit"


def _host(check: TimeCheck) -> str:
    return "the device may have waited" if check.device_waited else "always ahead"


def _mode(check: TimeCheck) -> str:
    return f"{check.precision} {'compiled' if check.compiled else 'eager'}"


def _group(by: str, value: str, checks: Sequence[TimeCheck]) -> Row:
    errors, constants = _errors(checks), [abs(c.constant_error) for c in checks if c.constant_error is not None]
    widths = [_width(check) for check in checks]
    return {
        "by": by,
        "value": value,
        "number": len(checks),
        "median_error": median(errors),
        "p90_error": percentile(errors, 90),
        "worst_error": max(errors),
        "bias": median(check.error for check in checks if check.error is not None),
        "inside": sum(bool(check.inside) for check in checks) / len(checks),
        "width": median(widths),
        "constant_median": median(constants) if len(constants) == len(checks) else None,
        "constant_p90": percentile(constants, 90) if len(constants) == len(checks) else None,
    }


def _width(check: TimeCheck) -> float:
    """Half of the interval over its central value."""
    assert check.low_s is not None
    assert check.high_s is not None
    assert check.predicted_step_time_s
    return (check.high_s - check.low_s) / 2 / check.predicted_step_time_s


_APART = 0.05
"""By which two measured steps of one job must differ, for their order to be more than noise."""


def _ranking(scored: Sequence[TimeCheck]) -> Table:
    """Among pairs of one job's layouts and micro-batches, how many are predicted in the order that was measured."""
    counted: dict[str, list[bool]] = {}
    for first, second in itertools.combinations([check for check in scored if check.job], 2):
        measured, other = first.measured_step_time_s, second.measured_step_time_s
        if first.job == second.job and measured and other and abs(measured / other - 1) > _APART:
            predicted = (first.predicted_step_time_s or 0.0) < (second.predicted_step_time_s or 0.0)
            counted.setdefault(first.source, []).append((measured < other) == predicted)
    if counted:
        counted["all"] = [right for those in list(counted.values()) for right in those]
    return Table.of(
        "ranking",
        counted,
        (
            Column(key="source", value=str),
            Column(key="number", header="pairs", quantity=LABEL, value=lambda source: len(counted[source])),
            Column(key="right", header="in the measured order", quantity=PERCENT, value=lambda s: mean(counted[s])),
        ),
        caption=f"Pairs of one model, global batch and number of GPUs whose measured times differ by more than "
        f"{units.format_percent(_APART)}.",
    )


def _kinds(scored: Sequence[TimeCheck]) -> Table:
    """For profiled steps: seconds of the device by kind, the predicted share of the measured."""
    found = {
        kind: [
            check.predicted_kinds_s.get(kind, 0.0) / check.measured_kinds_s[kind] - 1
            for check in scored
            if check.measured_kinds_s.get(kind)
        ]
        for kind in ("matmul", "attention", "streaming")
    }
    return Table.of(
        "kinds",
        [kind for kind in found if found[kind]],
        (
            Column(key="kind", value=str),
            Column(key="number", header="profiles", quantity=LABEL, value=lambda kind: len(found[kind])),
            Column(key="median_error", quantity=PERCENT, value=lambda kind: median(map(abs, found[kind]))),
            Column(key="worst_error", header="worst", quantity=PERCENT, value=lambda kind: max(map(abs, found[kind]))),
            Column(key="bias", quantity=PERCENT, value=lambda kind: median(found[kind])),
        ),
        caption="Predicted seconds of a step, gaps between kernels included, beside the time in which its profile saw "
        "kernels of that kind run.",
    )


def _cells(scored: Sequence[TimeCheck]) -> Table:
    worst = sorted(scored, key=lambda check: -abs(check.error or 0.0))
    return Table(
        name="cells",
        columns=(
            Column(key="id"),
            Column(key="cell", header="step", wraps_from=24),
            Column(key="gpu", header="GPU", rank=2),
            Column(key="measured_step_time_s", header="measured"),
            Column(key="predicted_step_time_s", header="predicted"),
            Column(key="low_s", header="from", rank=1),
            Column(key="high_s", header="to", rank=1),
            Column(key="error", quantity=PERCENT),
            Column(key="measured_peak_bytes", header="measured peak", rank=3),
            Column(key="predicted_peak_bytes", header="predicted peak", rank=3),
        ),
        rows=tuple(check_rows(worst)),
        first=_WORST,
    )


def _unsupported(checks: Sequence[TimeCheck]) -> Table:
    counted = Counter((check.source, check.unsupported or "") for check in checks)
    return Table(
        name="unsupported",
        columns=(
            Column(key="source"),
            Column(key="number", header="steps", quantity=LABEL),
            Column(key="why", wraps_from=20),
        ),
        rows=tuple({"source": s, "number": number, "why": why} for (s, why), number in counted.most_common()),
    )


def check_rows(checks: Sequence[TimeCheck]) -> list[Row]:
    """One row for each cell."""
    return [_row(check) for check in checks]


def _row(check: TimeCheck) -> dict[str, Scalar]:
    return {
        **row_of(check, "id", "source", "gpu", "cell", "precision", "compiled", "predicted_step_time_s"),
        **row_of(check, "low_s", "high_s", "measured_step_time_s", "error", "inside"),
        **row_of(check, "predicted_peak_bytes", "measured_peak_bytes", "fitted", "device_waited", "constant_s"),
        "unsupported": f"unsupported: {check.unsupported}" if check.unsupported else None,
    }


# --- the picture --------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _BELOW = 640.0, 420.0, 44.0


def _chart(scored: Sequence[TimeCheck]) -> Chart | None:
    sources = list(dict.fromkeys(check.source for check in scored))
    times = [t for c in scored for t in (c.predicted_step_time_s, c.measured_step_time_s) if t]
    with drawing(_WIDTH, _HEIGHT + _BELOW, "predicted over measured step time") as picture:
        axes = _frame(picture, times)
        for index, source in enumerate(sources):
            for check in scored:
                if check.source == source and check.measured_step_time_s and check.predicted_step_time_s:
                    _paint(picture, axes, index, check)
    note = "Both axes are logarithmic; on the line, predicted and measured are the same; dashed, 10 % apart."
    return Chart(pictures=(picture.picture(),), legend=series_legend(sources), note=note)


def _frame(picture: Drawing, times: Sequence[float]) -> "Axes":
    axes = picture.axes(kit.LEFT, _BELOW, kit.RIGHT, kit.TOP)
    low, high = min(times) / 1.3, max(times) * 1.3
    scale = kit.time_scale(times, log_from=1)
    scale = replace(scale, low=low, high=high, ticks=tuple(tick for tick in scale.ticks if low <= tick <= high))
    scale.put_on(axes, along="x")
    scale.put_on(axes)
    axes.grid()
    axes.set_xlabel("measured step time", fontsize=11)
    axes.plot([low, high], [low, high], color=kit.MUTED, linewidth=1)
    for factor in (1.1, 1 / 1.1):
        axes.plot([low, high], [factor * low, factor * high], color=kit.MUTED, linewidth=1, linestyle=kit.DASHED)
    return axes


def _paint(picture: Drawing, axes: "Axes", index: int, check: TimeCheck) -> None:
    measured, predicted = check.measured_step_time_s, check.predicted_step_time_s
    assert measured
    assert predicted
    error = predicted / measured - 1
    sign = "+" if math.copysign(1, error) > 0 else "−"
    picture.tip(
        put_mark(axes, measured, predicted, index, size=5, alpha=0.8),
        f"{check.cell}: predicted {units.format_time(predicted)}, measured {units.format_time(measured)}, "
        f"{sign}{units.format_percent(abs(error))}",
    )
