"""Predictions of the memory of a step, by the categories in which it is measured."""

from dataclasses import dataclass, field
from typing import Literal

from steplab.specs.step import StepSpec, describe
from steplab.units import format_bytes

PredictionKind = Literal["dry_run", "traced", "estimate", "at_least"]
"""How a prediction was made. dry_run: the operators of the step were followed one by one. traced: so were those that
torch ran on tensors without content; what a kernel takes for itself is known of few of them. estimate: some of them are
not known, and usual ones were assumed. at_least: some are left out, so that the peak is a lower bound."""

FitVerdict = Literal["fits", "too tight to promise", "does not fit", "not known"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One term of a prediction, with which a reader can check the sum by hand."""

    category: str
    """Category of the memory, one of memory_profile.MEMORY_CATEGORIES."""
    what: str
    """What the memory is for, such as 'attention scores, after the mask'."""
    formula: str
    """Formula for one tensor in the symbols of docs/memory_formulas.md, such as '4 B h T²'."""
    num_bytes: int
    """Bytes of one tensor by the formula."""
    count: int = 1
    """Number of such tensors in the sum, such as one per block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CardFit:
    """Whether the step fits one GPU."""

    gpu: str
    """Name of the GPU in the catalogue of hardware."""
    usable_bytes: int
    """Memory of the GPU that a program can use, in bytes."""
    usable_is_known: bool
    """Whether `usable_bytes` was read from such a card; otherwise it is a cautious share of the stated capacity."""
    verdict: FitVerdict
    """fits: the GPU has at least `safe_device_bytes`. does not fit: it has less than `least_device_bytes`. too tight to
    promise: its memory is between the two. not known: the prediction is a lower bound, which would fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """The peak of the ranks of a layout that do the same, of the first one, which has the largest shards."""

    ranks: str
    """The ranks in words, such as 'ranks 0 to 3'."""
    first_rank: int
    """Number of the first of them."""
    num_ranks: int
    """Number of ranks."""
    has: str
    """Parts of the model that they have, such as 'embedding, blocks 0 to 7'."""
    in_flight: int
    """Most microbatches in flight at once; 1 without a pipeline."""
    peak_bytes: int
    """Most bytes allocated at once."""
    peak_phase: str
    """Phase of the peak."""
    peak_where: str
    """Moment of the peak in words."""
    phase_peaks: dict[str, int]
    """Most bytes allocated at once in each phase."""
    reserved_bytes: int
    """Most bytes that the allocator reserves, including its cache."""
    terms: tuple[Term, ...]
    """The terms of the peak."""
    parameters_bytes: int
    """Bytes of the weights that a rank keeps."""
    gradients_bytes: int
    """Bytes of their gradients before the update."""
    optimizer_bytes: int
    """Bytes of the optimizer's state."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class MemoryPrediction:
    """The peak of a step by category, from a dry run of its operators with a model of the allocator."""

    peak_bytes: int
    """Most bytes allocated at once, the sum of the values of `at_peak`."""
    at_peak: dict[str, int]
    """Bytes by category at the peak, as MemoryProfile.at_peak."""
    peak_phase: str
    """Phase of the peak."""
    peak_where: str
    """Moment of the peak in words, such as 'backward of the last block, gradient of the softmax'."""
    terms: tuple[Term, ...]
    """The terms of the prediction."""
    phase_peaks: dict[str, int] = field(default_factory=dict)
    """Most bytes allocated at once in each phase."""
    notes: tuple[str, ...] = ()
    """What is assumed, and what is left out."""
    kind: PredictionKind = "dry_run"
    """How the prediction was made: `peak_bytes` is a dry run's result, an estimate, or a lower bound."""
    reserved_bytes: int | None = None
    """Most bytes that the allocator reserves on a device with ample memory, including its cache; None: not
    predicted."""
    least_device_bytes: int | None = None
    """Least memory of a device that can run the step: the peak and memory outside of the allocator; None: not known."""
    safe_device_bytes: int | None = None
    """Memory of a device that is sure to run the step, including room for fragmentation; None: not known."""
    cards: tuple[CardFit, ...] = ()
    """Whether the step fits each GPU of the catalogue that has a kernel for its attention, the largest GPU first."""
    rank: str = ""
    """Ranks of a layout that need most and that the other figures are of, such as 'ranks 0 to 3'; empty for a step of
    one process."""
    ranks: tuple[RankMemory, ...] = ()
    """The peak of every group of ranks of a layout that do the same, in the order of the pipeline; empty for a step of
    one process."""
    spec: StepSpec | None = None
    """The predicted step; None: not stored."""
    schema: str = "steplab.memory_prediction/1"
    """Format of this record."""

    def __repr__(self) -> str:
        step = f"{describe(self.spec)}: " if self.spec else ""
        return f"<{type(self).__name__} {step}{format_bytes(self.peak_bytes)} in {self.peak_phase}>"
