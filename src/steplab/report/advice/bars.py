from steplab import units
from steplab.records.advice import Advice, Tried
from steplab.report.kit.document import Bar, Bars, Segment

_KEPT, _DROPPED, _ENDS = 1, 2, 7


def change_bars(advice: Advice) -> Bars | None:
    """Draw the first step time, the time with each change, and the final time; None if no change was timed."""
    timed = [_change(tried) for tried in advice.tried if tried.ratio]
    if advice.start_s is None or advice.best_s is None or not timed:
        return None
    ends = [_step("the step as given", advice.start_s), _step("the fastest step", advice.best_s)]
    return Bars(
        bars=(ends[0], *timed, ends[1]),
        legend=((_KEPT, "■", "measured, kept"), (_DROPPED, "■", "measured, not kept")),
        note="Step time with each change, measured alternating with the step before it. The stroke is the prediction.",
    )


def _step(label: str, seconds: float) -> Bar:
    figure = units.format_time(seconds)
    return Bar(label=label, figure=figure, segments=(Segment(value=seconds, color=_ENDS, tip=f"{label}: {figure}"),))


def _change(tried: Tried) -> Bar:
    ratio = tried.ratio
    assert ratio is not None
    after_s = ratio.a * ratio.ratio
    told = f"{units.format_time(ratio.a)} became {units.format_time(after_s)}"
    predicted_s = None if tried.predicted_share is None else max(ratio.a * (1 - tried.predicted_share), 0.0)
    return Bar(
        label=tried.words,
        figure=units.signed(after_s - ratio.a, units.format_time),
        segments=(Segment(value=after_s, color=_KEPT if tried.kept else _DROPPED, tip=f"{tried.words}: {told}"),),
        detail=told,
        mark=predicted_s,
        mark_tip="" if predicted_s is None else f"predicted to become {units.format_time(predicted_s)}",
    )
