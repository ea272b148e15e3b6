"""From a matplotlib figure to SVG that belongs in a page: its colours, its font, no ids, no addresses.

Figures are drawn with stand-in colours that are replaced by the page's CSS variables, so that one picture
serves the light and the dark scheme; text stays text, so that the page's font and a screen reader get it.
"""

import contextlib
import html
import io
import re
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

INK, MUTED, GRID, PAPER, BAD = "#010203", "#010204", "#010205", "#010206", "#010207"
"""Stand-ins for text, lesser text, rules, the background, and failures."""
_COLORS = tuple(f"#0102{16 + index:02x}" for index in range(20))
SERIES = _COLORS[:8]
"""Stand-ins for the colours of a palette."""
CATEGORY_COLORS = _COLORS[len(SERIES) :]
"""Stand-ins for twelve more, a fixed one for each category of kernels; told apart by their lightness too."""

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
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
}
PX_PER_INCH = 72
"""matplotlib's SVG counts 72 units an inch: one unit is one CSS pixel."""


def css_color(stand_in: str) -> str:
    """The page's own name for a stand-in's colour: var(--c1)."""
    return f"var({_VARIABLES[stand_in]})"


class Drawing:
    """A figure of `width` x `height` CSS pixels, and the hover texts of its marks."""

    def __init__(self, width: float, height: float, title: str) -> None:
        from matplotlib.figure import Figure

        self.width, self.height, self.title = width, height, title
        self.figure: Figure = Figure(figsize=(width / PX_PER_INCH, height / PX_PER_INCH))
        self._tips: list[str] = []

    def axes(self, left: float, bottom: float, right: float, top: float) -> "Axes":
        """Axes that leave these margins, in pixels."""
        width, height = self.width, self.height
        return self.figure.add_axes(
            (left / width, bottom / height, (width - left - right) / width, (height - bottom - top) / height)
        )

    def tip(self, artist: "Artist", text: str) -> None:
        """Show `text` when the pointer rests on `artist`."""
        artist.set_gid(f"tip-{len(self._tips)}")
        self._tips.append(text)

    def to_svg(self) -> str:
        """The picture as an inline <svg> element: responsive, labelled, the same for the same data."""
        import matplotlib

        target = io.StringIO()
        with matplotlib.rc_context(_STYLE | {"svg.hashsalt": self.title}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # the page's own font draws the text
            self.figure.savefig(target, format="svg", transparent=True, metadata={"Date": None})
        return self._adapt(target.getvalue())

    def _adapt(self, text: str) -> str:
        body = text[text.index(">", text.index("<svg")) + 1 :]
        body = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", body, flags=re.DOTALL)
        body = re.sub(r'<g id="tip-(\d+)">', lambda found: f"<g><title>{self._tip(found[1])}</title>", body)
        body = re.sub(r'<g id="[^"]*">', "<g>", body).replace("xlink:href", "href")
        body = re.sub(r"(\d\.\d\d)\d+", r"\1", body)  # a hundredth of a pixel is enough
        body = re.sub(r"#0102[0-9a-f]{2}", lambda found: css_color(found[0]), body)
        body = re.sub(r"\s*\n\s*", " ", body)
        label = html.escape(self.title)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="100%" role="img" aria-label="{label}">{body.strip()}'
        )

    def _tip(self, index: str) -> str:
        return html.escape(self._tips[int(index)])


@contextlib.contextmanager
def drawing(width: float, height: float, title: str) -> Iterator[Drawing]:
    """A Drawing to fill in, with the page's style in force meanwhile; matplotlib's own is put back after."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield Drawing(width, height, title)
