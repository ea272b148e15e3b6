import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from steplab.printing import MARK, plain
from steplab.report.kit import document as documents
from steplab.report.kit.pictures import Beside
from steplab.report.kit.table import Sheet, sheet


def escape_markdown(text: str) -> str:
    """Escape a text for a Markdown paragraph or table cell, HTML included."""
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
    "[": "{[}",  # after \\, LaTeX would read a bare bracket as its argument
    "*": "{*}",
    "─": "--",
} | {character: "\\" + character for character in "&%$#_{}"}


def escape_latex(text: str) -> str:
    """Escape a text for LaTeX; characters outside pdflatex's fonts become '?'."""
    known = (_LATEX_ESCAPES.get(each, each if each < "\u0100" else "?") for each in plain(text))
    return " ".join("".join(known).split())


def to_markdown(document: documents.Document, beside: Beside | None = None) -> str:
    """Markdown without a final newline; the title is a first-level heading."""
    return "\n\n".join(filter(None, _Markdown(beside).document(document)))


def to_latex(document: documents.Document, beside: Beside | None = None) -> str:
    """LaTeX file for pdflatex, without a final newline."""
    parts = filter(None, _Latex(beside).document(document))
    return "\n\n".join((_PREAMBLE, *parts, _END))


def one_document(made: Sequence[str]) -> str:
    inside = (text.removeprefix(_PREAMBLE).removesuffix(_END).strip() for text in made)
    return "\n\n".join((_PREAMBLE, *inside, _END))


def markdown_table(table: documents.Table) -> str:
    return _Markdown(None).block(table)


_PREAMBLE = r"""\documentclass{article}
\usepackage[T1]{fontenc}
\usepackage{textcomp,amsmath,array,booktabs,graphicx,longtable}
\usepackage[margin=2cm]{geometry}
\IfFileExists{lmodern.sty}{\usepackage{lmodern}}{}
\setlength{\parindent}{0pt}\setlength{\parskip}{4pt}
\setlength{\tabcolsep}{4pt}
\renewcommand{\_}{\textunderscore\allowbreak}
\setcounter{secnumdepth}{0}
\setcounter{tocdepth}{2}
\newcommand{\drawn}[3]{\begin{center}\includegraphics[width=#1,height=0.8\textheight,keepaspectratio]{#2}\\*
\refstepcounter{figure}\label{#2}{\small Figure \thefigure: #3}\end{center}}
\begin{document}"""
_END = r"\end{document}"
_LINE_CHARACTERS = 90
_LINE_PT = 480


class _Markdown:
    escape = staticmethod(escape_markdown)

    def __init__(self, beside: Beside | None) -> None:
        """`beside` collects pictures and long tables as files; None: no pictures, and tables in full."""
        self.beside = beside

    def document(self, document: documents.Document) -> Iterator[str]:
        yield self.title(document.title) if document.title else ""
        yield self.escape(document.subtitle)
        yield from map(self.block, document.verdict.blocks())
        if self.beside and (listed := [section.title for section in document.sections if section.anchor]):
            yield self.contents(listed)
        for section in document.sections:
            yield from self._section(section, 2)

    def _section(self, section: documents.Section, level: int) -> Iterator[str]:
        parts: list[str] = []
        for block in section.blocks:
            if self.beside and section.title:
                self.beside.heading = section.title
            parts += self._section(block, level + 1) if isinstance(block, documents.Section) else [self.block(block)]
        if parts := [part for part in parts if part]:
            yield from [self.heading(section.title, level), *parts] if section.title else parts

    def block(self, block: documents.Block) -> str:
        match block:
            case documents.Table():
                return self._table(block)
            case documents.Facts():
                return self.listed(f"{self.strong(self.escape(f.figure))} {self.escape(f.text)}" for f in block.facts)
            case documents.Pairs():
                return self.pairs((self.escape(name), self.escape(value)) for name, value in block.pairs)
            case documents.Equations():
                return self.listed(f"${line.latex}$: {self.escape(line.what)}" for line in block.lines)
            case documents.Sentences(role="code"):
                return self.code(block.texts)
            case documents.Sentences():
                texts = [self.escape(text) for text in block.texts]
                if block.role == "finding":
                    return self.listed(texts)
                return "\n\n".join(self.strong(text) if block.role == "warning" else text for text in texts)
            case documents.Chart() | documents.Bars() | documents.Deferred() if self.beside:
                return self._pictures(block.draw() if isinstance(block, documents.Deferred) else block, self.beside)
        return ""

    def _pictures(self, block: documents.Chart | documents.Bars | None, beside: Beside) -> str:
        if block is None:
            return ""
        found = []
        for path, one in beside.pictures(block):
            words = ", ".join(filter(None, (one.title or beside.heading, one.subtitle)))
            found.append(self.picture(path, self.escape(words), one.width))
        return "\n\n".join([*found, *filter(None, [self.escape(block.note)])])

    def _table(self, table: documents.Table) -> str:
        if not table.rows:
            return self.escape(table.empty)
        if self.beside is None or len(table.rows) <= max(documents.MOST_ROWS, table.first or 0):
            return self.table(sheet(table))
        path = self.beside.table(table)
        first = replace(sheet(table), rows=sheet(table).rows[: table.first or documents.MOST_ROWS])
        return f"{self.table(first)}\n\n{self.rest(len(table.rows), path)}"

    def title(self, title: str) -> str:
        return f"{self.heading(title, 1)}\n\n<!-- {MARK} -->"

    def heading(self, title: str, level: int) -> str:
        return f"{'#' * level} {self.escape(title)}"

    def contents(self, titles: Sequence[str]) -> str:
        anchors = (re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles)
        return " · ".join(f"[{self.escape(t)}](#{anchor})" for t, anchor in zip(titles, anchors, strict=True))

    def strong(self, text: str) -> str:
        return f"**{text}**"

    def listed(self, items: Iterable[str], kind: str = "") -> str:
        return "\n".join(f"- {item}" for item in items)

    def pairs(self, pairs: Iterable[tuple[str, str]]) -> str:
        return self.listed(f"{name}: {value}" for name, value in pairs)

    def code(self, lines: Sequence[str]) -> str:
        fence = "```"
        while any(fence in line for line in map(plain, lines)):
            fence += "`"
        return "\n".join((fence, *map(plain, lines), fence))

    def picture(self, path: str, words: str, width: float) -> str:
        return f"![{words}]({path})"

    def rest(self, num_rows: int, path: str) -> str:
        return f"All {num_rows} rows: [{path}]({path})."

    def table(self, shown: Sheet) -> str:
        lines = [[self.escape(column.heading) for column in shown.columns]]
        lines.append(["---:" if column.quantity.numeric else "---" for column in shown.columns])
        lines += [[self.escape(cell) for cell in cells] for cells in shown.rows]
        below = ["", self.escape(shown.below)] if shown.below else []
        return "\n".join([f"| {' | '.join(cells)} |" for cells in lines] + below)


class _Latex(_Markdown):
    escape = staticmethod(escape_latex)

    def title(self, title: str) -> str:
        return rf"\section*{{{self.escape(title)}}}"

    def heading(self, title: str, level: int) -> str:
        name = ("section", "subsection", "subsubsection", "paragraph")[min(level - 1, 4) - 1]
        return rf"\{name}{{{self.escape(title)}}}"

    def contents(self, titles: Sequence[str]) -> str:
        return r"\tableofcontents"

    def strong(self, text: str) -> str:
        return rf"\textbf{{{text}}}"

    def listed(self, items: Iterable[str], kind: str = "itemize") -> str:
        return "\n".join((rf"\begin{{{kind}}}", *(rf"\item {item}" for item in items), rf"\end{{{kind}}}"))

    def pairs(self, pairs: Iterable[tuple[str, str]]) -> str:
        return self.listed((f"[{name}] {value}" for name, value in pairs), "description")

    def code(self, lines: Sequence[str]) -> str:
        return "\n\n".join(rf"\texttt{{{self.escape(line)}}}" for line in lines)

    def picture(self, path: str, words: str, width: float) -> str:
        return rf"\drawn{{{min(width, _LINE_PT):.0f}bp}}{{{path}}}{{{words}}}"

    def rest(self, num_rows: int, path: str) -> str:
        return rf"All {num_rows} rows: \texttt{{{self.escape(path)}}}."

    def table(self, shown: Sheet) -> str:
        def line(cells: Sequence[str]) -> str:
            return " & ".join(self.escape(cell) for cell in cells) + r" \\"

        head = [line([column.heading for column in shown.columns]), r"\midrule", r"\endhead"]
        columns = zip(shown.columns, zip(*shown.rows, strict=True), strict=True)
        widths = [max(map(len, (column.heading, *cells))) for column, cells in columns]
        fits = sum(widths) <= _LINE_CHARACTERS
        wrapped = r">{{\raggedright\arraybackslash}}p{{{:.2f}\linewidth}}"
        alignment = "".join(
            "r" if column.quantity.numeric else "l" if fits or width < 20 else wrapped.format(0.8 * width / sum(widths))
            for column, width in zip(shown.columns, widths, strict=True)
        )
        caption = [rf"\caption*{{{self.escape(shown.below)}}}\\\\"] if shown.below else []
        rows = [line(cells) for cells in shown.rows]
        size = "footnotesize" if fits else "scriptsize" if sum(widths) < 1.3 * _LINE_CHARACTERS else "tiny"
        start = [rf"{{\{size}", rf"\begin{{longtable}}{{{alignment}}}"]
        return "\n".join((*start, *caption, r"\toprule", *head, *rows, r"\bottomrule", r"\end{longtable}", "}"))
