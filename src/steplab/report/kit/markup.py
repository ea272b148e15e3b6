"""Renders a document as Markdown or LaTeX, without its charts."""

from collections.abc import Callable, Iterator, Sequence

from steplab.printing import MARK, plain
from steplab.report.kit.document import Block, Document, Equations, Facts, Pairs, Section, Sentences, Table
from steplab.report.kit.table import sheet


def escape_markdown(text: str) -> str:
    """Escape a text for a paragraph or a table cell of Markdown: it ends no cell and is not read as HTML."""
    for character in "\\`*_[]|":
        text = text.replace(character, "\\" + character)
    return " ".join(plain(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").split())


_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "–": "--",
    "…": r"\ldots{}",
    "µ": r"\textmu{}",
    "·": r"\textperiodcentered{}",
    "×": r"$\times$",
    "−": "$-$",
    "≈": r"$\approx$",
    "→": r"$\rightarrow$",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "γ": r"$\gamma$",
    "√": r"$\surd$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "²": r"\texttwosuperior{}",
    "“": "``",
    "”": "''",
    "’": "'",
    "[": "{[}",  # which would be an argument of a line's end before it
    "*": "{*}",
    "─": "--",
} | {character: "\\" + character for character in "&%$#_{}"}


def escape_latex(text: str) -> str:
    """Escape a text for LaTeX, character by character, so that no escape is escaped twice; pdflatex stops at
    characters that its fonts lack."""
    known = (_LATEX_ESCAPES.get(each, each if each < "\u0100" else "?") for each in plain(text))
    return " ".join("".join(known).split())


def to_markdown(document: Document) -> str:
    """The document in Markdown, without a newline at the end; its title is a heading of the first level."""
    head = [_markdown_heading(document.title, 1), f"<!-- {MARK} -->"] if document.title else []
    return _document(document, [*head, escape_markdown(document.subtitle)], _markdown_heading, _markdown)


def to_latex(document: Document) -> str:
    """The document as LaTeX that pdflatex sets, without a newline at the end."""
    head = [_latex_heading(document.title, 1) if document.title else ""]
    text = _document(document, [*head, escape_latex(document.subtitle)], _latex_heading, _latex)
    return f"{_PREAMBLE}\n\n{text}\n\n\\end{{document}}"


_PREAMBLE = r"""\documentclass{article}
\usepackage[T1]{fontenc}
\usepackage{textcomp,amsmath,array,booktabs,longtable}
\usepackage[margin=2cm]{geometry}
\setlength{\tabcolsep}{4pt}
\begin{document}"""
_LINE_CHARACTERS = 90
"""About the number of characters in a line of a table."""


def _document(
    document: Document, head: Sequence[str], heading: Callable[[str, int], str], write: Callable[[Block], str]
) -> str:
    answer = map(write, document.verdict.blocks())
    parts = (part for section in document.sections for part in _sections(section, 2, heading, write))
    return "\n\n".join(part for part in (*head, *answer, *parts) if part)


def _sections(
    section: Section, level: int, heading: Callable[[str, int], str], write: Callable[[Block], str]
) -> Iterator[str]:
    """The heading and the blocks of a section; nothing if all blocks are charts."""
    parts: list[str] = []
    for block in section.blocks:
        if isinstance(block, Section):
            parts += _sections(block, level + 1, heading, write)
        elif text := write(block):
            parts.append(text)
    if parts:
        yield from [heading(section.title, level), *parts] if section.title else parts


def _markdown_heading(title: str, level: int) -> str:
    return f"{'#' * level} {escape_markdown(title)}"


def _latex_heading(title: str, level: int) -> str:
    name = ("section", "subsection", "subsubsection", "paragraph")[min(level, 4) - 1]
    return rf"\{name}*{{{escape_latex(title)}}}"


def _markdown(block: Block) -> str:
    if isinstance(block, Table):
        return markdown_table(block)
    if isinstance(block, Facts):
        return "\n".join(f"- **{escape_markdown(fact.figure)}** {escape_markdown(fact.text)}" for fact in block.facts)
    if isinstance(block, Pairs):
        return "\n".join(f"- {escape_markdown(name)}: {escape_markdown(value)}" for name, value in block.pairs)
    if isinstance(block, Equations):
        return "\n".join(f"- ${line.latex}$: {escape_markdown(line.what)}" for line in block.lines)
    if not isinstance(block, Sentences):
        return ""
    if block.role == "code":
        return _fenced([plain(text) for text in block.texts])
    texts = [escape_markdown(text) for text in block.texts]
    if block.role == "finding":
        return "\n".join(f"- {text}" for text in texts)
    return "\n\n".join(f"**{text}**" if block.role == "warning" else text for text in texts)


def _fenced(lines: Sequence[str]) -> str:
    """A code block; its fence is longer than any fence in the lines."""
    fence = "```"
    while any(fence in line for line in lines):
        fence += "`"
    return "\n".join((fence, *lines, fence))


def markdown_table(table: Table) -> str:
    """A table with all rows and columns, followed by its caption."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    if not table.rows:
        return escape_markdown(table.empty)
    shown = sheet(table)
    lines = [line([escape_markdown(column.heading) for column in shown.columns])]
    lines.append(line(["---:" if column.quantity.numeric else "---" for column in shown.columns]))
    lines += [line([escape_markdown(cell) for cell in cells]) for cells in shown.rows]
    return "\n".join(lines + (["", escape_markdown(shown.below)] if shown.below else []))


def _latex(block: Block) -> str:
    if isinstance(block, Table):
        return _latex_table(block)
    if isinstance(block, Facts):
        items = [rf"\item \textbf{{{escape_latex(fact.figure)}}} {escape_latex(fact.text)}" for fact in block.facts]
        return "\n".join((r"\begin{itemize}", *items, r"\end{itemize}"))
    if isinstance(block, Pairs):
        items = [rf"\item[{escape_latex(name)}] {escape_latex(value)}" for name, value in block.pairs]
        return "\n".join((r"\begin{description}", *items, r"\end{description}"))
    if isinstance(block, Equations):
        items = [rf"\item ${line.latex}$: {escape_latex(line.what)}" for line in block.lines]
        return "\n".join((r"\begin{itemize}", *items, r"\end{itemize}"))
    if not isinstance(block, Sentences):
        return ""
    if block.role == "code":
        return "\n\n".join(rf"\texttt{{{escape_latex(text)}}}" for text in block.texts)
    texts = [escape_latex(text) for text in block.texts]
    if block.role == "finding":
        return "\n".join((r"\begin{itemize}", *(rf"\item {text}" for text in texts), r"\end{itemize}"))
    return "\n\n".join(rf"\textbf{{{text}}}" if block.role == "warning" else text for text in texts)


def _latex_table(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return " & ".join(escape_latex(cell) for cell in cells) + r" \\"

    if not table.rows:
        return escape_latex(table.empty)
    shown = sheet(table)
    head = [line([column.heading for column in shown.columns]), r"\midrule", r"\endhead"]
    columns = zip(shown.columns, zip(*shown.rows, strict=True), strict=True)
    widths = [max(map(len, (column.heading, *cells))) for column, cells in columns]
    fits = sum(widths) <= _LINE_CHARACTERS
    wrapped = r">{{\raggedright\arraybackslash}}p{{{:.2f}\linewidth}}"
    alignment = "".join(
        "r" if column.quantity.numeric else "l" if fits or width < 20 else wrapped.format(0.8 * width / sum(widths))
        for column, width in zip(shown.columns, widths, strict=True)
    )
    caption = [rf"\caption*{{{escape_latex(shown.below)}}}\\\\"] if shown.below else []
    rows = [line(cells) for cells in shown.rows]
    start = [r"{\footnotesize", rf"\begin{{longtable}}{{{alignment}}}"]
    return "\n".join((*start, *caption, r"\toprule", *head, *rows, r"\bottomrule", r"\end{longtable}", "}"))
