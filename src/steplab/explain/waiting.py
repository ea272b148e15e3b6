"""The device's waits for Python, with and without the profiler."""

from steplab.explain.case import Case
from steplab.records.profile import PhaseTime, Profile
from steplab.units import format_time

CONSIDERABLE = 0.10
"""Least share of waiting in a launch-bound step. Every step waits one or two per cent; remedies pay from about a tenth.
"""
LONGEST_LAUNCH_S = 100e-6
"""Longest wait that one launch explains: 5 to 50 µs per operator, up to twice that under a profiler. In longer waits
Python does something else."""

_NEVER_WAITED = 0.01
"""Share of waiting below which the GPU never waited for Python: its queue was never empty."""

_MODEL = ("forward", "backward")


def model_phases(profile: Profile) -> list[PhaseTime]:
    """Forward and backward, which torch.compile of a model covers; all phases if the trace marks neither."""
    return [phase for phase in profile.phases if phase.phase in _MODEL] or list(profile.phases)


def wait_s(case: Case) -> float:
    """Idle device seconds per step in forward and backward: unprofiled minus busy time. Profiled times replace missing
    step times, and the whole step missing phase times."""
    phases = model_phases(case.profile)
    if case.step_s is None:
        return case.profiled_wait_s(phases)
    timed_s = {phase.phase: case.run.phase_s(phase.phase) for phase in phases}
    if None in timed_s.values():
        return max(0.0, case.step_s - case.busy_s)
    return sum(max(0.0, (timed_s[phase.phase] or 0.0) - case.per_step(phase.busy_s)) for phase in phases)


def waits_for_host(case: Case) -> bool:
    """True if forward and backward wait for a considerable share of the step, with and without profiler."""
    profile = case.profile
    profiled_s = sum(phase.host_bound_s for phase in model_phases(profile))
    waits = wait_s(case) > CONSIDERABLE * case.length_s
    return profile.device == "cuda" and profiled_s > CONSIDERABLE * profile.window_s and waits


def is_launch_bound(case: Case) -> bool:
    num_launches = case.profile.num_launches / case.profile.num_steps
    return waits_for_host(case) and wait_s(case) <= LONGEST_LAUNCH_S * num_launches


def host_limit(case: Case, saves_s: float) -> str:
    """Warning if Python may not keep up with a step shorter by `saves_s`, else ''. Also '' if the GPU hardly waits:
    with a full queue Python's launches wait for the GPU, so their time is no limit."""
    profile = case.profile
    host = [p.host_s for p in profile.phases if p.host_s is not None]
    waited_s = sum(p.host_bound_s for p in profile.phases)
    if profile.device != "cuda" or not host or waited_s < _NEVER_WAITED * profile.window_s:
        return ""
    host_s, after_s = sum(host) / profile.num_steps, case.length_s - saves_s
    if after_s >= host_s:
        return ""
    if case.step_s is not None and is_launch_bound(case):
        return " Python already limits the step, so it may save less."
    return (
        f" Under the profiler Python took {format_time(host_s)} to launch a step, and takes less without it; if "
        f"that is still more than the predicted {format_time(after_s)}, Python becomes the limit."
    )
