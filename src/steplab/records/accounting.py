"""What was derived of a model at scale: questions, answers, and the lines that lead to them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Notation:
    """A formula as text and as LaTeX's mathematics, without delimiters."""

    text: str
    """The formula in characters, as for a terminal."""
    latex: str
    """The formula for LaTeX's mathematics mode."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One symbol with its figure, and where it comes from."""

    symbol: Notation
    """M_X."""
    formula: Notation | None = None
    """In symbols; None: it is given."""
    in_figures: Notation | None = None
    """The formula with the figures put in."""
    value: float
    """What comes out, in base units."""
    unit: str = ""
    """bytes, tokens, devices, s, FLOP/s, bytes/s, or '' for a ratio or a count."""
    what: str
    """What the symbol stands for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Means:
    """Something that lowers the batch a device needs."""

    what: str
    """What it is."""
    how: str
    """How it does that."""
    tokens_per_device: float
    """The batch from which on the forward pass is compute-bound with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question, its answer in one sentence, and how that comes about."""

    title: str
    """The question."""
    answer: str
    """With its figure."""
    figures: tuple[Figure, ...]
    """The derivation, line by line."""
    source: str
    """Where the formulas come from."""
    remarks: tuple[str, ...] = ()
    """Assumptions, in whole sentences."""
    means: tuple[Means, ...] = ()
    """For a question about what can be done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accounting:
    """All questions about one model on one mesh of devices."""

    model: str
    """What it is called."""
    given: tuple[Figure, ...]
    """What all questions start from."""
    questions: tuple[Question, ...]
    """In the order they are asked."""
