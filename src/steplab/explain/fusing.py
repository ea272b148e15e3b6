"""What compiling the model would leave of a profiled step.

A multiply, an add or a cast does at most a few FLOPs for each byte that it moves, so it lasts as long as memory takes
to deliver its tensors. One after another, such operators send every intermediate to memory and fetch it back; a
compiler fuses them into kernels that read the inputs and write the output. Which operators feed each other is not in a
profile. A dry run of the step knows it, and its shares are part of a profile that `steplab profile` made; of other
profiles no more is known than how much compiling left of steps that were recorded both ways.
"""

import re
from collections import defaultdict

from steplab.explain.case import Case
from steplab.explain.vocabulary_padding import padding_saves_s
from steplab.records.profile import CompiledShares, Profile

FUSABLE = ("elementwise", "normalisation", "softmax", "reduction", "copy")
"""Categories of work that is bound by memory, whatever its size."""
MOST_LEFT = CompiledShares(memory_bound=0.41, products=1.0, kernels=0.58, host=0.58)
"""The most that compiling left of any of the twelve eager steps that were recorded compiled too, on an H200 (in
tests/golden; a test computes it). `host` is taken to be the share of the kernels; of the products nothing is known."""

_PRODUCTS = ("matmul", "attention")
_ACROSS = re.compile(r"HtoD|DtoH|Host|Pageable|Pinned")
"""Matches the names of copies between host and device, which no compiler fuses."""


def shares_of(profile: Profile) -> CompiledShares:
    """What compiling leaves: by the dry run where there was one, else the most that it left of recorded steps."""
    return profile.compiled or MOST_LEFT


def fusable_s(case: Case, profile: Profile) -> float:
    """Device time per step of the model's kernels that bandwidth bounds. The optimizer's are not compiled with it."""
    copies = [kernel for kernel in profile.kernels if kernel.category == "copy" and _in_model(kernel.phase)]
    across_s = sum(kernel.total_s for kernel in copies if _ACROSS.search(kernel.name))
    return _per_step(case, profile, FUSABLE) - case.per_step(profile, across_s)


def most_fusable(case: Case, profile: Profile, number: int) -> list[tuple[str, float]]:
    """The ranges, with their phases, in which most of that time is spent, and the time per step."""
    found = defaultdict[str, float](float)
    for op in profile.ops:
        if op.range and op.category in FUSABLE and _in_model(op.phase):
            found[f"{op.range} {op.phase}"] += case.per_step(profile, op.device_s)
    return sorted(found.items(), key=lambda place: -place[1])[:number]


def moved_by(profile: Profile) -> tuple[float, float] | None:
    """The bytes that such operators move per step, and their FLOPs per byte, where the record counts both."""
    ops = [op for op in profile.ops if op.category in FUSABLE and _in_model(op.phase) and op.flops is not None]
    moved = sum(op.moved_bytes or 0.0 for op in ops)
    if not moved:
        return None
    return moved / profile.num_steps, sum(op.flops or 0.0 for op in ops if op.moved_bytes) / moved


def fusing_saves_s(case: Case, profile: Profile) -> float:
    """Device time per step that fused kernels save."""
    return fusable_s(case, profile) * (1 - shares_of(profile).memory_bound)


def fewer_kernels(profile: Profile) -> float:
    """Kernels per step that fusing saves."""
    kernels = sum(phase.num_kernels for phase in profile.phases if _in_model(phase.phase))
    return kernels * (1 - shares_of(profile).kernels) / profile.num_steps


def products_save_s(case: Case, profile: Profile) -> float:
    """Device time per step that products save: those of an odd vocabulary are padded, and the clock may change."""
    padding_s = padding_saves_s(case, profile)
    return padding_s + (_per_step(case, profile, _PRODUCTS) - padding_s) * (1 - shares_of(profile).products)


def gaps_s(case: Case, profile: Profile) -> float:
    """Time per step between one kernel and the next, which was launched already: in the profile, and no more than the
    timed step has beside its kernels."""
    seen_s = case.per_step(profile, sum(phase.idle_s for phase in profile.phases if _in_model(phase.phase)))
    return seen_s if case.step_s is None else max(0.0, min(seen_s, case.step_s - case.busy_s(profile)))


def _per_step(case: Case, profile: Profile, categories: tuple[str, ...]) -> float:
    model = tuple(phase.phase for phase in profile.phases if _in_model(phase.phase))
    return case.per_step(profile, sum(profile.category_s(each, model) for each in categories))


def _in_model(phase: str) -> bool:
    return phase != "optimizer"
