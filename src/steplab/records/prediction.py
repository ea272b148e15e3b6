"""Predicted memory of a step, by the categories of measured memory."""

from dataclasses import dataclass, field
from typing import Literal

from steplab.records.run import ModelFacts
from steplab.specs.step import StepSpec, describe
from steplab.units import format_bytes

PredictionKind = Literal["dry_run", "traced", "estimate", "at_least"]
"""dry_run: all operators were followed. traced: torch ran some on tensors without data, so memory inside most of their
kernels is unknown. estimate: unknown operators count with typical sizes. at_least: some operators are omitted, so the
peak is a lower bound.
"""

FitVerdict = Literal["fits", "too tight to promise", "does not fit", "not known"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """Equal tensors as one summand of a predicted peak, for checking it by hand."""

    category: str
    """One of memory_profile.MEMORY_CATEGORIES."""
    what: str
    """Description, such as 'attention scores, after the mask'."""
    formula: str
    """Bytes of one tensor in the symbols of docs/memory_formulas.md, such as '4 B h T²'."""
    num_bytes: int
    count: int = 1
    """Number of such tensors, for example one per block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CardFit:
    gpu: str
    usable_bytes: int
    usable_is_known: bool
    """True if `usable_bytes` was read from such a GPU; else it is a cautious share of the stated memory."""
    verdict: FitVerdict
    """By `usable_bytes`. fits: at least the prediction's `safe_device_bytes`. does not fit: less than its
    `least_device_bytes`. too tight to promise: between the two. not known: enough for a peak that is a lower bound.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Peak of a group of ranks with equal work, predicted for the first, whose shards are largest."""

    ranks: str
    first_rank: int
    num_ranks: int
    has: str
    """Model parts on these ranks, such as 'embedding, blocks 0 to 7'."""
    in_flight: int
    """Most microbatches in flight at once; 1 without a pipeline."""
    peak_bytes: int
    peak_phase: str
    peak_where: str
    phase_peaks: dict[str, int]
    reserved_bytes: int
    terms: tuple[Term, ...]
    parameters_bytes: int
    gradients_bytes: int
    """Bytes of these ranks' gradients before the update."""
    optimizer_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class MemoryPrediction:
    """Peak memory of a step by category, from a dry run with a model of the allocator."""

    peak_bytes: int
    at_peak: dict[str, int]
    """Bytes by category at the peak; they sum to `peak_bytes`."""
    peak_phase: str
    peak_where: str
    """Place in the step, such as 'backward of the last block, gradient of the softmax'."""
    terms: tuple[Term, ...]
    phase_peaks: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    kind: PredictionKind = "dry_run"
    """How complete `peak_bytes` is: a dry run's result, an estimate, or a lower bound."""
    reserved_bytes: int | None = None
    """Most bytes that the allocator would reserve on a large device; None: not predicted."""
    least_device_bytes: int | None = None
    """Device memory below which the step fails: the peak plus memory outside the allocator; None: unknown."""
    safe_device_bytes: int | None = None
    """Device memory that is certainly enough, with room for fragmentation; None: unknown."""
    cards: tuple[CardFit, ...] = ()
    """Fit on each known GPU that supports the step's attention, largest memory first."""
    rank: str = ""
    """Ranks with the highest peak, such as 'ranks 0 to 3', which the other fields describe; empty: one process."""
    ranks: tuple[RankMemory, ...] = ()
    """Peak per group of ranks with equal work, in pipeline order; empty: one process."""
    model: ModelFacts | None = None
    spec: StepSpec | None = None
    schema: str = "steplab.memory_prediction/1"

    def __repr__(self) -> str:
        step = f"{describe(self.spec)}: " if self.spec else ""
        return f"<{type(self).__name__} {step}{format_bytes(self.peak_bytes)} in {self.peak_phase}>"
