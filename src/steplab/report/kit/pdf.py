"""The kit's SVG as PDF: groups that are moved, paths, circles, marks used again, and lines of text."""

import io
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.path import Path

_NUMBER = r"-?[\d.]+(?:e-?\d+)?"
_ENDS = {"start": "left", "middle": "center", "end": "right"}


def pdf_of(svg: str) -> bytes:
    """A PDF of the same size, a pixel being 1/72 inch. Colours are hexadecimal."""
    import matplotlib
    from matplotlib.figure import Figure

    root = ElementTree.fromstring(re.sub(r' xmlns="[^"]*"', "", svg))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    style: dict[Any, Any] = {"font.family": "DejaVu Sans", "text.parse_math": False}
    target = io.BytesIO()
    with matplotlib.rc_context(style | {"lines.scale_dashes": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        known = {part.attrib["id"]: part for part in root.iter() if "id" in part.attrib}
        for artist in _Artists(height, known).of(root, 0, 0, {}):
            figure.add_artist(artist)
        figure.savefig(target, format="pdf", metadata={"Creator": "steplab", "CreationDate": None})
    return target.getvalue()


@dataclass(frozen=True, slots=True)
class _Artists:
    height: float
    known: Mapping[str, ElementTree.Element]
    """Elements by their ids."""

    def of(self, part: ElementTree.Element, x: float, y: float, look: Mapping[str, Any]) -> Iterator[Any]:
        """Artists of an element moved by (x, y); `look` has the properties around it."""
        own = dict(pair.split(":", 1) for pair in part.get("style", "").split(";") if pair)
        look = {**look, **part.attrib, **{name.strip(): value.strip() for name, value in own.items()}}
        moved, angle = (x, y), 0.0
        for name, written in re.findall(r"(\w+)\(([^)]*)\)", part.get("transform", "")):
            numbers = [float(number) for number in re.findall(_NUMBER, written)]
            if name == "translate":
                moved = moved[0] + numbers[0], moved[1] + numbers[1]
            else:
                angle = -numbers[0]  # about the text's own place
        if clip := re.fullmatch(r"url\(#(\w+)\)", part.get("clip-path", "")):
            look["box"] = self._box(self.known[clip[1]][0], *moved)
        if part.tag in ("svg", "g"):
            for inner in part:
                yield from self.of(inner, *moved, look)
        elif part.tag == "use":
            at = moved[0] + float(part.attrib["x"]), moved[1] + float(part.attrib["y"])
            yield from self.of(self.known[part.attrib["href"][1:]], *at, look)
        elif part.tag == "text":
            yield self._text(part, *moved, look, angle)
        elif part.tag == "circle" or part.get("d"):
            yield self._patch(part, *moved, look)

    def _box(self, rect: ElementTree.Element, x: float, y: float) -> Any:
        from matplotlib.transforms import Bbox

        left, top, width, height = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        low = self.height - y - top - height
        return Bbox.from_extents(x + left, low, x + left + width, low + height)

    def _text(self, part: ElementTree.Element, x: float, y: float, look: Mapping[str, Any], angle: float) -> Any:
        from matplotlib.text import Text
        from matplotlib.transforms import IdentityTransform

        return Text(
            x + float(part.get("x", 0)), self.height - y - float(part.get("y", 0)), "".join(part.itertext()),
            color=_color(look, "fill"), fontsize=float(look["font-size"].removesuffix("px")), rotation=angle,
            ha=_ENDS[look.get("text-anchor", "start")], va="baseline", rotation_mode="anchor",
            transform=IdentityTransform(), zorder=0,
        )  # fmt: skip

    def _patch(self, part: ElementTree.Element, x: float, y: float, look: Mapping[str, Any]) -> Any:
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path
        from matplotlib.transforms import Affine2D

        if part.tag == "circle":
            path = Path.circle((float(part.attrib["cx"]), float(part.attrib["cy"])), float(part.attrib["r"]))
        else:
            path = _path(part.attrib["d"])
        place = Affine2D().scale(1, -1).translate(x, self.height - y)
        dashes = [float(number) for number in re.findall(_NUMBER, look.get("stroke-dasharray", ""))]
        patch = PathPatch(
            path, transform=place, facecolor=_color(look, "fill"), edgecolor=_color(look, "stroke"), zorder=0,
            linewidth=float(look.get("stroke-width", 1)), linestyle=(0, dashes) if dashes else "solid",
            capstyle="butt", joinstyle="round",
        )  # fmt: skip
        patch.set_clip_box(look.get("box"))
        return patch


def _color(look: Mapping[str, Any], name: str) -> tuple[str, float] | str:
    color = look.get(name, "none" if name == "stroke" else "#000000")
    alpha = float(look.get("opacity", 1)) * float(look.get(f"{name}-opacity", 1))
    return color if color == "none" else (color, alpha)


def _path(text: str) -> "Path":
    from fontTools.pens.recordingPen import RecordingPen
    from fontTools.svgLib.path import parse_path
    from matplotlib.path import Path

    verbs = {"moveTo": Path.MOVETO, "lineTo": Path.LINETO, "curveTo": Path.CURVE4, "closePath": Path.CLOSEPOLY}
    pen = RecordingPen()
    parse_path(text, pen)
    parts = [(verbs[verb], points or ((0, 0),)) for verb, points in pen.value if verb in verbs]
    return Path([point for _, points in parts for point in points], [verb for verb, points in parts for _ in points])
