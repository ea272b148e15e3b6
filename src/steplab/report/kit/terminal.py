import shutil
from collections.abc import Callable, Iterable, Iterator

from steplab import units
from steplab.printing import plain
from steplab.report.kit.document import Block, Document, Equations, Facts, Pairs, Section, Sentences, Table
from steplab.report.kit.table import drawn, sheet
from steplab.report.kit.text import flowed

_PIPED_WIDTH = 120
_LONGEST_LINE = 120  # of sentences: longer ones are hard to read
INDENT = 2


def terminal_width() -> int:
    """Columns by COLUMNS, else of the terminal, else 120 (for a pipe)."""
    return shutil.get_terminal_size((_PIPED_WIDTH, 24)).columns


def render(document: Document, *, width: int | None = None, color: bool = False) -> str:
    style: Style = _styled if color else lambda text, look: text
    return "\n".join(_document(document, width or terminal_width(), style)).rstrip("\n")


Style = Callable[[str, str], str]
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "cyan": "36"}


def _styled(text: str, style: str) -> str:
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if text and style else text


def _document(document: Document, width: int, style: Style) -> Iterator[str]:
    for line in flowed(plain(document.title), width) if document.title else []:
        yield style(line, "bold")
    for line in flowed(plain(document.subtitle), width) if document.subtitle else []:
        yield style(line, "dim")
    for block in document.verdict.blocks():
        yield ""
        yield from _sentences(block, min(width, _LONGEST_LINE), style)
    headed = bool(document.title or document.verdict.sentences)
    for section in document.sections:
        lines = list(_section(section, width, style))
        yield from ([""] if headed and lines and not section.title else []) + lines


def _section(section: Section, width: int, style: Style) -> Iterator[str]:
    if not section.title:
        yield from _apart(section.blocks, width, style)
        return
    if lines := _apart(section.blocks, width - INDENT, style):  # none are left of pictures alone
        yield ""
        yield from (style(line, "bold") for line in flowed(plain(section.title), width))
        yield from (" " * INDENT + line if line else "" for line in lines)


def _apart(blocks: Iterable[Block], width: int, style: Style) -> list[str]:
    lines: list[str] = []
    for block in blocks:
        own = list(_block(block, width, style))
        joined = isinstance(block, Section) or (isinstance(block, Sentences) and block.role == "note")
        lines += ([] if joined or not lines or not own else [""]) + own
    return lines


def _block(block: Block, width: int, style: Style) -> Iterator[str]:
    if isinstance(block, Section):
        yield from _section(block, width, style)
    elif isinstance(block, Table):
        yield from _table(block, width, style)
    elif isinstance(block, Sentences):
        yield from _sentences(block, min(width, _LONGEST_LINE), style)
    elif isinstance(block, Facts):
        for fact in block.facts:
            yield from flowed(f"{plain(fact.figure)}  {plain(fact.text)}", min(width, _LONGEST_LINE))
    elif isinstance(block, Equations):
        for line in block.lines:
            first, *rest = flowed(f"{plain(line.text)} ({plain(line.what)})", width)
            yield from (first, *(f"    {more}" for more in rest))
    elif isinstance(block, Pairs):
        pairs = [(plain(name), value) for name, value in block.pairs]
        label = max(len(name) for name, _ in pairs)
        for name, value in pairs:
            lines = flowed(plain(value), max(width - label - 2, 20))
            yield style(f"{name:<{label}}", "dim") + f"  {lines[0]}"
            yield from (" " * (label + 2) + line for line in lines[1:])


def _sentences(block: Sentences, width: int, style: Style) -> Iterator[str]:
    look = {"note": "dim", "warning": "red", "code": "cyan"}.get(block.role, "")
    for text in block.texts:
        if block.role == "code":  # to be copied unchanged
            yield style(plain(text), look)
        elif block.role == "finding":
            first, *rest = flowed(plain(text), width - 2)
            yield from (f"- {first}", *(f"  {line}" for line in rest))
        else:
            yield from (style(line, look) for line in flowed(plain(text), width))


def _table(table: Table, width: int, style: Style) -> Iterator[str]:
    if not table.rows:
        yield plain(table.empty)
        return
    shown = sheet(table)
    seen = drawn(shown, width)
    yield from seen.header
    for index, lines in enumerate(seen.rows[: table.first]):
        yield from (style(line, "red") if index in shown.failures else line for line in lines)
    below = shown.below_without(seen.left_out)
    notes = [below] if below else []
    if table.first is not None and len(table.rows) > table.first:
        notes.append(f"{units.counted(len(table.rows) - table.first, 'more row')}; --format md has all.")
    if seen.left_out:
        names = ", ".join(seen.left_out_names)
        notes.append(f"Not shown at this width: {names}; a wider terminal or --format md has them.")
    for note in notes:
        yield from (style(line, "dim") for line in flowed(note, min(width, _LONGEST_LINE)))
