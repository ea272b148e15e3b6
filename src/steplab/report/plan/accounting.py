"""Reports a model's needs at scale: questions with answers, derivations and sources."""

from collections.abc import Iterator

from steplab import units
from steplab.records.accounting import Accounting, Figure, Means, Question
from steplab.report.kit.document import Column, Document, Equation, Equations, Row, Section, Sentences, Table, Verdict
from steplab.report.kit.quantities import NUMBER

_TOLD_FIRST = (0, 3)


def accounting_document(found: Accounting) -> Document:
    return Document(
        title=f"Accounting for {found.model}",
        verdict=Verdict(sentences=tuple(found.questions[index].answer for index in _TOLD_FIRST)),
        sections=(_given(found), *(_section(question) for question in found.questions)),
        data=tuple(_rows(found)),
    )


def _given(found: Accounting) -> Section:
    return Section.of("Given", Equations(lines=tuple(map(_equation, found.given))))


def _section(question: Question) -> Section:
    equations = Equations(lines=tuple(map(_equation, question.figures))) if question.figures else None
    source = Sentences.of([f"Source: {question.source}."], "note")
    return Section.of(question.title, question.answer, equations, _means(question.means), *question.remarks, source)


def _equation(figure: Figure) -> Equation:
    """Symbol = formula = formula with numbers = result; symbol = value for a given one."""
    notations = [part for part in (figure.symbol, figure.formula, figure.in_figures) if part is not None]
    text = [*(part.text for part in notations), figure_text(figure.value, figure.unit)]
    latex = [*(part.latex for part in notations), figure_latex(figure.value, figure.unit)]
    return Equation(text=" = ".join(text), latex=" = ".join(latex), what=figure.what)


def _means(means: tuple[Means, ...]) -> Table:
    return Table.of(
        "means",
        means,
        (
            Column(key="what", header="means"),
            Column(
                key="tokens_per_device",
                header="tokens a device",
                quantity=NUMBER,
                value=lambda one: round(one.tokens_per_device),
            ),
            Column(key="how", wraps_from=30),
        ),
        "Least batch with a compute-bound forward pass.",
    )


def figure_text(value: float, unit: str) -> str:
    """Example: '3.52 TB', '319 tokens', '2.42 ms'; three digits or more."""
    if unit == "bytes":
        return units.format_message(value)
    if unit == "s":
        return units.format_time(value)
    return f"{units.format_figure(value)} {unit}".rstrip()


def figure_latex(value: float, unit: str) -> str:
    if unit in ("bytes", "s"):
        number, scaled = figure_text(value, unit).replace("µ", r"\mu ").split(" ", 1)
        return rf"{number}~\mathrm{{{scaled}}}"
    return units.figure_in_latex(value) + (f"~\\mathrm{{{unit}}}" if unit else "")


def _rows(found: Accounting) -> Iterator[Row]:
    for figure in found.given:
        yield _row("given", "", figure.what, symbol=figure.symbol.text, value=figure.value, unit=figure.unit)
    for question in found.questions:
        yield _row("answer", question.title, question.answer, source=question.source)
        for figure in question.figures:
            yield _row(
                "figure",
                question.title,
                figure.what,
                symbol=figure.symbol.text,
                formula=figure.formula.text if figure.formula else None,
                value=figure.value,
                unit=figure.unit,
                source=question.source,
            )
        for one in question.means:
            value = one.tokens_per_device
            yield _row("means", question.title, one.what, formula=one.how, value=value, unit="tokens")


def _row(row: str, question: str, what: str, **more: str | float | None) -> Row:
    empty = dict.fromkeys(("symbol", "formula", "value", "unit", "source"))
    return {"row": row, "question": question, "what": what, **empty, **more}
