"""What tuning flash_triton on a GPU came to: candidates with raw samples, those that were dropped, and the choice."""

import math
from dataclasses import dataclass
from statistics import geometric_mean, median

from steplab.records.environment import Environment
from steplab.specs.attention import AttentionSpec
from steplab.specs.attention_tuning import TileCandidate, TunedKernel, TuningStudy, box_of


@dataclass(frozen=True, kw_only=True, slots=True)
class TileTrial:
    """One candidate on one shape."""

    candidate: TileCandidate
    """What was tried."""
    shape: AttentionSpec
    """On what."""
    device_s: tuple[float, ...]
    """Seconds of each repeat of this kernel alone, in turns with the others and with a cold cache."""
    flops: float
    """What the kernel executes, masked scores in whole tiles aside: forward two products, the backward sweeps four (dK
    and dV) and three (dQ), each 2 B H S² D, half of it if causal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedTiles:
    """A candidate that may not win."""

    candidate: TileCandidate
    """Which one."""
    why: str
    """'causal, head dimension 80: out of resource: shared memory, ...'"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenTiles:
    """A row for the table."""

    candidate: TileCandidate
    """What was fastest."""
    tokens: int | None = None
    """For sequences up to this long; None: for any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionTuning:
    """All of it."""

    study: TuningStudy
    """What was asked."""
    gpu: str
    """As torch names it, and as the table has it."""
    environment: Environment
    """Where it ran."""
    trials: tuple[TileTrial, ...] = ()
    """Of candidates that were right on every shape."""
    dropped: tuple[DroppedTiles, ...] = ()
    """The others."""
    chosen: tuple[ChosenTiles, ...] = ()
    """The rows for this GPU."""

    def of(self, kernel: TunedKernel, box: int, tokens: int) -> dict[TileCandidate, tuple[TileTrial, ...]]:
        """The trials of each candidate for a kernel, a box and a length: over head dimensions, causal and not."""
        found: dict[TileCandidate, tuple[TileTrial, ...]] = {}
        for trial in self.trials:
            at = trial.candidate.kernel, trial.candidate.box, trial.shape.queries
            if at == (kernel, box, tokens):
                found[trial.candidate] = (*found.get(trial.candidate, ()), trial)
        return found

    def slowdowns(self, kernel: TunedKernel, box: int, tokens: int) -> dict[TileCandidate, float]:
        """How many times as long as the fastest each candidate took, the geometric mean over the shapes."""
        trials = self.of(kernel, box, tokens)
        best: dict[AttentionSpec, float] = {}
        for trial in (trial for of_candidate in trials.values() for trial in of_candidate):
            best[trial.shape] = min(best.get(trial.shape, math.inf), median(trial.device_s))
        return {
            candidate: geometric_mean(median(trial.device_s) / best[trial.shape] for trial in of_candidate)
            for candidate, of_candidate in trials.items()
        }

    @property
    def boxes(self) -> tuple[int, ...]:
        """The boxes of the head dimensions that were asked for."""
        return tuple(dict.fromkeys(box_of(head_dim) for head_dim in self.study.head_dims))
