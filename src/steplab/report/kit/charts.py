"""Draws matplotlib figures as SVG, with shared scales, ticks and legends.

Fixed placeholder colours become CSS variables of the page, so one picture serves light and dark schemes. Text stays
text, for the page's font and screen readers.
"""

import contextlib
import html
import io
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from steplab import units
from steplab.records.profile import CATEGORIES
from steplab.report.kit.document import Legend, Picture
from steplab.report.kit.labels import text_width

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
GLYPHS = ("●", "■", "▲", "◆", "▼", "✚", "✖", "★")
AXES_HEIGHT = 224
LEFT, RIGHT, TOP = 64, 12, 10
_LOG_FROM = 20  # ratio of the largest to the smallest value

INK, MUTED, GRID, PAPER, BAD = "#010203", "#010204", "#010205", "#010206", "#010207"
_COLORS = tuple(f"#0102{16 + index:02x}" for index in range(20))
SERIES = _COLORS[:8]
CATEGORY_COLORS = _COLORS[len(SERIES) :]
"""Placeholder colours of kernel categories; they differ in lightness too."""

_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--rule", PAPER: "--paper", BAD: "--bad"} | {
    color: f"--c{index + 1}" for index, color in enumerate(_COLORS)
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 12,
    "text.color": INK,
    "text.parse_math": False,  # a '$' in a name is a dollar
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.linewidth": 1.0,
    "axes.unicode_minus": False,
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 1.0,
    "lines.solid_capstyle": "butt",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
}
DASHED, DOTTED = (0, (4, 3)), (0, (2, 3))
PX_PER_INCH = 72
"""matplotlib's SVG has 72 units per inch, so one unit is one CSS pixel."""


def category_color(category: str) -> str:
    return CATEGORY_COLORS[CATEGORIES.index(category)]


def category_legend(categories: Collection[str]) -> Legend:
    return tuple((color_number(category_color(name)), "■", name) for name in CATEGORIES if name in categories)


def color_number(stand_in: str) -> int:
    return _COLORS.index(stand_in) + 1


def color_of(number: int) -> str:
    return _COLORS[number - 1]


def css_color(stand_in: str) -> str:
    return f"var({_VARIABLES[stand_in]})"


class Drawing:
    def __init__(self, width: float, height: float, title: str) -> None:
        from matplotlib.figure import Figure

        self.width, self.height, self.title = width, height, title
        self.figure: Figure = Figure(figsize=(width / PX_PER_INCH, height / PX_PER_INCH))
        self._tips: list[str] = []

    def axes(self, left: float, bottom: float, right: float, top: float) -> "Axes":
        width, height = self.width, self.height
        return self.figure.add_axes(
            (left / width, bottom / height, (width - left - right) / width, (height - bottom - top) / height)
        )

    def tip(self, artist: "Artist", text: str) -> None:
        artist.set_gid(f"tip-{len(self._tips)}")
        self._tips.append(text)

    def picture(self, title: str = "", **more: Any) -> Picture:
        return Picture(title=title, drawing=self, **more)

    def to_svg(self) -> str:
        """Inline <svg> element that scales with the page; equal figures give equal text."""
        return self._adapt(self._saved("svg", transparent=True, metadata={"Date": None}).decode())

    def to_file(self, kind: str, legend: Legend, colors: Mapping[str, str]) -> bytes:
        """SVG or PDF with a legend; `colors` maps the page's CSS variables to hex colours."""
        from matplotlib.lines import Line2D

        marks = dict(zip(GLYPHS, MARKERS, strict=True))
        handles = [
            Line2D([], [], color=color_of(number), marker=marks.get(glyph, "_"), linestyle="none", label=name)
            for number, glyph, name in legend
        ]
        if handles:
            widest = max(text_width(name, 12) for _, _, name in legend) + 40
            columns = max(int(self.width // widest), 1)
            self.figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False)
        self.figure.draw_without_rendering()  # makes the ticks that have no fixed places
        for artist in self.figure.findobj():
            _recolor(artist, {stand_in: colors[name[2:]] for stand_in, name in _VARIABLES.items()})
        dates = {"svg": {"Date": None}, "pdf": {"Creator": "steplab", "CreationDate": None}}
        around = {"bbox_inches": "tight", "pad_inches": 8 / PX_PER_INCH, "facecolor": colors["paper"]}
        return self._saved(kind, metadata=dates[kind], **around)

    def _saved(self, kind: str, **how: Any) -> bytes:
        import matplotlib

        target = io.BytesIO()
        with matplotlib.rc_context(_STYLE | {"svg.hashsalt": self.title}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # the page's own font draws the text
            self.figure.savefig(target, format=kind, **how)
        return target.getvalue()

    def _adapt(self, text: str) -> str:
        """Strips matplotlib's groups and fonts, which are most of the SVG's bytes."""
        whole = ElementTree.fromstring(re.sub(r' xmlns(:xlink)?="[^"]*"|xlink:', "", text[text.index("<svg") :]))
        body = "".join(ElementTree.tostring(part, encoding="unicode") for part in self._parts(whole))
        body = re.sub(r"\s+", " ", body).replace("> <", "><").replace(" />", "/>")
        body = re.sub(r"<[^>]*>", lambda tag: _shorter(tag[0]), body)  # and no text: names and figures stay whole
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" width="100%" '
            f'role="img" aria-label="{html.escape(self.title)}">{body.strip()}</svg>'
        )

    def _parts(self, group: ElementTree.Element) -> Iterator[ElementTree.Element]:
        for part in group:
            name = part.get("id", "")
            if part.tag == "metadata" or (part.tag == "path" and part.get("style") == "fill: none"):
                continue
            if part.tag == "path" and not part.get("id") and not re.search("[LCQ]", part.get("d", "")):
                continue  # the line of a single mark
            if part.tag == "defs" and part.find("style") is not None:  # page.css has it
                continue
            if part.tag != "g":
                yield part
            elif tip := re.fullmatch(r"tip-(\d+)", name):
                inside = [*self._parts(part)]
                part.attrib.clear()
                part[:] = [ElementTree.Element("title"), *inside]
                part[0].text = self._tips[int(tip[1])]
                yield part
            elif part.attrib.keys() - {"id"}:
                part.attrib.pop("id", None)
                part[:] = [*self._parts(part)]
                yield part
            else:
                yield from self._parts(part)


def _shorter(tag: str) -> str:
    tag = re.sub(r' font-family: [^;]*;| transform="rotate\(-0 [^"]*"', "", tag)
    tag = re.sub(r"([:;]) ", r"\1", tag.replace(" stroke-dashoffset: 0;", ""))
    tag = re.sub(r"(\d\.\d\d)\d+", r"\1", tag)  # a hundredth of a pixel is enough
    tag = re.sub(r'(?<=[ "]d=")[^"]*', lambda found: _straight(re.sub(r" ?([A-Za-z]) ?", r"\1", found[0]).strip()), tag)
    return re.sub(r"#0102[0-9a-f]{2}", lambda found: css_color(found[0]), tag)


def _straight(path: str) -> str:
    at = ("", "")

    def shorter(found: re.Match[str]) -> str:
        nonlocal at
        verb, *place = found.groups()
        before, at = at, (place[0], place[1])
        if verb == "L" and at[0] == before[0]:
            return f"V{at[1]}"
        return f"H{at[0]}" if verb == "L" and at[1] == before[1] else found[0]

    if re.search("[CQ]", path):
        return path
    return re.sub(r"H[-\d.]+(?=H)", "", re.sub(r"([ML])([-\d.]+) ([-\d.]+)", shorter, path))


def _recolor(artist: "Artist", colors: Mapping[str, str]) -> None:
    from matplotlib.colors import to_hex, to_rgba, to_rgba_array

    for name in ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor"):
        if get := getattr(artist, f"get_{name}", None):
            found = [(colors.get(to_hex(each)), each) for each in to_rgba_array(get())]
            if any(color for color, _ in found):
                new = [to_rgba(color, each[3]) if color else tuple(each) for color, each in found]
                getattr(artist, f"set_{name}")(new[0] if len(new) == 1 else new)


@contextlib.contextmanager
def drawing(width: float, height: float, title: str) -> Iterator[Drawing]:
    """Yield a Drawing in the page's style; matplotlib's own style is restored afterwards."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield Drawing(width, height, title)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    low: float
    high: float
    log: bool
    ticks: tuple[float, ...]
    show: Callable[[float], str]

    def put_on(self, axes: "Axes") -> None:
        axes.set(ylim=(self.low, self.high or 1), **({"yscale": "log"} if self.log else {}))  # zeros need a height too
        axes.minorticks_off()
        axes.yaxis.set_ticks(self.ticks, [tidy(self.show(tick)) for tick in self.ticks], fontsize=11)


def scale(
    values: Iterable[float], show: Callable[[float], str] = units.format_time, log_from: float = _LOG_FROM
) -> Scale:
    """Scale from zero, or a logarithmic one if the largest value is more than `log_from` times the smallest."""
    low, high = min(values := list(values)), max(values)
    if low <= 0 or high <= log_from * low:
        return linear_scale(high, show)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if math.log10(high / low) < 2 else (1, 3) if math.log10(high / low) < 3 else (1,)
    ticks = tuple(f * 10.0**e for e in range(first, last + 1) for f in factors)
    bottom, top = 0.75 * low, 1.9 * high
    inside = tuple(tick for tick in ticks if bottom <= tick <= top)
    return Scale(low=bottom, high=top, log=True, ticks=inside, show=show)


def linear_scale(high: float, show: Callable[[float], str], base: int = 10) -> Scale:
    """Scale from zero, with room above `high`; ticks are round in base 10, or in base 2 for bytes."""
    return Scale(low=0, high=1.14 * high, log=False, ticks=_steps(high, base), show=show)


def log_bytes_scale(values: Iterable[float]) -> Scale:
    low, high = min(values := list(values)), max(values)
    bottom, top = 0.6 * low, 2.0 * high
    apart = max(1, math.ceil(math.log2(top / bottom) / 7))
    first = math.ceil(math.log2(bottom) / apart)
    ticks = tuple(2.0 ** (apart * index) for index in range(first, math.floor(math.log2(top) / apart) + 1))
    return Scale(low=bottom, high=top, log=True, ticks=ticks, show=units.format_bytes)


def _steps(high: float, base: int) -> tuple[float, ...]:
    """Zero and three to six round steps up to `high`: 1, 2, 5 in base 10, powers in base 2."""
    if high <= 0:
        return (0.0,)
    size = float(base) ** math.floor(math.log(high, base))
    factors = (0.1, 0.2, 0.5, 1, 2) if base == 10 else (0.125, 0.25, 0.5, 1)
    step = next(size * factor for factor in factors if high / (size * factor) <= 6)
    return tuple(step * index for index in range(int(high / step + 1e-9) + 1))


def tidy(text: str) -> str:
    """Remove trailing zeros: '10.0 ms' -> '10 ms'."""
    return re.sub(r"\.0+(?= )|(\.\d*?[1-9])0+(?= )", r"\1", text)


def series_color(index: int) -> str:
    return SERIES[index % len(SERIES)]


def series_legend(names: Iterable[str], glyphs: Sequence[str] = GLYPHS) -> Legend:
    return tuple((color_number(series_color(i)), glyphs[i % len(glyphs)], name) for i, name in enumerate(names))


def put_mark(axes: "Axes", x: float, y: float, index: int, *, size: float = 7, **look: Any) -> "Artist":
    marker = MARKERS[index % len(MARKERS)]
    look = {"markeredgewidth": 0} | look
    (mark,) = axes.plot([x], [y], color=series_color(index), marker=marker, markersize=size, **look)
    return mark


def put_line(axes: "Axes", points: Sequence[tuple[float, float]], index: int) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), color=series_color(index), linewidth=1, alpha=0.55, zorder=1)
