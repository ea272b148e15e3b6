"""What a step is predicted to need, in the terms in which it is measured."""

from dataclasses import dataclass, field

PREDICTION_SCHEMA = "steplab.memory_prediction/1"


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
class MemoryPrediction:
    """The peak of a step, by category, from closed forms."""

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
    schema: str = field(default=PREDICTION_SCHEMA)
    """Format of this record."""
