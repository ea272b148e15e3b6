"""What each of several processes measured, and how far apart they are."""

from collections.abc import Iterator, Sequence
from statistics import median

from steplab import units
from steplab.records.ranks import RankSamples
from steplab.report.kit.document import Block, Column, Sentences, Table
from steplab.report.kit.quantities import LABEL
from steplab.report.kit.text import ABSENT

_WAITING = "gradient sync"


def rank_blocks(ranks: Sequence[RankSamples]) -> Iterator[Block]:
    """One row per rank, and the spread over ranks in a sentence."""

    def peak_bytes(rank: RankSamples) -> int | None:
        peak = rank.peak("step")
        return peak.peak_allocated_bytes if peak else None

    yield Table.of(
        "ranks",
        ranks,
        (
            Column(key="rank", quantity=LABEL),
            Column(key="host", shared="{}"),
            Column(key="device_name", header="device", shared="{}", wraps_from=16),
            Column(key="step_s", header="step", value=lambda rank: _median(rank, "step")),
            Column(key="waiting_s", header=_WAITING, value=lambda rank: _median(rank, _WAITING)),
            Column(key="peak_bytes", header="peak allocated", value=peak_bytes),
            Column(key="host_peak_bytes", header="host peak", rank=1),
        ),
        "Medians.",
    )
    if told := spread_words(ranks):
        yield Sentences.of([f"{told}."])


def spread_words(ranks: Sequence[RankSamples]) -> str | None:
    """How far apart the ranks' step times are; None where they did not time the same steps."""
    columns = [samples.best_s for rank in ranks if (samples := rank.phase("step"))]
    if len(columns) < len(ranks) or len({len(column) for column in columns}) != 1 or not columns[0]:
        return None
    medians = sorted(median(column) for column in columns)
    apart = median(max(step) - min(step) for step in zip(*columns, strict=True))
    share = units.format_share(apart / medians[0]) if medians[0] > 0 else ABSENT
    low, high = units.format_time(medians[0]), units.format_time(medians[-1])
    return (
        f"Median steps last from {low} to {high} over {units.counted(len(ranks), 'rank')}; within a step the slowest "
        f"is {units.format_time(apart)} ({share}) behind the fastest, by the median"
    )


def _median(rank: RankSamples, phase: str) -> float | None:
    samples = rank.phase(phase)
    return median(samples.best_s) if samples and samples.best_s else None
