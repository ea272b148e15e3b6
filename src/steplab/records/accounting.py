"""Accounting for a model at scale: questions, answers and their derivations."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Notation:
    """A formula as text and as LaTeX mathematics."""

    text: str
    latex: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    symbol: Notation
    formula: Notation | None = None
    in_figures: Notation | None = None
    value: float
    unit: str = ""
    """bytes, tokens, devices, s, FLOP/s, bytes/s, or '' for a ratio or count."""
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Means:
    """Technique that lowers the smallest efficient batch per device."""

    what: str
    how: str
    tokens_per_device: float
    """Smallest batch in tokens per device for a compute-bound forward pass with the technique."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    title: str
    answer: str
    figures: tuple[Figure, ...]
    source: str
    remarks: tuple[str, ...] = ()
    means: tuple[Means, ...] = ()
    """Techniques that lower the batch per device; empty if the question needs none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accounting:
    """All questions about one model on one mesh."""

    model: str
    given: tuple[Figure, ...]
    questions: tuple[Question, ...]
