"""Figures of a data-parallel study, from its samples; no presentation.

A step of several ranks is as long as that of the slowest rank. The figure of a variant is therefore the largest of the
ranks' medians, and so is the baseline's, so that waiting for a slow device does not count as communication.
"""

from collections.abc import Callable, Iterable
from statistics import median

from steplab.comparison.samples import compare_samples
from steplab.records import timing
from steplab.records.comparison import Ratio
from steplab.records.ddp import DdpCell, DdpRun, StateMemory

_WIDEST = 0.5
"""Distance of the bounds of exposed communication, relative to communication alone, above which no share is given."""


def phase_s(cell: DdpCell, phase: str, *, baseline: bool = False) -> float | None:
    """Median time of a phase on the slowest rank; None where it was not timed."""
    samples = [rank.samples(phase, baseline=baseline) for rank in cell.ranks]
    return max((median(column) for column in samples if column), default=None)


def step_s(cell: DdpCell) -> float | None:
    """Time of a step."""
    return phase_s(cell, "step")


def baseline_s(cell: DdpCell) -> float | None:
    """Time of the same step without communication, measured in turns with the variant."""
    return phase_s(cell, "step", baseline=True)


def host_lead_s(cell: DdpCell) -> float | None:
    """Least host lead at the ends of a step's phases, on the rank where it was least."""
    return min((found for rank in cell.ranks if (found := timing.lead_s(rank.phases)) is not None), default=None)


def waits_for_host(cell: DdpCell) -> bool:
    """Whether the host lead was near zero on some rank, whose messages the other ranks wait for."""
    return any(timing.waits_for_host(rank.phases) for rank in cell.ranks)


def usual_baseline_s(run: DdpRun, phase: str = "step") -> float | None:
    """Time of the step without communication, or of a phase of it: the median over its turns with all variants.

    Its own measurement comes first, when the machine may not have settled, and is used only where there is no other.
    """
    return _usual(run, lambda cell, beside: phase_s(cell, phase, baseline=beside))


def usual_spread(run: DdpRun) -> float | None:
    """`spread_over_ranks` of the step without communication, from the same samples."""
    return _usual(run, lambda cell, beside: spread_over_ranks(cell, baseline=beside))


def _usual(run: DdpRun, figure: Callable[[DdpCell, bool], float | None]) -> float | None:
    beside = [value for cell in run.cells if (value := figure(cell, True)) is not None]
    if beside:
        return median(beside)
    return figure(run.baseline, False) if run.baseline else None


def baseline_range_s(run: DdpRun) -> tuple[float, float] | None:
    """The shortest and the longest step without communication over the turns of all variants; None without any."""
    found = [seconds for cell in run.cells if (seconds := baseline_s(cell)) is not None]
    return (min(found), max(found)) if found else None


def exposed_s(cell: DdpCell) -> float | None:
    """Exposed communication: the time of the step minus that of the same step without communication."""
    whole, without = step_s(cell), baseline_s(cell)
    return whole - without if whole is not None and without is not None else None


def exposed_range_s(cell: DdpCell) -> tuple[float, float] | None:
    """Bounds of the exposed communication, by the 95 % interval of the step over the one without communication."""
    ratio, whole_s, without_s = step_ratio(cell), step_s(cell), baseline_s(cell)
    if ratio is None or ratio.low is None or ratio.high is None or whole_s is None or without_s is None:
        return None
    return whole_s * ratio.low / ratio.ratio - without_s, whole_s * ratio.high / ratio.ratio - without_s


def step_ratio(cell: DdpCell) -> Ratio | None:
    """The step over the same step without communication, with which it took turns, each on its slowest rank."""
    slowest = [
        max((r.samples("step", baseline=beside) for r in cell.ranks), key=lambda of: median(of or (0,)), default=())
        for beside in (True, False)
    ]
    if not all(slowest):
        return None
    if len(slowest[0]) != len(slowest[1]) or cell.turns == "before_and_after":
        return compare_samples([slowest[0]], [slowest[1]], in_turns=False)
    return compare_samples(*([[sample] for sample in samples] for samples in slowest), in_turns=True)


def hidden(cell: DdpCell) -> float | None:
    """Hidden share of communication: 1 - exposed / alone. Below zero, communication costs more than it takes alone.

    None where the bounds of the exposed communication are so far apart that the share could be off by a quarter.
    """
    added_s, bounds, whole_s = exposed_s(cell), exposed_range_s(cell), alone_s(cell)
    if added_s is None or bounds is None or not whole_s or bounds[1] - bounds[0] > _WIDEST * whole_s:
        return None
    return 1 - max(added_s, 0.0) / whole_s


def alone_s(cell: DdpCell) -> float | None:
    """Median time of the variant's communication alone, on the slowest rank."""
    return max((median(rank.alone_s) for rank in cell.ranks if rank.alone_s), default=None)


def spread_over_ranks(cell: DdpCell, *, baseline: bool = False) -> float | None:
    """How much longer the slowest rank's median step is than the fastest's, as a share; None where it was not timed."""
    medians = [median(samples) for rank in cell.ranks if (samples := rank.samples("step", baseline=baseline))]
    return max(medians) / min(medians) - 1 if medians and min(medians) > 0 else None


def best(cells: Iterable[DdpCell]) -> DdpCell | None:
    """The variant with the shortest step; None where none was timed.

    The exposed communication would be a worse criterion, because a disturbed baseline makes it smaller.
    """
    return min((cell for cell in cells if step_s(cell) is not None), key=lambda cell: step_s(cell) or 0.0, default=None)


def best_ddp(cells: Iterable[DdpCell]) -> DdpCell | None:
    """torch's DDP at its best bucket size; None where it was not timed."""
    return best(cell for cell in cells if cell.contender.kind == "torch_ddp")


def best_ddp_s(cells: Iterable[DdpCell]) -> float | None:
    """Exposed communication of torch's DDP at its best bucket size; None where it was not measured, or is nothing."""
    found = best_ddp(cells)
    added = exposed_s(found) if found else None
    return added if added and added > 0 else None


def peak_bytes(cell: DdpCell) -> int | None:
    """Peak of allocated memory of the variant's step on any rank, without the baseline's memory; None if unknown."""
    if any(rank.baseline_freed for rank in cell.ranks):
        return None
    own = [rank.peak.peak_allocated_bytes - (rank.beside_bytes or 0) for rank in cell.ranks if rank.peak is not None]
    return max(own, default=None)


def memory_at(cell: DdpCell, moment: str) -> StateMemory | None:
    """Memory of the rank that holds most at a moment; None where it was not recorded."""
    found = [memory for rank in cell.ranks if (memory := rank.moment(moment)) is not None]
    return max(found, key=lambda memory: memory.known_bytes, default=None)


def expected_at(cell: DdpCell, moment: str) -> StateMemory | None:
    """Memory at that moment by the formula."""
    return next((memory for memory in cell.expected if memory.moment == moment), None)


def timed(run: DdpRun) -> list[DdpCell]:
    """The variants that were timed."""
    return [cell for cell in run.cells if step_s(cell) is not None]
