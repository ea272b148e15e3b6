from steplab.explain.case import ACROSS, Case, in_seconds
from steplab.records.finding import Finding
from steplab.records.profile import Timeline
from steplab.units import format_percent, format_time

CONSIDERABLE = 0.05
"""Least share of the step; copying a batch takes less."""


def copies_exposed(case: Case) -> Finding | None:
    """Finding on a GPU if CPU copies without concurrent kernels take a considerable share of the step. Causes: weights
    or states on the CPU, or batches copied on the computing stream."""
    profile = case.profile
    if profile.device != "cuda" or profile.timeline is None:
        return None
    copies_s = case.per_step(sum(k.total_s for k in profile.kernels if ACROSS.search(k.name)))
    alone_s = min(copies_s, _alone_s(profile.timeline), case.busy_s)
    length_s = case.length_s
    if alone_s <= CONSIDERABLE * length_s:
        return None
    return Finding(
        kind="copies_exposed",
        title=f"Copies between CPU and GPU take {format_percent(alone_s / length_s)} of the step",
        saw=(
            f"Copies between CPU and GPU run for {format_time(copies_s)} per step, {format_time(alone_s)} of it "
            "with nothing else running."
        ),
        why=(
            "PCIe has a hundredth of the bandwidth of the GPU's memory. Kernels wait for earlier copies on their "
            "stream, and not for copies on another."
        ),
        change="keep on the GPU what each step needs, or copy it ahead on another stream: with torch.cuda.stream(side)",
        note="overlapped copies need pinned memory and non_blocking=True",
        evidence=in_seconds({"copies between CPU and GPU": copies_s, "with no concurrent kernel": alone_s}),
        saves_s=alone_s,
        at_most=True,
        prediction="At most: all of them gone, or hidden behind kernels.",
    )


def _alone_s(timeline: Timeline) -> float:
    is_copy = [ACROSS.search(name) is not None for name in timeline.names]
    borders = []
    for kernel, start_ns, duration_ns in zip(timeline.kernel, timeline.start_ns, timeline.duration_ns, strict=True):
        borders += [(start_ns, 1, is_copy[kernel]), (start_ns + duration_ns, -1, is_copy[kernel])]
    running, since_ns, alone_ns = {True: 0, False: 0}, 0, 0
    for time_ns, change, copies in sorted(borders):
        if running[True] and not running[False]:
            alone_ns += time_ns - since_ns
        running[copies] += change
        since_ns = time_ns
    return alone_ns / 1e9
