"""Predicted memory of a step, by the measured categories."""

from dataclasses import dataclass, field
from typing import Literal

from steplab.records.run import ModelFacts
from steplab.specs.step import StepSpec, describe
from steplab.units import format_bytes

PredictionKind = Literal["dry_run", "traced", "estimate", "at_least"]
"""dry_run: all operators were followed. traced: also those that torch ran without content; few kernels' own memory is
known. estimate: unknown operators got usual sizes. at_least: some are omitted; the peak is a lower bound.
"""

FitVerdict = Literal["fits", "too tight to promise", "does not fit", "not known"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """A term of a prediction, for checking the sum by hand."""

    category: str
    """One of memory_profile.MEMORY_CATEGORIES."""
    what: str
    """Purpose, such as 'attention scores, after the mask'."""
    formula: str
    """Formula for one tensor in the symbols of docs/memory_formulas.md, such as '4 B h T²'."""
    num_bytes: int
    count: int = 1
    """Number of tensors, such as one per block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CardFit:
    gpu: str
    usable_bytes: int
    usable_is_known: bool
    """True if read from a card of this kind; else a cautious share of the stated capacity."""
    verdict: FitVerdict
    """fits: at least `safe_device_bytes`. does not fit: below `least_device_bytes`. too tight to promise: between them.
    not known: a lower bound, which would fit.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Peak of the ranks of a layout that do the same, taken from the first, with the largest shards."""

    ranks: str
    first_rank: int
    num_ranks: int
    has: str
    """Their parts of the model, such as 'embedding, blocks 0 to 7'."""
    in_flight: int
    """Most microbatches in flight; 1 without a pipeline."""
    peak_bytes: int
    peak_phase: str
    peak_where: str
    phase_peaks: dict[str, int]
    reserved_bytes: int
    terms: tuple[Term, ...]
    parameters_bytes: int
    gradients_bytes: int
    """Bytes of their gradients before the update."""
    optimizer_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class MemoryPrediction:
    """Peak of a step by category, from a dry run with a model of the allocator."""

    peak_bytes: int
    """Peak of allocated bytes, the sum of `at_peak`."""
    at_peak: dict[str, int]
    """Bytes by category at the peak, as MemoryProfile.at_peak."""
    peak_phase: str
    peak_where: str
    """Moment in words, such as 'backward of the last block, gradient of the softmax'."""
    terms: tuple[Term, ...]
    phase_peaks: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    kind: PredictionKind = "dry_run"
    """Method: `peak_bytes` is a dry run's result, an estimate, or a lower bound."""
    reserved_bytes: int | None = None
    """Most bytes reserved on a large device, including the cache; None: not predicted."""
    least_device_bytes: int | None = None
    """Least device memory for the step: the peak plus memory outside the allocator; None: unknown."""
    safe_device_bytes: int | None = None
    """Device memory that surely suffices, with room for fragmentation; None: unknown."""
    cards: tuple[CardFit, ...] = ()
    """Fit on each known GPU with a kernel for its attention, largest first."""
    rank: str = ""
    """Ranks that need most, described by the other figures, such as 'ranks 0 to 3'; empty: one process."""
    ranks: tuple[RankMemory, ...] = ()
    """Peak per group of equal ranks, in pipeline order; empty: one process."""
    model: ModelFacts | None = None
    spec: StepSpec | None = None
    schema: str = "steplab.memory_prediction/1"

    def __repr__(self) -> str:
        step = f"{describe(self.spec)}: " if self.spec else ""
        return f"<{type(self).__name__} {step}{format_bytes(self.peak_bytes)} in {self.peak_phase}>"
