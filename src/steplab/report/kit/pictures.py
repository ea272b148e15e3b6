"""Writes a report's pictures as SVG or PDF files, and its long tables as CSV."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

from steplab.printing import MARK
from steplab.report.kit.charts import INK, color_of, drawing
from steplab.report.kit.document import Bars, Chart, Picture, Table
from steplab.report.kit.html import light_colors
from steplab.report.kit.table import csv_rows

_BARS_PX, _NAME_PX, _FIGURE_PX, _ROW_PX = 720, 250, 150, 44
_NAME_LETTERS = 40


@dataclass(slots=True)
class Beside:
    folder: str
    kind: str = "svg"
    files: dict[str, bytes] = field(default_factory=dict)
    heading: str = ""

    def pictures(self, block: Chart | Bars) -> Iterator[tuple[str, Picture]]:
        for one in block.pictures if isinstance(block, Chart) else (_drawn_bars(block, self.heading),):
            legend = block.legend if isinstance(block, Chart) else block.drawn_legend
            content = one.drawing.to_file(self.kind, legend, light_colors())
            if self.kind == "svg":
                content = f"<!-- {MARK} -->\n".encode() + content[content.index(b"<svg") :]
            yield self._keep(one.title or self.heading, self.kind, content), one

    def table(self, table: Table) -> str:
        return self._keep(self.heading or table.name, "csv", f"{csv_rows(table.rows)}\n".encode())

    def _keep(self, title: str, kind: str, content: bytes) -> str:
        words = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40].strip("-")
        path = f"{self.folder}/{len(self.files) + 1:02}-{words or 'figure'}.{kind}"
        self.files[path] = content
        return path


def _drawn_bars(bars: Bars, title: str) -> Picture:
    with drawing(_BARS_PX, _ROW_PX * len(bars.bars), title) as picture:
        axes = picture.axes(_NAME_PX, 0, _FIGURE_PX, 0)
        axes.set(xlim=(bars.low, bars.low + bars.width), ylim=(len(bars.bars) - 0.5, -0.5), xticks=[])
        axes.spines.bottom.set_visible(False)
        names = ["\n".join(filter(None, (textwrap.fill(one.label, _NAME_LETTERS), one.detail))) for one in bars.bars]
        axes.set_yticks(range(len(names)), names, color=INK)
        for row, one in enumerate(bars.bars):
            at = 0.0
            for part in one.segments:
                axes.barh(row, part.value, 0.5, at, color=color_of(part.color))
                at += part.value
            if one.mark is not None:
                axes.plot([one.mark, one.mark], [row - 0.35, row + 0.35], color=INK, linewidth=2, clip_on=False)
            axes.annotate(one.figure, (1, row), (6, 0), xycoords=("axes fraction", "data"),
                          textcoords="offset points", va="center")  # fmt: skip
    return picture.picture()
