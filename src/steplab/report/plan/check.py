from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import mean, median

from steplab import units
from steplab.records.step_time import TimeCheck
from steplab.report.kit.document import Column, Document, Section, Table, Verdict, row_of
from steplab.report.kit.quantities import LABEL, PERCENT
from steplab.stats import percentile

_WORST = 12
_FIELDS = (
    *("id", "gpu", "cell", "precision", "compiled", "predicted_step_time_s", "low_s", "high_s"),
    *("measured_step_time_s", "error", "inside", "predicted_peak_bytes", "measured_peak_bytes"),
    *("fitted", "device_waited"),
)


def check_document(checks: Sequence[TimeCheck]) -> Document:
    scored = [check for check in checks if check.error is not None]
    missing = Counter(check.unsupported for check in checks if check.unsupported).most_common()
    return Document(
        title="Predicted and measured step times",
        verdict=Verdict(sentences=(_answer(scored, len(checks)),)),
        sections=(
            Section.of("By group", _groups(scored)),
            Section.of("Steps, the worst first", _worst_first(scored)),
            Section.of("Not predicted", Table.of("unsupported", missing, _MISSING)),
        ),
        data=[row_of(check, *_FIELDS) | {"unsupported": _marked(check.unsupported)} for check in checks],
    )


def _marked(reason: str | None) -> str | None:
    return f"unsupported: {reason}" if reason else None


def _answer(scored: Sequence[TimeCheck], number: int) -> str:
    if not scored:
        return f"None of {units.counted(number, 'measurement')} can be predicted."
    errors, show = _errors(scored), units.format_percent
    return (
        f"{units.counted(len(scored), 'measured step')}: the median error is {show(median(errors))}, nine of ten "
        f"are within {show(percentile(errors, 90))}, the worst is {show(max(errors))}; "
        f"{sum(check.inside is True for check in scored)} lie in the 90 % interval. "
        f"{units.counted(number - len(scored), 'other')} cannot be predicted."
    )


def _errors(checks: Sequence[TimeCheck]) -> list[float]:
    return [abs(check.error or 0.0) for check in checks]


def _groups(scored: Sequence[TimeCheck]) -> Table:
    groups: dict[str, list[TimeCheck]] = {}
    for check in scored:
        for group in _groups_of(check):
            groups.setdefault(group, []).append(check)
    columns = (
        Column(key="group", value=lambda group: group[0], wraps_from=16),
        Column(key="number", header="steps", quantity=LABEL, value=lambda group: len(group[1])),
        Column(key="median_error", quantity=PERCENT, value=lambda group: median(_errors(group[1]))),
        Column(key="p90", quantity=PERCENT, value=lambda group: percentile(_errors(group[1]), 90)),
        Column(key="worst", quantity=PERCENT, value=lambda group: max(_errors(group[1]))),
        Column(
            key="inside",
            header="in interval",
            quantity=PERCENT,
            value=lambda group: mean(check.inside is True for check in group[1]),
        ),
        Column(key="width", quantity=PERCENT, rank=1, value=lambda group: median(map(_width, group[1]))),
    )
    caption = "Error: predicted over measured, less one. Width: half of the interval over its central value. Ahead: "
    caption += "the GPU did not wait for Python."
    return Table.of("groups", sorted(groups.items()), columns, caption)


def _groups_of(check: TimeCheck) -> Iterator[str]:
    yield "all"
    yield check.gpu
    if check.device_waited:
        yield "the GPU may have waited for Python"
    else:
        yield "ahead, fitted" if check.fitted else "ahead, held out"
        yield f"ahead, {check.precision} {'compiled' if check.compiled else 'eager'}"


def _width(check: TimeCheck) -> float:
    return ((check.high_s or 0.0) - (check.low_s or 0.0)) / 2 / (check.predicted_step_time_s or 1.0)


def _worst_first(scored: Sequence[TimeCheck]) -> Table:
    columns = (
        Column(key="id"),
        Column(key="cell", header="step", wraps_from=24),
        Column(key="gpu", header="GPU", rank=2),
        Column(key="measured_step_time_s", header="measured"),
        Column(key="predicted_step_time_s", header="predicted"),
        Column(key="error", quantity=PERCENT),
    )
    return Table.of("cells", sorted(scored, key=lambda check: -abs(check.error or 0.0)), columns, first=_WORST)


_MISSING = (
    Column(key="number", header="steps", quantity=LABEL, value=lambda reason: reason[1]),
    Column(key="why", wraps_from=20, value=lambda reason: reason[0]),
)
