"""The device's waits for Python, with and without the profiler."""

from collections.abc import Sequence

from steplab.explain.case import Case
from steplab.records.profile import PhaseTime, Profile

CONSIDERABLE = 0.10
"""Least share of waiting in a launch-bound step. Every step waits one or two per cent; remedies pay from about a tenth.
"""
LONGEST_LAUNCH_S = 100e-6
"""Longest wait that one launch explains: 5 to 50 µs per operator, up to twice that under a profiler. In longer waits
Python does something else."""

_MODEL = ("forward", "backward")


def model_phases(profile: Profile) -> list[PhaseTime]:
    """Forward and backward, which torch.compile of a model covers; all phases if the trace marks neither."""
    return [phase for phase in profile.phases if phase.phase in _MODEL] or list(profile.phases)


def profiled_wait_s(case: Case, profile: Profile, phases: Sequence[PhaseTime]) -> float:
    """Seconds per step in which the next kernel was not launched yet, including the profiler's slowdown of Python."""
    return case.per_step(profile, sum(phase.host_bound_s for phase in phases))


def wait_s(case: Case, profile: Profile, phases: Sequence[PhaseTime]) -> float:
    """Idle device seconds per step in these phases: unprofiled minus busy time. Profiled times replace missing step
    times, and the whole step missing phase times."""
    if case.step_s is None:
        return profiled_wait_s(case, profile, phases)
    timed_s = {phase.phase: case.phase_s(phase.phase) for phase in phases}
    if None in timed_s.values():
        return max(0.0, case.step_s - case.busy_s(profile))
    return sum(max(0.0, (timed_s[phase.phase] or 0.0) - case.busy_s(profile, [phase])) for phase in phases)


def waits_for_host(case: Case, profile: Profile) -> bool:
    """True if forward and backward wait for a considerable share of the step, with and without profiler."""
    phases = model_phases(profile)
    profiled_share = sum(phase.host_bound_s for phase in phases) / profile.window_s if profile.window_s else 0.0
    waits = wait_s(case, profile, phases) > CONSIDERABLE * case.length_s(profile)
    return profile.device == "cuda" and profiled_share > CONSIDERABLE and waits


def is_launch_bound(case: Case, profile: Profile) -> bool:
    num_launches = profile.num_launches / profile.num_steps
    waiting_s = wait_s(case, profile, model_phases(profile))
    return waits_for_host(case, profile) and waiting_s <= LONGEST_LAUNCH_S * num_launches
