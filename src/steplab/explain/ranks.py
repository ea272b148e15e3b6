"""Causes of waits between ranks: a late rank, uneven work, a late message, a slow group.

Each needs the traces of all ranks (`steplab import-trace FOLDER`)."""

from statistics import median

from steplab.explain.case import Case, in_seconds
from steplab.records.finding import Finding
from steplab.records.profile import TracedRank, TracedRanks
from steplab.units import format_percent, format_rate, format_time

CONSIDERABLE = 0.03
"""Least share of the step; ranks of one machine differ by one or two per cent."""
_LARGE_BYTES = 1e6
"""Least message size limited by bandwidth rather than latency."""
_SLOW = 0.5


def straggler(case: Case) -> Finding | None:
    """Finding if one rank joins most collectives last, and others wait for it."""
    seen = case.run.traced_ranks
    if seen is None or len(seen.ranks) < 2:
        return None
    last = max(seen.ranks, key=lambda rank: rank.late_s)
    num = sum(rank.num_last for rank in seen.ranks)
    waits_s = max(rank.exposed_s for rank in seen.ranks if rank is not last)
    saves_s = min(last.late_s, waits_s)
    if 2 * last.num_last <= num or saves_s <= CONSIDERABLE * last.step_s:
        return None
    if 2 * _beyond_mean_s(seen, last) >= last.late_s:
        return None  # it has more to compute: `imbalance`
    error = f" Clocks are aligned to {format_time(seen.clock_error_s or 0.0)}."
    return Finding(
        kind="straggler",
        title=f"Rank {last.rank} comes last to {last.num_last} of {num} collectives",
        saw=(
            f"The others wait {format_time(last.late_s)} per step for it, of up to {format_time(waits_s)} of exposed "
            f"communication.{error}"
        ),
        why="A collective begins when its last rank arrives, so one slow rank slows all of them.",
        change=f"look at rank {last.rank}: its data loading, its clock and temperature, its host",
        evidence=in_seconds({"waits for it": last.late_s, "exposed communication of a rank that waits": waits_s}),
        saves_s=saves_s,
        at_most=True,
        prediction="At most: the rank arrives with the others.",
    )


def imbalance(case: Case) -> Finding | None:
    """Finding if compute times of ranks differ; the longest determines the step."""
    seen = case.run.traced_ranks
    if seen is None or len(seen.ranks) < 2:
        return None
    most = max(seen.ranks, key=lambda rank: rank.compute_s)
    saves_s = _beyond_mean_s(seen, most)
    mean_s = most.compute_s - saves_s
    if saves_s <= CONSIDERABLE * most.step_s or 2 * saves_s < most.late_s:
        return None
    return Finding(
        kind="imbalance",
        title=f"Rank {most.rank} computes {format_percent(seen.imbalance)} longer than the mean of the ranks",
        saw=f"It computes for {format_time(most.compute_s)} per step; all ranks for {format_time(mean_s)} in the mean.",
        why="Ranks wait for the one with the most work: tokens, experts, layers or padding.",
        change="give ranks the same number of tokens (batch by length), layers by their time, experts by load",
        evidence=in_seconds({"computation of the longest rank beyond the mean": saves_s, "mean computation": mean_s}),
        saves_s=saves_s,
        at_most=True,
        prediction="At most: every rank computes for the mean.",
    )


def _beyond_mean_s(seen: TracedRanks, rank: TracedRank) -> float:
    return rank.compute_s - sum(each.compute_s for each in seen.ranks) / len(seen.ranks)


def late_message(case: Case) -> Finding | None:
    """Finding if one collective transfers without concurrent computation after all ranks have joined."""
    seen = case.run.traced_ranks
    found = max(seen.meetings, key=lambda meeting: meeting.exposed_s, default=None) if seen else None
    if seen is None or found is None:
        return None
    step_s = median(rank.step_s for rank in seen.ranks)
    if found.exposed_s <= CONSIDERABLE * step_s:
        return None
    return Finding(
        kind="late_message",
        title=f"{found.collective} {found.number + 1} of a step takes {format_time(found.exposed_s)} exposed",
        saw=(
            f"From the arrival of its last rank it takes {format_time(found.transfer_s)}, "
            f"{format_time(found.exposed_s)} of it with no concurrent computation."
        ),
        why="A message that is ready after all other work, such as the last bucket of gradients, is fully exposed.",
        change="DistributedDataParallel(model, bucket_cap_mb=...) with a smaller last bucket; FSDP2 with prefetching",
        evidence=in_seconds({"transfer with no concurrent computation": found.exposed_s}),
        saves_s=found.exposed_s,
        at_most=True,
        prediction="At most: all of that transfer hidden.",
    )


def slow_group(case: Case) -> Finding | None:
    """Finding if one process group's large messages have less than half another group's bus bandwidth."""
    seen = case.run.traced_ranks
    known = [m for m in seen.meetings if m.bus_bytes_per_s and m.size_bytes >= _LARGE_BYTES] if seen else []
    if seen is None or not known:
        return None
    best_per_s = max(m.bus_bytes_per_s or 0.0 for m in known)
    slow = [m for m in known if (m.bus_bytes_per_s or 0.0) < _SLOW * best_per_s]
    worst = max(slow, key=lambda m: m.exposed_s, default=None)
    if worst is None or worst.bus_bytes_per_s is None:
        return None
    here = [m for m in slow if m.group == worst.group]
    exposed_s = sum(m.exposed_s for m in here)
    saves_s = sum(m.exposed_s * (1 - (m.bus_bytes_per_s or 0.0) / best_per_s) for m in here)
    if saves_s <= CONSIDERABLE * median(rank.step_s for rank in seen.ranks):
        return None
    return Finding(
        kind="slow_group",
        title=f"Process group {worst.group or 'of all ranks'} is slow: {format_rate(worst.bus_bytes_per_s, 'B/s')}",
        saw=f"Another group's messages reach {format_rate(best_per_s, 'B/s')}; its own are exposed for "
        f"{format_time(exposed_s)} per step.",
        why="A group that spans machines, or crosses a slow link, should carry the fewest bytes.",
        change="lay tensor and expert parallelism within a machine and data parallelism across; check NCCL_DEBUG=INFO",
        evidence=in_seconds({"its exposed transfers": exposed_s}),
        saves_s=saves_s,
        at_most=True,
        prediction="At most: its exposed transfers at the best group's bandwidth.",
    )
