"""What compiling the model would save of a profiled step.

A multiply, an add or a cast does at most a few FLOPs for each byte that it moves, so it lasts as long as memory takes
to deliver its tensors. One after another, such operators send every intermediate to memory and fetch it back; a
compiler fuses them into kernels that read the inputs and write the output. Which operators feed each other is not in a
profile. A dry run of the step knows it, and its shares are part of a profile that `steplab profile` made; of other
profiles no more is known than how much compiling left of steps that were recorded both ways.
"""

from dataclasses import dataclass

from steplab.explain.case import ACROSS, Case
from steplab.explain.vocabulary_padding import padding_saves_s
from steplab.records.profile import CompiledShares, Profile

FUSABLE = ("elementwise", "normalisation", "softmax", "reduction", "copy")
"""Categories of work that is bound by memory, whatever its size."""
MOST_LEFT = CompiledShares(memory_bound=0.41, products=1.0, kernels=0.58, host=0.58)
"""The most that compiling left of any of the twelve eager steps that were recorded compiled too, on an H200 (in
tests/golden; a test computes it). `host` is taken to be the share of the kernels; of the products nothing is known."""

_LONGEST_GAP_S = 5e-6
"""Longest time between a kernel and the next of a queue; where more passes, another stream, process or event was waited
for."""
_PRODUCTS = ("matmul", "attention")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fusing:
    """What compiling the model changes in a step; all figures are per step."""

    shares: CompiledShares
    """What it leaves: by the dry run where there was one, else the most that it left of recorded steps."""
    fusable_s: float
    """Device time of the kernels that bandwidth bounds, without those of the optimizer, which is not compiled."""
    products_s: float
    """Device time that products save: those of an odd vocabulary are padded, and the clock may change."""
    gaps_s: float
    """Time between one kernel and the next, which was launched already: in the profile, no more than a few microseconds
    a kernel, and no more than the timed step has beside its kernels."""
    num_kernels: float
    """Kernels of all phases but the optimizer's."""

    @property
    def fused_s(self) -> float:
        """Device time that fused kernels save."""
        return self.fusable_s * (1 - self.shares.memory_bound)

    @property
    def saves_s(self) -> float:
        """Device time that is saved, with the gaps before kernels that are no more."""
        return self.fused_s + self.products_s + self.gaps_s * (1 - self.shares.kernels)


def fusing_of(case: Case, profile: Profile) -> Fusing:
    """What compiling the model changes in a profiled step."""
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
    """Whether what runs in a phase is compiled with the model."""
    return phase != "optimizer"
