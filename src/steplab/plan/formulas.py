"""Formulas with a value and a text: in symbols or figures, plain or in LaTeX.

A formula is written once, with Python's operators, so the text shows the computation itself:

    P = symbol("P", 10)
    (16 * P).value, (16 * P).text(), (16 * P).text(figures=True)     # 160, '16 P', '16 × 10'
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Union

from steplab.units import figure_in_latex, format_figure

Operand = Union["Formula", float, int]
_SUM, _PRODUCT, _POWER, _ATOM = range(4)
"""Operator precedence, lowest first; an operand of lower precedence than its surroundings gets brackets."""
_FORMS = _TEXT, _FIGURES, _LATEX, _LATEX_FIGURES = range(4)
_TIMES = (" ", " × ", " ", r" \cdot ")


@dataclass(frozen=True, slots=True)
class Formula:
    value: float
    forms: tuple[str, ...]
    binding: int = _ATOM
    is_quotient: bool = False

    def text(self, *, figures: bool = False) -> str:
        return self.forms[_FIGURES if figures else _TEXT]

    def latex(self, *, figures: bool = False) -> str:
        return self.forms[_LATEX_FIGURES if figures else _LATEX]

    def __add__(self, other: Operand) -> "Formula":
        after = formula(other)
        return _written(self.value + after.value, _SUM, lambda form: f"{self.forms[form]} + {after.held(_SUM, form)}")

    def __sub__(self, other: Operand) -> "Formula":
        after = formula(other)

        def write(form: int) -> str:
            return f"{self.forms[form]} - {after.held(_PRODUCT, form, among_factors=False)}"

        return _written(self.value - after.value, _SUM, write)

    def __rsub__(self, other: Operand) -> "Formula":
        return formula(other) - self

    def __mul__(self, other: Operand) -> "Formula":
        after = formula(other)
        return _written(
            self.value * after.value,
            _PRODUCT,
            lambda form: _TIMES[form].join((self.held(_PRODUCT, form), after.held(_PRODUCT, form))),
        )

    def __rmul__(self, other: Operand) -> "Formula":
        return formula(other) * self

    def __truediv__(self, other: Operand) -> "Formula":
        below = formula(other)

        def write(form: int) -> str:
            under = below.forms[form]
            if form in (_LATEX, _LATEX_FIGURES):
                return rf"\frac{{{self.forms[form]}}}{{{under}}}"
            return f"{self.held(_PRODUCT, form)} / {under if below.binding >= _POWER else f'({under})'}"

        return _written(self.value / below.value, _PRODUCT, write, is_quotient=True)

    def __pow__(self, exponent: int) -> "Formula":
        raised = {2: "²", 3: "³"}.get(exponent, f"^{exponent}")

        def write(form: int) -> str:
            return self.held(_ATOM, form) + (f"^{{{exponent}}}" if form in (_LATEX, _LATEX_FIGURES) else raised)

        return _written(float(self.value**exponent), _POWER, write)

    def held(self, binding: int, form: int, *, among_factors: bool = True) -> str:
        """Text as an operand: in brackets if its precedence is below `binding`.

        In plain text, a quotient among factors gets brackets too.
        """
        written, is_looser = self.forms[form], self.binding < binding
        if form in (_LATEX, _LATEX_FIGURES):
            return rf"\left({written}\right)" if is_looser and not self.is_quotient else written
        return f"({written})" if is_looser or (among_factors and self.is_quotient and binding == _PRODUCT) else written


def _written(value: float, binding: int, write: Callable[[int], str], *, is_quotient: bool = False) -> Formula:
    return Formula(value, tuple(map(write, _FORMS)), binding, is_quotient)


def symbol(name: str, figure: float) -> Formula:
    """A named quantity with its value; an underscore in the name begins a subscript: M_X."""
    head, _, below = name.replace("α", r"\alpha").partition("_")
    if len(below) > 1:
        below = rf"\mathrm{{{below}}}"
    latex = f"{head}_{{{below}}}" if below else head
    return Formula(figure, (name, format_figure(figure), latex, figure_in_latex(figure)))


def root(inner: Formula) -> Formula:
    text, figures, latex, latex_figures = inner.forms
    return Formula(
        math.sqrt(inner.value), (f"√({text})", f"√({figures})", rf"\sqrt{{{latex}}}", rf"\sqrt{{{latex_figures}}}")
    )


def formula(value: Operand) -> Formula:
    if isinstance(value, Formula):
        return value
    text, latex = format_figure(value), figure_in_latex(value)
    return Formula(value, (text, text, latex, latex))
