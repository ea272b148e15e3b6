"""A report's pictures as SVG or PDF files, and its long tables as CSV."""

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from steplab.printing import MARK
from steplab.report.kit.charts import INK, MUTED, css_color, svg
from steplab.report.kit.document import Bar, Bars, Chart, Legend, Picture, Table
from steplab.report.kit.html import light_colors
from steplab.report.kit.labels import text_width, wrap
from steplab.report.kit.pdf import pdf_of
from steplab.report.kit.table import csv_rows
from steplab.report.kit.timelines import words_at

_LETTERS, _LINE, _MARGIN = 12, 16, 8
_BARS_PX, _NAME_PX = 720.0, 250.0


@dataclass(slots=True)
class Beside:
    folder: str
    kind: str = "svg"
    files: dict[str, bytes] = field(default_factory=dict)
    """Content by path, as the text names it."""
    heading: str = ""

    def pictures(self, block: Chart | Bars) -> Iterator[tuple[str, Picture]]:
        """Path of each picture, with its legend in it, and the picture."""
        for one in block.pictures if isinstance(block, Chart) else (_drawn_bars(block, self.heading),):
            whole = _with_legend(one, block.legend if isinstance(block, Chart) else block.drawn_legend)
            text = _colored(whole.svg)
            content = pdf_of(text) if self.kind == "pdf" else f"<!-- {MARK} -->\n{text}\n".encode()
            yield self._keep(one.title or self.heading, self.kind, content), whole

    def table(self, table: Table) -> str:
        return self._keep(self.heading or table.name, "csv", f"{csv_rows(table.rows)}\n".encode())

    def _keep(self, title: str, kind: str, content: bytes) -> str:
        words = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40].strip("-")
        path = f"{self.folder}/{len(self.files) + 1:02}-{words or 'figure'}.{kind}"
        self.files[path] = content
        return path


def _drawn_bars(bars: Bars, title: str) -> Picture:
    """A page sets bars in HTML, which flows; here they are drawn alike."""
    figures_px = min(max(text_width(one.figure, _LETTERS) for one in bars.bars), 0.4 * _BARS_PX)
    left, right = _NAME_PX + _MARGIN, _BARS_PX - figures_px - _MARGIN
    body, top = "", 0.0
    for one in bars.bars:
        lines = wrap(one.label, _NAME_PX, _LETTERS, 3)
        names = [(line, INK) for line in lines] + [(line, MUTED) for line in wrap(one.detail, _NAME_PX, _LETTERS, 2)]
        names = [pair for pair in names if pair[0]]
        body += "".join(words_at(0, top + _LINE * row + 14, *pair) for row, pair in enumerate(names))
        body += _bar(one, left, right, top + 2, bars)
        top += _LINE * len(names) + _MARGIN
    return Picture(title="", svg=svg(title, _BARS_PX, top, body), width=_BARS_PX)


def _bar(bar: Bar, left: float, right: float, top: float, bars: Bars) -> str:
    scale = (right - left) / bars.width
    zero = at = left - bars.low * scale
    drawn = ""
    if bar.segments:
        drawn = f'<path d="M{left:g} {top:g}H{right:g}v16H{left:g}z" fill="var(--wash)"/>'
    for part in bar.segments:
        width = part.value * scale
        drawn += f'<path d="M{at:.2f} {top:g}h{width:.2f}v16h{-width:.2f}z" fill="var(--c{part.color})"/>'
        at += width
    if bar.mark is not None:
        drawn += f'<path d="M{zero + bar.mark * scale:.2f} {top - 2:g}v20" stroke="{css_color(INK)}" stroke-width="2"/>'
    if bar.segments:
        return drawn + words_at(_BARS_PX, top + 12, bar.figure, INK, "end")
    return drawn + words_at(left, top + 12, wrap(bar.figure, _BARS_PX - left, _LETTERS, 1)[0], MUTED)


def _with_legend(picture: Picture, legend: Legend) -> Picture:
    height = float(re.search(r'viewBox="0 0 \S+ (\S+)"', picture.svg)[1])  # type: ignore[index]  # charts.svg writes it
    inside = picture.svg[picture.svg.index(">") + 1 : picture.svg.rindex("</svg>")]
    title = html.unescape(re.search(r'aria-label="([^"]*)"', picture.svg)[1])  # type: ignore[index]
    body, x, y = "", 0.0, 0.0
    for number, glyph, name in legend:
        width = text_width(f"{glyph} {name}", _LETTERS) + 16
        if x and x + width > picture.width:
            x, y = 0.0, y + _LINE
        body += f'<text x="{x:.1f}" y="{y + 12:g}" font-size="{_LETTERS}" fill="var(--c{number})">{glyph}</text>'
        body += words_at(x + 14, y + 12, name)
        x += width
    top = y + _LINE + _MARGIN if legend else 0.0
    body += f'<g transform="translate({_MARGIN} {top + _MARGIN:g})">{inside}</g>'
    width, height = picture.width + 2 * _MARGIN, height + top + 2 * _MARGIN
    paper = f'<path d="M0 0H{width:g}V{height:g}H0z" fill="var(--paper)"/>'
    return replace(picture, svg=svg(title, width, height, paper + body), width=width)


def _colored(text: str) -> str:
    """For a picture alone: with a size, a font, and the page's colours on light paper."""
    _, _, width, height = re.search(r'viewBox="([^"]*)"', text)[1].split()  # type: ignore[index]
    size = f'width="{width}" height="{height}" font-family="system-ui, sans-serif"'
    colors = light_colors()
    return re.sub(r"var\(--(\w+)\)", lambda found: colors[found[1]], text.replace('width="100%"', size, 1))
