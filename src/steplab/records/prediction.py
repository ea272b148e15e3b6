"""What a step is predicted to need, in the terms in which it is measured."""

from dataclasses import dataclass, field
from typing import Literal

from steplab.specs.step import StepSpec

PREDICTION_SCHEMA = "steplab.memory_prediction/1"

PredictionKind = Literal["dry_run", "estimate", "at_least"]
"""dry_run: the operators of the step were followed one by one. estimate: a part of them is not known, and was taken to
be what is usual. at_least: a part is left out, so that the peak is a lower bound."""

Verdict = Literal["fits", "too tight to promise", "does not fit", "not known"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One summand of a prediction, so that a reader can check the sum by hand."""

    category: str
    """As in memory_profile.MEMORY_CATEGORIES."""
    what: str
    """'attention scores, after the mask'."""
    formula: str
    """In the symbols of docs/memory_formulas.md: '4 B h T²', of one tensor."""
    num_bytes: int
    """Its value."""
    count: int = 1
    """How many times it is in the sum (blocks); `num_bytes` is of one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CardFit:
    """Whether the step fits one GPU."""

    gpu: str
    """As the catalogue of hardware calls it."""
    usable_bytes: int
    """What a program has of its memory."""
    usable_is_known: bool
    """Whether that was read from such a card; else it is a share of the data sheet's capacity, on the safe side."""
    verdict: Verdict
    """fits: it has `safe_device_bytes`. does not fit: it has not even `least_device_bytes`. too tight to promise: what
    it has is between the two. not known: the prediction is a lower bound, and that would fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPrediction:
    """The peak of a step by category, from a dry run of its operators with a model of the allocator."""

    peak_bytes: int
    """Most bytes allocated at once; the values of `at_peak` sum to it."""
    at_peak: dict[str, int]
    """Bytes by category, as MemoryProfile.at_peak."""
    peak_phase: str
    """Phase of the peak."""
    peak_where: str
    """Moment of the peak, in words: 'backward of the last block, gradient of the softmax'."""
    terms: tuple[Term, ...]
    """The summands."""
    phase_peaks: dict[str, int] = field(default_factory=dict)
    """Most bytes allocated within each phase."""
    notes: tuple[str, ...] = ()
    """What is assumed, and what is left out."""
    kind: PredictionKind = "dry_run"
    """What `peak_bytes` is: exact as far as the dry run is, an estimate, or a lower bound."""
    reserved_bytes: int | None = None
    """Most bytes the allocator holds from a device that has plenty, its cache included; None: not followed."""
    least_device_bytes: int | None = None
    """What a device must have for the step at the very least: the peak, and what lies outside of the allocator."""
    safe_device_bytes: int | None = None
    """With how much it is sure to run, fragmentation allowed for; None: not known."""
    cards: tuple[CardFit, ...] = ()
    """The GPUs of the catalogue, the largest first."""
    spec: StepSpec | None = None
    """The step; None: not said."""
    schema: str = field(default=PREDICTION_SCHEMA)
    """Format of this record."""
