from collections.abc import Sequence

from steplab import units
from steplab.records.profile import Profile
from steplab.records.run import Run
from steplab.report.kit.document import Bar, Bars
from steplab.report.profile import words
from steplab.report.profile.figures import Span, spans

BUSY, WAITS, IDLE = 1, 2, 7


def device_time(run: Run, profile: Profile) -> Bars:
    rows, device = spans(run, profile), words.device_word(profile)
    parts = [("busy", BUSY), *([("waits for the host", WAITS)] if words.has_host(profile) else []), ("idle", IDLE)]
    note = f"Time of the {device} per step under the profiler; at the right, the total."
    if any(span.timed_s is not None for span in rows):
        note += " The stroke is the unprofiled median of the same phase, which the busy time should reach."
    return Bars(
        bars=tuple(_bar(span, parts) for span in rows),
        legend=tuple((color, "■", name) for name, color in parts),
        note=note,
    )


def _bar(span: Span, colors: Sequence[tuple[str, int]]) -> Bar:
    values = {"busy": span.busy_s, "waits for the host": span.host_bound_s, "idle": span.idle_s}
    parts = [(name, color, values[name]) for name, color in colors]
    unprofiled = f"{span.phase}, unprofiled: {units.format_time(span.timed_s)}" if span.timed_s else ""

    def show(seconds: float) -> str:
        share = units.format_percent(seconds / span.window_s if span.window_s else 0.0)
        return f"{units.format_time(seconds)}, {share} of the window"

    figure = units.format_time(span.window_s)
    return Bar.of(span.phase, parts, show, figure=figure, mark=span.timed_s, mark_tip=unprofiled)
