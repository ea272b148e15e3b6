"""What a report is made of, whatever it is printed as: plain data, with raw values in base units.

A section of a report says here once what it has to say. The renderers beside this file print any document: `terminal`,
`html` and `markup` (Markdown and LaTeX); `rendering` chooses one, and writes JSON and CSV.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from steplab.records.rows import Scalar
from steplab.report.kit.quantities import TEXT, Quantity

Row = Mapping[str, Scalar]

Role = Literal["text", "finding", "note", "warning", "code"]
"""How sentences are set: running text; a list of findings; remarks in small print; a warning; a line to copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """How one field of a table's rows is shown."""

    key: str
    """Field of the row."""
    header: str
    """Heading, with the convention where one is needed to read the figure."""
    quantity: Quantity = TEXT
    """How its values are written, and whether they are figures."""
    shared: str | Callable[[Scalar], str] = ""
    """How the caption says a value that all rows share, which then has no column: '{} ranks', with {s} for the plural's
    s, or a function of the value. Empty: the column always stays."""
    note: str = ""
    """What it is, in whole sentences behind the caption of a table that has the column."""
    quiet: str | None = None
    """Text that is not worth a column or a word of the caption where no row has another."""
    rank: int = 0
    """On a terminal that is too narrow columns of the highest rank are left out first, of one rank the last, together
    with those of the same heading; those of rank 0 never are."""
    wraps_from: int | None = None
    """Least width to which a terminal may wrap its texts; None: each stays on one line."""
    folds: bool = False
    """Whether a terminal without room for all such columns puts their values, in the words of `shared`, below their
    row, so that none of them is left out."""
    value: Callable[[Any], Scalar] | None = None
    """What it shows of an item in a table by `table_of`; None: the item's attribute that `key` names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of one kind.

    A row with a `status` other than 'ok' is a failure and stands out; `RESULT` is the column that says why.
    """

    name: str
    """What it is called in JSON, and by a screen reader."""
    columns: tuple[Column, ...]
    """What people are shown. A column for which no row has a value is left out."""
    rows: tuple[Row, ...]
    """Values in base units. JSON and CSV have all their fields, people are shown those with a column."""
    caption: str = ""
    """How to read it, in whole sentences."""
    first: int | None = None
    """How many rows come first: a terminal shows these alone, a page has the others closed. None: all of them."""
    empty: str = "nothing was measured"
    """What people read where there are no rows."""
    folded: bool = False
    """Whether a page starts with it closed. Longer tables start so in any case."""


RESULT = Column(key="failure", header="result", wraps_from=12)
"""'ok', or why there is none, from a row's `status` and `failure`; left out of a table without failures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sentences:
    """Whole sentences, one under the other."""

    texts: tuple[str, ...]
    """Each without what would steer a terminal being looked for: renderers take that out."""
    role: Role = "text"
    """How they are set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Names and what they are."""

    pairs: tuple[tuple[str, str], ...]
    """Each once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One sentence, and the figure that stands out of it."""

    figure: str
    """Short, shown large: '3.1x'."""
    text: str
    """The sentence."""
    wide: bool = False
    """Whether the sentence is long."""
    bad: bool = False
    """Whether it is about failures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The summary of many records."""

    facts: tuple[Fact, ...]
    """The most telling first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """One SVG."""

    title: str
    """What this panel shows; empty for the only one."""
    svg: str
    """The element."""
    width: float
    """Pixels it was drawn for."""
    subtitle: str = ""
    """What there is to say of it beside the title."""
    alarming: bool = False
    """Whether the subtitle is bad news."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Pictures that belong together. A page alone shows them."""

    pictures: tuple[Picture, ...]
    """A panel each."""
    legend: tuple[tuple[int, str, str], ...] = ()
    """Number of the colour (from 1), glyph, label; empty where there is nothing to tell apart."""
    note: str = ""
    """How to read it, and what is not shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A part of a bar."""

    value: float
    """Its length, in the unit of all bars."""
    color: int
    """Number of its colour, from 1."""
    tip: str
    """Hover text, with the exact figure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar with its label and its figure."""

    label: str
    """What it is about."""
    figure: str
    """The value as text, beside the bar."""
    segments: tuple[Segment, ...] = ()
    """The parts, from the left; none where there is no value."""
    mark: float | None = None
    """Value of a stroke across the bar, such as a formula's."""
    mark_tip: str = ""
    """Hover text of the stroke."""
    detail: str = ""
    """Lesser text under the label."""
    strong: bool = False
    """Whether the bar stands out from the others."""
    bad: bool = False
    """Whether the figure says why there is no value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """Horizontal bars of one unit, one per row. Only a page shows them; a table beside them has the figures."""

    bars: tuple[Bar, ...]
    """From top to bottom."""
    legend: tuple[tuple[int, str, str], ...] = ()
    """Number of the colour, glyph and label of each kind of segment that is drawn."""
    note: str = ""
    """Quantity, statistic and meaning of the mark, in whole sentences."""
    full: float | None = None
    """Value of the whole width; None: the largest bar or mark."""
    first: int | None = None
    """Number of bars that start open; the others start closed. None: all."""

    @property
    def drawn_legend(self) -> tuple[tuple[int, str, str], ...]:
        """The legend of those colours that some segment has."""
        colors = {segment.color for bar in self.bars for segment in bar.segments}
        return tuple(entry for entry in self.legend if entry[0] in colors)

    @property
    def width(self) -> float:
        """Value of the whole width."""
        ends = [max(sum(segment.value for segment in bar.segments), bar.mark or 0.0) for bar in self.bars]
        return self.full or max(ends, default=0.0) or 1.0


@dataclass(frozen=True, slots=True)
class Deferred:
    """A chart that is drawn where it is shown: drawing takes longer than all the rest of a report."""

    draw: Callable[[], Chart | None]
    """Gives the chart; None: there is nothing to draw."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """What stands under one heading."""

    title: str
    """The heading; empty for none."""
    blocks: tuple["Block", ...] = ()
    """In the order they are read; a section among them is one level down."""
    anchor: str = ""
    """Name that a page's links lead to; empty: none leads here."""
    folded: bool = False
    """Whether a page starts with it closed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Equation:
    """One line of a derivation."""

    text: str
    """In plain text."""
    latex: str
    """The same in LaTeX's mathematics, without delimiters."""
    what: str
    """What it gives, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Equations:
    """A derivation. LaTeX and Markdown set it as mathematics."""

    lines: tuple[Equation, ...]
    """In their order."""


Block = Sentences | Facts | Table | Pairs | Chart | Bars | Deferred | Equations | Section


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The answer of a report, before anything else."""

    sentences: tuple[str, ...] = ()
    """One to three sentences with the figures and their uncertainty. The first can stand alone."""
    cautions: tuple[str, ...] = ()
    """Reasons to doubt the figures, with what to do about it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """All that is said of a record, or of several."""

    title: str
    """What it is about."""
    subtitle: str = ""
    """Which record it is, of when, and by which version; a line or several."""
    verdict: Verdict = Verdict()
    """The answer, before anything else."""
    sections: tuple[Section, ...] = ()
    """In the order they are read."""
    data: Table | tuple[Table, ...] = ()
    """What programs get: the rows of one table; or of several, each under its name."""


def named_section(title: str, *blocks: Block | None) -> Section:
    """A section of those blocks that there are."""
    return Section(title=title, blocks=tuple(block for block in blocks if block is not None))


def later(draw: Callable[..., Chart | None], *arguments: Any) -> Deferred:
    """The chart that `draw` makes of the arguments, once it is to be shown."""
    return Deferred(partial(draw, *arguments))


def row_of(item: object, *names: str) -> dict[str, Scalar]:
    """A row with these attributes of an item, under their own names."""
    return {name: getattr(item, name) for name in names}


def table_of(name: str, items: Iterable[Any], columns: Sequence[Column], caption: str = "", **more: Any) -> Table:
    """A table with one row per item, whose fields are what the columns show of it; `more` are fields of the table."""
    rows = ({c.key: c.value(item) if c.value else getattr(item, c.key) for c in columns} for item in items)
    return Table(name=name, columns=tuple(columns), rows=tuple(rows), caption=caption, **more)


def chapter(title: str, anchor: str, *blocks: Block | None) -> Section | None:
    """A section of a page of those blocks that there are; None without any."""
    found = tuple(block for block in blocks if block is not None)
    return Section(title=title, anchor=anchor, blocks=found) if found else None


def notes_section(notes: Sequence[str], title: str = "Notes") -> tuple[Section, ...]:
    """A section of these notes as a list; none without any."""
    return (Section(title=title, blocks=(Sentences(texts=tuple(notes), role="finding"),)),) if notes else ()


def record_section(heading: str, verdict: Verdict, sections: Iterable[Section], *, title: str) -> Section:
    """A record among others: its heading, its verdict and its sections, one level down."""
    return named_section(title, Sentences(texts=(heading,), role="note"), *verdict_blocks(verdict), *sections)


MOST_IN_FULL = 6
"""Number of records of one chapter that are shown in full."""


def records_in_full(parts: Sequence[Section], others: Sequence[str]) -> Iterator[Block]:
    """The sections of the records that are shown in full, and a note with the ids of all others."""
    yield from parts
    if others:
        told = f"{len(others)} more are not shown in full; `steplab show ID` shows each: {', '.join(others)}."
        yield Sentences(texts=(told,), role="note")


def verdict_blocks(verdict: Verdict) -> Iterator[Sentences]:
    """A verdict as blocks of a section."""
    if verdict.sentences:
        yield Sentences(texts=verdict.sentences)
    if verdict.cautions:
        yield Sentences(texts=verdict.cautions, role="warning")
