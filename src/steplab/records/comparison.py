"""How two sets of samples, and two records, differ."""

from dataclasses import dataclass
from typing import Literal

Decision = Literal["higher", "lower", "same", "undecided"]
"""higher, lower: B differs from A by more than the threshold. same: by no more than that. undecided: the samples do not
tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """The median of B over the median of A, with what the samples say about it."""

    a: float
    """Median of A, in the samples' unit."""
    b: float
    """Median of B, in the same unit."""
    num_a: int
    """Number of samples of A."""
    num_b: int
    """Number of samples of B."""
    ratio: float
    """b / a; in turns, after what slowed both sides was divided out."""
    low: float | None
    """Lower end of the 95 % bootstrap interval of the ratio; None: too few samples for one."""
    high: float | None
    """Upper end of the interval; None: too few samples for one."""
    p: float | None
    """Probability of ranks at least this far apart if A and B are alike (Mann and Whitney); None: too few samples."""
    threshold: float
    """Smallest difference that matters, as a share: 0.01 for 1 %."""
    decision: Decision
    """What the interval and the test allow to be said."""
    more: int | None = None
    """If undecided: about how many further samples, or turns, of each side would decide; None: too many to be worth
    taking, or the ratio is about the threshold itself, which no number decides."""

    @property
    def exceeds(self) -> bool | None:
        """Whether B is higher than A by more than the threshold; None if that is undecided."""
        if self.decision == "higher":
            return True
        return None if self.high is None or self.high > 1 + self.threshold else False
