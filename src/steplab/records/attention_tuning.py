"""The result of tuning flash_triton on a GPU: candidates with raw samples, dropped candidates, and the choice."""

import math
from dataclasses import dataclass
from statistics import geometric_mean, median

from steplab.records.environment import Environment
from steplab.specs.attention import AttentionSpec
from steplab.specs.attention_tuning import TileCandidate, TunedKernel, TuningStudy, box_of


@dataclass(frozen=True, kw_only=True, slots=True)
class TileTrial:
    """The timing of one candidate on one shape."""

    candidate: TileCandidate
    """The candidate that was timed."""
    shape: AttentionSpec
    """The shape that it was timed on."""
    device_s: tuple[float, ...]
    """Seconds of each repeat of this kernel alone, in turns with the other candidates and with a cold cache."""
    flops: float
    """FLOPs that the kernel executes, without masked scores in whole tiles: two products forward, four (dK and dV) and
    three (dQ) in the backward sweeps, each 2 B H S² D, half of it if causal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedTiles:
    """A candidate that was excluded from the choice."""

    candidate: TileCandidate
    """The excluded candidate."""
    why: str
    """The reason, such as 'causal, head dimension 80: out of resource: shared memory, ...'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenTiles:
    """A row for the table of tiles."""

    candidate: TileCandidate
    """The chosen candidate."""
    tokens: int | None = None
    """Longest sequence in tokens that the row is for; None: any length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionTuning:
    """The result of tuning on one GPU."""

    study: TuningStudy
    """The study as requested."""
    gpu: str
    """Name of the GPU, by torch and in the table."""
    environment: Environment
    """Where the tuning ran."""
    trials: tuple[TileTrial, ...] = ()
    """Timings of the candidates whose results were right on every shape."""
    dropped: tuple[DroppedTiles, ...] = ()
    """The candidates that were excluded."""
    chosen: tuple[ChosenTiles, ...] = ()
    """The rows for this GPU."""

    def of(self, kernel: TunedKernel, box: int, tokens: int) -> dict[TileCandidate, tuple[TileTrial, ...]]:
        """The trials of each candidate for a kernel, a tile width and a length: all head dimensions, causal and not."""
        found: dict[TileCandidate, tuple[TileTrial, ...]] = {}
        for trial in self.trials:
            at = trial.candidate.kernel, trial.candidate.box, trial.shape.queries
            if at == (kernel, box, tokens):
                found[trial.candidate] = (*found.get(trial.candidate, ()), trial)
        return found

    def slowdowns(self, kernel: TunedKernel, box: int, tokens: int) -> dict[TileCandidate, float]:
        """Time of each candidate divided by that of the fastest, as the geometric mean over the shapes."""
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
        """The tile widths of the requested head dimensions."""
        return tuple(dict.fromkeys(box_of(head_dim) for head_dim in self.study.head_dims))
