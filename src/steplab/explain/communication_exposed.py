"""Collectives with no computation beside them."""

from steplab.explain.case import Case
from steplab.records.finding import Evidence, Finding
from steplab.specs.command import command
from steplab.specs.step import StepSpec
from steplab.units import format_percent, format_time

CONSIDERABLE = 0.05
"""Least share of the step: collectives that cannot overlap (the last bucket of gradients) take a few per cent."""
_FURTHER = 4
"""Factor by which larger buckets are proposed: their number is what costs, so a small factor would change little."""


def communication_exposed(case: Case) -> Finding | None:
    """Fires where collectives run for a considerable share of the step with no computation beside them."""
    profile = case.profile
    if profile is None or profile.communication is None:
        return None
    seen = profile.communication
    total_s, exposed_s = (case.per_step(profile, seconds) for seconds in (seen.total_s, seen.exposed_s))
    length_s = case.length_s(profile)
    if not length_s or exposed_s <= CONSIDERABLE * length_s:
        return None
    return Finding(
        kind="communication_exposed",
        title=f"Exposed communication takes {format_percent(exposed_s / length_s)} of the step",
        saw=(
            f"Collectives run for {format_time(total_s)} per step, {format_time(exposed_s)} of it "
            f"({format_percent(seen.exposed_s / seen.total_s)}) with no computation beside them."
        ),
        why=(
            "Processes that train together exchange gradients or weights over links far slower than their memory. "
            "Communication that overlaps with computation costs little; exposed communication lengthens the step."
        ),
        change=_change(case.spec),
        note=(
            "gradients are best sent as they arise: in larger buckets if there are many, smaller ones if the last is "
            "late (`steplab ddp` compares them, and other ways to send); FSDP2 has set_modules_to_forward_prefetch; "
            "fewer bytes with bf16 gradients, less often with gradient accumulation"
        ),
        evidence=(
            Evidence(what="collectives", value=total_s, unit="s"),
            Evidence(what="overlapped with computation", value=total_s - exposed_s, unit="s"),
            Evidence(what="exposed", value=exposed_s, unit="s"),
        ),
        saves_s=exposed_s,
        at_most=True,
        prediction=(
            "At most: all of it hidden. Overlapping collectives slow the computation, because they use cores and "
            "memory bandwidth, and a late rank makes the collectives of the other ranks look long."
        ),
    )


def _change(spec: StepSpec | None) -> str:
    """The change: an option of `run` for steplab's own data parallelism, else a change of the user's code."""
    if spec is None or spec.strategy is None:
        return "DistributedDataParallel(model, bucket_cap_mb=100)"
    if spec.strategy != "bucketed":
        return command(spec, {"data_parallel": "bucketed"})
    return command(spec, {"bucket_size_mb": f"{_FURTHER * spec.bucket_size_mb:g}"})
