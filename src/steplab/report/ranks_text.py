"""What each of several processes measured, and how far apart they are."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from steplab import units
from steplab.records.ranks import RankSamples
from steplab.report.blocks import figure_table
from steplab.report.kit.text import ABSENT, plain
from steplab.units import format_share

if TYPE_CHECKING:
    from rich.console import RenderableType

_WAITING_PHASE = "gradient sync"


def rank_parts(ranks: Sequence[RankSamples]) -> "Iterator[RenderableType]":
    """A table with a row a rank, and the spread over ranks in a sentence."""
    from rich.text import Text

    headers = ("rank", "host", "device", "step", _WAITING_PHASE, "peak allocated", "host peak")
    table = figure_table(*headers, numeric=(False, False, False, True, True, True, True))
    for rank in ranks:
        peak = rank.peak("step")
        table.add_row(
            str(rank.rank),
            plain(rank.host),
            plain(rank.device_name),
            _time(_median(rank, "step")),
            _time(_median(rank, _WAITING_PHASE)),
            units.format_bytes(peak.peak_allocated_bytes) if peak else ABSENT,
            units.format_bytes(rank.host_peak_bytes) if rank.host_peak_bytes is not None else ABSENT,
        )
    yield table
    if spread := spread_words(ranks):
        yield Text(spread)


def spread_words(ranks: Sequence[RankSamples]) -> str | None:
    """How far apart the ranks' own clocks are; None where they did not time the same steps."""
    columns = [samples.best_s for rank in ranks if (samples := rank.phase("step"))]
    if len(columns) < len(ranks) or len({len(column) for column in columns}) != 1 or not columns[0]:
        return None
    medians = sorted(median(column) for column in columns)
    apart = median(max(step) - min(step) for step in zip(*columns, strict=True))
    share = format_share(apart / medians[0]) if medians[0] > 0 else ABSENT
    low, high = units.format_time(medians[0]), units.format_time(medians[-1])
    return (
        f"median steps from {low} to {high} over {units.counted(len(ranks), 'rank')}; within a step the slowest is "
        f"{units.format_time(apart)} ({share}) behind the fastest, by the median"
    )


def _median(rank: RankSamples, phase: str) -> float | None:
    samples = rank.phase(phase)
    return median(samples.best_s) if samples and samples.best_s else None


def _time(seconds: float | None) -> str:
    return ABSENT if seconds is None else units.format_time(seconds)
