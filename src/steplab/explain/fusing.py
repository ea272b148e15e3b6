"""Savings from compiling the model of a profiled step.

Fusing memory-bound operators saves the traffic of every intermediate between them. A profile does not show the
operators' dependencies; a dry run does, and `steplab profile` stores its shares in the profile. Other profiles use the
shares of steps that were recorded eager and compiled.
"""

from dataclasses import dataclass

from steplab.explain.case import ACROSS, Case
from steplab.explain.vocabulary_padding import padding_saves_s
from steplab.records.profile import CompiledShares, Profile

FUSABLE = ("elementwise", "normalisation", "softmax", "reduction", "copy")
MOST_LEFT = CompiledShares(memory_bound=0.41, products=1.0, kernels=0.58, host=0.58)
"""The largest share that compiling left of any of the twelve steps recorded eager and compiled, on an H200
(tests/golden; a test computes it). `host` is assumed to be the kernels' share; products were not compared."""

_LONGEST_GAP_S = 5e-6
"""Longest gap between queued kernels; a longer one waits for another stream, process or event."""
_PRODUCTS = ("matmul", "attention")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fusing:
    shares: CompiledShares
    """Remaining shares: from the dry run if there was one, else the largest of recorded steps."""
    fusable_s: float
    products_s: float
    """Device time that products save: an odd vocabulary is padded, and the clock may change."""
    gaps_s: float
    """Time between a kernel and the next, already launched one: at most a few microseconds a kernel in the profile, and
    at most the timed step's time outside of kernels."""
    num_kernels: float

    @property
    def fused_s(self) -> float:
        return self.fusable_s * (1 - self.shares.memory_bound)

    @property
    def saves_s(self) -> float:
        return self.fused_s + self.products_s + self.gaps_s * (1 - self.shares.kernels)


def fusing_of(case: Case, profile: Profile) -> Fusing:
    shares = profile.compiled or MOST_LEFT
    model = [phase for phase in profile.phases if is_compiled(phase.phase)]

    def seconds(categories: tuple[str, ...]) -> float:
        return case.per_step(profile, sum(phase.categories.get(each, 0.0) for phase in model for each in categories))

    copies = [kernel for kernel in profile.kernels if kernel.category == "copy" and is_compiled(kernel.phase)]
    across_s = case.per_step(profile, sum(kernel.total_s for kernel in copies if ACROSS.search(kernel.name)))
    padding_s = padding_saves_s(case, profile)
    num_kernels = sum(phase.num_kernels for phase in model) / profile.num_steps
    idle_s = case.per_step(profile, sum(phase.idle_s for phase in model))
    gaps_s = min(idle_s, num_kernels * _LONGEST_GAP_S)
    return Fusing(
        shares=shares,
        fusable_s=seconds(FUSABLE) - across_s,
        products_s=padding_s + (seconds(_PRODUCTS) - padding_s) * (1 - shares.products),
        gaps_s=gaps_s if case.step_s is None else max(0.0, min(gaps_s, case.step_s - case.busy_s(profile))),
        num_kernels=num_kernels,
    )


def is_compiled(phase: str) -> bool:
    return phase != "optimizer"
