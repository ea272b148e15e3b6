from steplab.explain.case import Case, in_seconds
from steplab.records.finding import Finding
from steplab.units import format_percent, format_time

CONSIDERABLE = 0.02


def data_loading(case: Case) -> Finding | None:
    """Finding if Python spends a considerable share of the steps in torch's DataLoader while the device waits."""
    loading_s, waits_s = case.per_step(case.profile.host_work_s.get("data loading", 0.0)), case.profiled_wait_s()
    saves_s = min(loading_s, waits_s)
    if saves_s <= CONSIDERABLE * case.length_s:
        return None
    return Finding(
        kind="data_loading",
        title=f"Loading data takes {format_percent(saves_s / case.length_s)} of the step",
        saw=(
            f"Python is in the DataLoader for {format_time(loading_s)} per step, and the device waits for Python "
            f"for {format_time(waits_s)}."
        ),
        why="A step waits for a batch that is not ready; workers load batches ahead, in other processes.",
        change="DataLoader(..., num_workers=8, pin_memory=True, persistent_workers=True, prefetch_factor=4)",
        evidence=in_seconds({"Python's time in the DataLoader": loading_s, "waiting for Python": waits_s}),
        saves_s=saves_s,
        at_most=True,
        prediction="At most: batches are ready, and no wait remains.",
    )
