from collections.abc import Iterator

from steplab import units
from steplab.records.profile import Profile
from steplab.records.run import Run
from steplab.report.kit.document import Bar, Bars, Segment
from steplab.report.profile import words
from steplab.report.profile.figures import Span, spans

BUSY, WAITS, IDLE = 1, 2, 7


def device_time(run: Run, profile: Profile) -> Bars:
    rows, device = spans(run, profile), words.device_word(profile)
    parts = [("busy", BUSY), *([("waits for the host", WAITS)] if words.has_host(profile) else []), ("idle", IDLE)]
    note = f"Time of the {device} per step under the profiler; at the right, the total."
    if any(span.timed_s is not None for span in rows):
        note += " The stroke is the unprofiled median of the same phase, which the busy time should reach."
    bars = tuple(
        Bar(
            label=span.phase,
            figure=units.format_time(span.window_s),
            segments=tuple(_device_segments(span, dict(parts))),
            mark=span.timed_s,
            mark_tip=f"{span.phase}, unprofiled: {units.format_time(span.timed_s)}" if span.timed_s else "",
        )
        for span in rows
    )
    return Bars(bars=bars, legend=tuple((color, "■", name) for name, color in parts), note=note)


def _device_segments(span: Span, colors: dict[str, int]) -> Iterator[Segment]:
    values = {"busy": span.busy_s, "waits for the host": span.host_bound_s, "idle": span.idle_s}
    for name, color in colors.items():
        if values[name] > 0:
            share = units.format_percent(values[name] / span.window_s if span.window_s else 0.0)
            tip = f"{span.phase}: {name} {units.format_time(values[name])}, {share} of the window"
            yield Segment(value=values[name], color=color, tip=tip)
