"""One operator that launches a large part of a step's kernels, each short: a Python loop over elements or experts."""

from steplab.explain.case import Case
from steplab.records.finding import Evidence, Finding
from steplab.units import format_percent, format_time

MANY = 1000
"""Least kernels per step of one operator on inputs of one shape: a model of 80 layers calls one some hundred times."""
TINY_S = 10e-6
"""Longest mean kernel: launching one takes as long."""
_EXPERTS = 8
_SELECTS = ("aten::nonzero", "aten::where", "aten::masked_select", "aten::index")
_PUTS = ("aten::index_add_", "aten::index_put_", "aten::_index_put_impl_", "aten::scatter_add_", "aten::index_add")


def tiny_kernels(case: Case) -> Finding | None:
    """Fires on a GPU if one operator launches MANY tiny kernels per step, or if a loop over experts selects tokens and
    puts them back. Its kernels and the waits for their launches must take a twentieth of the step.
    """
    profile = case.profile
    if profile is None or profile.device != "cuda" or not profile.num_launches:
        return None

    def per_step(names: tuple[str, ...]) -> float:
        return sum(op.calls for op in profile.ops if op.name in names) / profile.num_steps

    loops = per_step(("aten::nonzero",)) >= _EXPERTS and per_step(_PUTS) >= _EXPERTS
    if loops:
        name, chosen = "The loop over experts", [op for op in profile.ops if op.name in _SELECTS + _PUTS]
    else:
        tiny = [op for op in profile.ops if op.phase != "optimizer" and op.device_s <= TINY_S * op.kernels]
        chosen = sorted(tiny, key=lambda op: -op.kernels)[:1]
        name = chosen[0].name if chosen else ""
    num = sum(op.kernels for op in chosen) / profile.num_steps
    if not loops and num < MANY:
        return None
    device_s = case.ops_s(profile, chosen)
    waits_s = case.per_step(profile, sum(phase.host_bound_s for phase in profile.phases))
    share = min(1.0, num / (profile.num_launches / profile.num_steps))
    saves_s = min(device_s + waits_s * share, case.length_s(profile))
    if saves_s <= 0.05 * case.length_s(profile):
        return None
    return Finding(
        kind="tiny_kernels",
        title=f"{name} launches {num:.0f} kernels per step",
        saw=(
            f"They take {format_time(device_s)} on the GPU per step, {format_time(device_s / num)} each, and are "
            f"{format_percent(share)} of the launches; the GPU waits {format_time(waits_s)} per step for launches."
        ),
        why=(
            "A kernel of a few microseconds takes as long to launch as to run, so a loop in Python over elements, "
            "parameters or experts is as slow as Python."
        ),
        change="sort tokens by expert and multiply once: torch._grouped_mm, or a grouped GEMM of Triton"
        if loops
        else "one call on a stacked tensor (torch.stack, torch._foreach_add and the like), or torch.compile",
        evidence=(
            Evidence(what="kernels of it", value=num, unit=""),
            Evidence(what="device time of these", value=device_s, unit="s"),
            Evidence(what="waiting for their launches", value=waits_s * share, unit="s"),
        ),
        saves_s=saves_s,
        at_most=True,
        prediction="At most: their time, and the waiting in proportion to their launches.",
    )
