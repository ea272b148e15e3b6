from steplab.explain.case import Case
from steplab.records.finding import Evidence, Finding
from steplab.units import format_percent, format_time

CONSIDERABLE = 0.02


def data_loading(case: Case) -> Finding | None:
    """Finding if Python spends a considerable share of the steps in torch's DataLoader while the device waits."""
    profile = case.profile
    host_s = profile.host_work_s.get("data loading", 0.0) if profile else 0.0
    if profile is None or not host_s:
        return None
    loading_s = case.per_step(profile, host_s)
    waits_s = case.per_step(profile, sum(phase.host_bound_s for phase in profile.phases))
    saves_s = min(loading_s, waits_s)
    if saves_s <= CONSIDERABLE * case.length_s(profile):
        return None
    return Finding(
        kind="data_loading",
        title=f"Loading data takes {format_percent(saves_s / case.length_s(profile))} of the step",
        saw=(
            f"Python is in the DataLoader for {format_time(loading_s)} per step, and the device waits for Python "
            f"for {format_time(waits_s)}."
        ),
        why="A step waits for a batch that is not ready; workers load batches ahead, in other processes.",
        change="DataLoader(..., num_workers=8, pin_memory=True, persistent_workers=True, prefetch_factor=4)",
        evidence=(
            Evidence(what="Python's time in the DataLoader", value=loading_s, unit="s"),
            Evidence(what="waiting for Python", value=waits_s, unit="s"),
        ),
        saves_s=saves_s,
        at_most=True,
        prediction="At most: batches are ready, and no wait remains.",
    )
