"""Formulas that have a value and can be shown: in symbols, with the figures put in, as text and as LaTeX.

A formula is written once, with Python's operators, and what is shown is what was computed:

    P = Symbol("P", 10)
    (16 * P).value, (16 * P).text(), (16 * P).text(figures=True)     # 160, '16 P', '16 × 10'
"""

import math
from dataclasses import dataclass
from typing import Union

from steplab.units import figure_in_latex, format_figure

Operand = Union["Formula", float, int]
_SUM, _PRODUCT, _POWER, _ATOM = range(4)
"""How tightly a formula holds together: what is looser than its surroundings is put in brackets."""


class Formula:
    """Something that has a value; see the classes below."""

    binding = _ATOM

    @property
    def value(self) -> float:
        """The figure."""
        raise NotImplementedError

    def text(self, *, figures: bool = False) -> str:
        """In plain text: in symbols, or with the figures put in."""
        raise NotImplementedError

    def latex(self, *, figures: bool = False) -> str:
        """In LaTeX's mathematics, without the delimiters."""
        raise NotImplementedError

    def __add__(self, other: Operand) -> "Formula":
        return Sum((self, formula(other)))

    def __sub__(self, other: Operand) -> "Formula":
        return Sum((self, formula(other)), minus=True)

    def __rsub__(self, other: Operand) -> "Formula":
        return Sum((formula(other), self), minus=True)

    def __mul__(self, other: Operand) -> "Formula":
        return Product((*_factors(self), *_factors(formula(other))))

    def __rmul__(self, other: Operand) -> "Formula":
        return Product((*_factors(formula(other)), *_factors(self)))

    def __truediv__(self, other: Operand) -> "Formula":
        return Quotient(self, formula(other))

    def __rtruediv__(self, other: Operand) -> "Formula":
        return Quotient(formula(other), self)

    def __pow__(self, exponent: int) -> "Formula":
        return Power(self, exponent)


@dataclass(frozen=True, slots=True)
class Number(Formula):
    """A constant."""

    figure: float

    @property
    def value(self) -> float:
        return self.figure

    def text(self, *, figures: bool = False) -> str:
        return format_figure(self.figure)

    def latex(self, *, figures: bool = False) -> str:
        return figure_in_latex(self.figure)


@dataclass(frozen=True, slots=True)
class Symbol(Formula):
    """A name with a figure. An underscore begins what is set below: M_X."""

    name: str
    figure: float

    @property
    def value(self) -> float:
        return self.figure

    def text(self, *, figures: bool = False) -> str:
        return format_figure(self.figure) if figures else self.name

    def latex(self, *, figures: bool = False) -> str:
        if figures:
            return figure_in_latex(self.figure)
        head, _, below = self.name.replace("α", r"\alpha").partition("_")
        if len(below) > 1:
            below = rf"\mathrm{{{below}}}"
        return f"{head}_{{{below}}}" if below else head


@dataclass(frozen=True, slots=True)
class Sum(Formula):
    """A sum, or a difference of two."""

    parts: tuple[Formula, ...]
    minus: bool = False
    binding = _SUM

    @property
    def value(self) -> float:
        first, *rest = (part.value for part in self.parts)
        return first - sum(rest) if self.minus else first + sum(rest)

    def text(self, *, figures: bool = False) -> str:
        first, *rest = self.parts
        held = _PRODUCT if self.minus else _SUM
        others = [_held(part, held, figures, quotients=False) for part in rest]
        return (" - " if self.minus else " + ").join([first.text(figures=figures), *others])

    def latex(self, *, figures: bool = False) -> str:
        first, *rest = self.parts
        held = _PRODUCT if self.minus else _SUM
        others = [_held_latex(part, held, figures) for part in rest]
        return (" - " if self.minus else " + ").join([first.latex(figures=figures), *others])


@dataclass(frozen=True, slots=True)
class Product(Formula):
    """A product of several."""

    factors: tuple[Formula, ...]
    binding = _PRODUCT

    @property
    def value(self) -> float:
        return math.prod(factor.value for factor in self.factors)

    def text(self, *, figures: bool = False) -> str:
        return (" × " if figures else " ").join(_held(factor, _PRODUCT, figures) for factor in self.factors)

    def latex(self, *, figures: bool = False) -> str:
        return (r" \cdot " if figures else " ").join(_held_latex(factor, _PRODUCT, figures) for factor in self.factors)


@dataclass(frozen=True, slots=True)
class Quotient(Formula):
    """One formula over another."""

    above: Formula
    below: Formula
    binding = _PRODUCT

    @property
    def value(self) -> float:
        return self.above.value / self.below.value

    def text(self, *, figures: bool = False) -> str:
        below = self.below.text(figures=figures)
        return f"{_held(self.above, _PRODUCT, figures)} / {below if self.below.binding >= _POWER else f'({below})'}"

    def latex(self, *, figures: bool = False) -> str:
        return rf"\frac{{{self.above.latex(figures=figures)}}}{{{self.below.latex(figures=figures)}}}"


@dataclass(frozen=True, slots=True)
class Power(Formula):
    """A formula to a whole power."""

    base: Formula
    exponent: int
    binding = _POWER

    @property
    def value(self) -> float:
        return float(self.base.value**self.exponent)

    def text(self, *, figures: bool = False) -> str:
        raised = {2: "²", 3: "³"}.get(self.exponent, f"^{self.exponent}")
        return f"{_held(self.base, _ATOM, figures)}{raised}"

    def latex(self, *, figures: bool = False) -> str:
        return f"{_held_latex(self.base, _ATOM, figures)}^{{{self.exponent}}}"


@dataclass(frozen=True, slots=True)
class Root(Formula):
    """A square root."""

    inner: Formula

    @property
    def value(self) -> float:
        return math.sqrt(self.inner.value)

    def text(self, *, figures: bool = False) -> str:
        return f"√({self.inner.text(figures=figures)})"

    def latex(self, *, figures: bool = False) -> str:
        return rf"\sqrt{{{self.inner.latex(figures=figures)}}}"


def formula(value: Operand) -> Formula:
    """A number as a formula."""
    return value if isinstance(value, Formula) else Number(value)


def _factors(part: Formula) -> tuple[Formula, ...]:
    return part.factors if isinstance(part, Product) else (part,)


def _held(part: Formula, binding: int, figures: bool, *, quotients: bool = True) -> str:
    """In brackets where it is looser than its surroundings, or (quotients) a quotient among other factors."""
    text = part.text(figures=figures)
    loose = part.binding < binding or (quotients and isinstance(part, Quotient) and binding == _PRODUCT)
    return f"({text})" if loose else text


def _held_latex(part: Formula, binding: int, figures: bool) -> str:
    text = part.latex(figures=figures)
    loose = part.binding < binding and not isinstance(part, Quotient)
    return rf"\left({text}\right)" if loose else text
