"""Chains of elementwise work that a compiler would fuse."""

from steplab.explain.case import Case
from steplab.explain.chains import FUSABLE, Chain, chains
from steplab.explain.waiting import is_launch_bound
from steplab.records.finding import Evidence, Finding
from steplab.records.profile import Profile
from steplab.records.step_time import CompiledShares
from steplab.specs.command import command
from steplab.units import format_bytes, format_percent, format_time

CONSIDERABLE = 0.05
"""Least share of the device's time that fusing must save: compiling takes seconds to minutes at every start, and error
messages of compiled code are harder to read."""

_NUM_NAMED = 3


def fusable_elementwise(case: Case) -> Finding | None:
    """Fires where an eager model's chains, fused, would save a considerable share of the device's time."""
    profile = case.profile
    if profile is None or not case.is_eager:
        return None
    found = chains(profile)
    model = tuple(phase.phase for phase in profile.phases if phase.phase != "optimizer")
    low_s = case.per_step(profile, sum(profile.category_s(category, model) for category in FUSABLE))
    fused_s = case.per_step(profile, sum(chain.saves_s for chain in found))
    if case.compiled is not None:
        fused_s = low_s * (1 - case.compiled.memory_bound)
    busy_s = case.busy_s(profile)
    if fused_s <= CONSIDERABLE * busy_s:
        return None
    fields = {"compile": "default"} if case.spec else {}
    saves_s, prediction = _gain(case, profile, found, fused_s)
    worst = ", ".join(
        f"{chain.range} {chain.phase} {format_time(case.per_step(profile, chain.saves_s))}"
        for chain in found[:_NUM_NAMED]
    )
    return Finding(
        kind="fusable_elementwise",
        title=f"{format_percent(low_s / busy_s)} of the device's work is elementwise, much of it in unfused chains",
        saw=(
            f"Outside of the optimizer, elementwise work, norms, softmax, sums and copies take {format_time(low_s)} of "
            f"{format_time(busy_s)} per step.{_moved(profile, found)} Most would be saved in {worst}."
        ),
        why=(
            "Such a kernel computes little and lasts as long as memory takes to read its inputs and write its output. "
            "In a chain of kernels every intermediate is written and read again; fused into one kernel, none "
            "does."
        ),
        change=command(case.spec, fields) if case.spec else "model = torch.compile(model)",
        note="compiling takes seconds to minutes at the start; in your own code model = torch.compile(model)",
        evidence=(
            Evidence(what="elementwise, normalisation, softmax, reduction and copy", value=low_s, unit="s"),
            Evidence(what="device busy", value=busy_s, unit="s"),
            Evidence(what="device time that fusing saves", value=fused_s, unit="s"),
            Evidence(
                what="kernels per step that fusing saves",
                value=sum(chain.saves_kernels for chain in found) / profile.num_steps,
                unit="",
            ),
        ),
        saves_s=saves_s,
        prediction=prediction,
        fields=fields,
    )


def _gain(case: Case, profile: Profile, found: list[Chain], fused_s: float) -> tuple[float, str]:
    """Seconds saved per step, and how they were found. A launch-bound step lasts as long as its launches, so there the
    number of launches decides."""
    if case.compiled is not None:
        return _planned_gain(case, profile, case.compiled, fused_s)
    told = (
        "Each chain (operators of one range in one phase, between two matmuls) is taken to last as long as its longest "
        "call, which moves as many bytes as the ends of the chain. Left out: what a compiler fuses across modules."
    )
    if case.step_s is None or not is_launch_bound(case, profile):
        return fused_s, told + case.host_limit(profile, fused_s)
    kept = 1 - sum(chain.saves_kernels for chain in found) / profile.num_launches
    after_s = max(case.busy_s(profile) - fused_s, kept * case.step_s)
    told += (
        " The step is launch-bound: it is taken to last as long as its launches, of which fusing leaves "
        f"{format_percent(kept)}."
    )
    return max(0.0, case.step_s - after_s), told


def _planned_gain(case: Case, profile: Profile, compiled: CompiledShares, fused_s: float) -> tuple[float, str]:
    """The same by a plan of the step, whose rules of fusion reach across modules and know casts and constants."""
    told = (
        f"`steplab plan time` of this step, eager and compiled: of the time of such kernels fusion leaves "
        f"{format_percent(compiled.memory_bound)}, across modules and with casts and copies."
    )
    if case.step_s is None or not is_launch_bound(case, profile):
        return fused_s, told + case.host_limit(profile, fused_s)
    after_s = max(case.busy_s(profile) - fused_s, compiled.host * case.step_s)
    told += (
        " The step is launch-bound: it is taken to last as long as its launches, of which compiling leaves "
        f"{format_percent(compiled.host)} of the host's time, or as the device's work if that is longer."
    )
    return max(0.0, case.step_s - after_s), told


def _moved(profile: Profile, found: list[Chain]) -> str:
    """The bytes that the chains move now and their FLOPs per byte, where the record counts both."""
    ops = [op for chain in found for op in chain.members if op.moved_bytes and op.flops is not None]
    moved = sum(op.moved_bytes or 0.0 for op in ops)
    if not moved:
        return ""
    flops = sum(op.flops or 0.0 for op in ops)
    return (
        f" Their chains move {format_bytes(moved / profile.num_steps)} per step, at {flops / moved:.2g} FLOP per byte."
    )
