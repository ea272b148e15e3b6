"""Accounting for a model at scale: questions, answers and their derivations."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Notation:
    """A formula as text and as LaTeX mathematics."""

    text: str
    """The formula in plain characters."""
    latex: str
    """LaTeX source without delimiters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A symbol, its value and its derivation."""

    symbol: Notation
    """Symbol, such as M_X."""
    formula: Notation | None = None
    """Formula in symbols; None: a given value."""
    in_figures: Notation | None = None
    """Formula with numbers inserted."""
    value: float
    """Result in base units."""
    unit: str = ""
    """bytes, tokens, devices, s, FLOP/s, bytes/s, or '' for a ratio or count."""
    what: str
    """Meaning of the symbol."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Means:
    """A technique that lowers the batch per device needed."""

    what: str
    """Name of the technique."""
    how: str
    """Its mechanism."""
    tokens_per_device: float
    """Smallest batch for a compute-bound forward pass with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question, its answer and the derivation."""

    title: str
    """The question itself."""
    answer: str
    """One sentence with the number."""
    figures: tuple[Figure, ...]
    """Derivation, line by line."""
    source: str
    """Source of the formulas."""
    remarks: tuple[str, ...] = ()
    """Assumptions, as sentences."""
    means: tuple[Means, ...] = ()
    """Techniques that help; empty if the question asks for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accounting:
    """All questions about one model on one mesh."""

    model: str
    """Name of the model."""
    given: tuple[Figure, ...]
    """Starting values of all questions."""
    questions: tuple[Question, ...]
    """Questions in the order asked."""
