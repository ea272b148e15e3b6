"""Axes of groups of cells: width, places, labels."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steplab.report.kit.charts import (
    AXES_HEIGHT,
    GRID,
    INK,
    LEFT,
    MUTED,
    PX_PER_INCH,
    RIGHT,
    TOP,
    Drawing,
    Scale,
    drawing,
)
from steplab.report.kit.labels import LINE, fit_all, fitted, text_width, wrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NARROWEST, _WIDEST = 440.0, 880.0
_GROUP_GAP = 0.45  # of a position, between two groups
_SPREAD = 0.78  # of a position, shared by its series
_LABEL_SIZE, _GROUP_SIZE = 11, 12
_MOST_LINES = 3
_SLANT_DEGREES = 35
_LEAST_SLANT_PX, _MOST_SLANT_PX = 60, 180  # length of a slanted label
_WRAPS_FROM = 76  # pixels a position needs for labels that are not slanted but wrapped


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Positions and series, equal in all panels of a chart."""

    outer: str | None
    """Name of the groups along the x axis, if any."""
    inner: str | None
    """Name of the positions within a group; None: `outer` names the positions."""
    positions: tuple[tuple[str, str], ...]
    """Group and place within it."""
    series: tuple[str, ...]
    """Labels of the colours, one without meaning of colour."""
    ordered: bool
    """True if x is a quantity, with lines between positions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    centers: tuple[float, ...]
    num_series: int
    position_px: float

    @property
    def mark_px(self) -> float:
        return self.position_px * _SPREAD / self.num_series

    @property
    def step(self) -> float:
        return _SPREAD / self.num_series

    def x(self, position: int, series: int) -> float:
        return self.centers[position] + (series - (self.num_series - 1) / 2) * self.step


def chart_width(layout: Layout) -> float:
    """Pixels for one panel: room for each mark, and for figures of few."""
    num_marks = len(layout.positions) * len(layout.series)
    wanted = LEFT + RIGHT + num_marks * (64 if num_marks <= 12 else 20) + 24 * len(layout.positions)
    return min(max(wanted, _NARROWEST), max(_WIDEST, LEFT + RIGHT + num_marks * 16.0))


def places(layout: Layout, width: float) -> Places:
    centers: list[float] = []
    at = 0.0
    for index, (outer, _) in enumerate(layout.positions):
        if index:
            at += 1 + (_GROUP_GAP if layout.inner and outer != layout.positions[index - 1][0] else 0)
        centers.append(at)
    position_px = (width - LEFT - RIGHT) / (centers[-1] + 1.2)
    return Places(centers=tuple(centers), num_series=len(layout.series), position_px=position_px)


@dataclass(frozen=True, kw_only=True, slots=True)
class Below:
    names: tuple[str, ...]
    """In full, for hover texts."""
    texts: tuple[str, ...]
    slanted: bool
    """True if they are wider than their positions."""
    ticks_px: float
    groups: tuple[tuple[str, str, float, float], ...]
    """Per group: full name, drawn name, and the centers of its first and last position."""
    groups_px: float

    @property
    def height_px(self) -> float:
        return self.ticks_px + (self.groups_px + 8 if self.groups else 6)


def below(layout: Layout, place: Places) -> Below:
    """Labels are wrapped into their width, or slanted if it is too small."""
    names = [inner if layout.inner else outer for outer, inner in layout.positions]
    room = place.position_px - 8
    slanted = place.position_px < _WRAPS_FROM and max(text_width(name, _LABEL_SIZE) for name in names) > room
    if slanted:
        turn = math.radians(_SLANT_DEGREES)
        length = min((LEFT + 0.6 * place.position_px) / math.cos(turn), _MOST_SLANT_PX)
        texts = fit_all(names, lambda name, _: fitted(name, max(length, _LEAST_SLANT_PX), _LABEL_SIZE))
        ticks_px = 20 + max(text_width(text, _LABEL_SIZE) for text in texts) * math.sin(turn)
    else:
        texts = fit_all(names, lambda name, _: "\n".join(wrap(name, room, _LABEL_SIZE, _MOST_LINES)))
        ticks_px = 24 + _extra_lines(texts) * LINE * _LABEL_SIZE
    groups = _groups(layout, place) if layout.inner else ()
    groups_px = 24 + _extra_lines([text for _, text, _, _ in groups]) * LINE * _GROUP_SIZE if groups else 0
    return Below(
        names=tuple(names), texts=tuple(texts), slanted=slanted, ticks_px=ticks_px, groups=groups, groups_px=groups_px
    )


def _groups(layout: Layout, place: Places) -> tuple[tuple[str, str, float, float], ...]:
    centers: dict[str, list[float]] = {}
    for (outer, _), center in zip(layout.positions, place.centers, strict=True):
        centers.setdefault(outer, []).append(center)
    rooms = [(inside[-1] - inside[0] + 1) * place.position_px - 4 for inside in centers.values()]
    names = list(centers)
    texts = fit_all(names, lambda name, index: "\n".join(wrap(name, rooms[index], _GROUP_SIZE, _MOST_LINES)))
    return tuple(
        (name, text, inside[0], inside[-1]) for (name, inside), text in zip(centers.items(), texts, strict=True)
    )


def _extra_lines(texts: Sequence[str]) -> int:
    return max(text.count("\n") for text in texts)


@contextlib.contextmanager
def panel(layout: Layout, scale: Scale, title: str, width: float) -> Iterator[tuple[Drawing, "Axes", Places]]:
    place = places(layout, width)
    labels = below(layout, place)
    with drawing(width, AXES_HEIGHT + labels.height_px, title) as picture:
        yield picture, _frame(picture, layout, scale, place, labels), place


def _frame(picture: Drawing, layout: Layout, scale: Scale, place: Places, labels: Below) -> "Axes":
    axes = picture.axes(LEFT, labels.height_px, RIGHT, TOP)
    axes.set_xlim(-0.6, place.centers[-1] + 0.6)
    scale.put_on(axes)
    axes.grid(axis="y")
    axes.tick_params(axis="x", pad=7)
    axes.set_xticks(place.centers, labels.texts, fontsize=_LABEL_SIZE, color=MUTED if layout.inner else INK)
    for name, text in zip(labels.names, axes.get_xticklabels(), strict=True):
        text.set(linespacing=LINE)
        if labels.slanted:
            text.set(rotation=_SLANT_DEGREES, ha="right", rotation_mode="anchor")
        if text.get_text() != name:
            picture.tip(text, name)
    if not labels.slanted:  # slanted labels reach into the margin where the name would stand
        _axis_name(axes, layout.inner or layout.outer, -16)
    if layout.inner:
        _group_labels(picture, axes, labels)
        _axis_name(axes, layout.outer, -(labels.ticks_px + 18))
    return axes


def _axis_name(axes: "Axes", name: str | None, offset_px: float) -> None:
    if name:
        axes.annotate(name, (0, 0), (-8, offset_px), xycoords="axes fraction", textcoords="offset points",
                      ha="right", va="baseline", fontsize=11, color=MUTED)  # fmt: skip


def _group_labels(picture: Drawing, axes: "Axes", labels: Below) -> None:
    from matplotlib.transforms import ScaledTranslation

    row = axes.get_xaxis_transform()
    lower = ScaledTranslation(0, -(labels.ticks_px + 4) / PX_PER_INCH, axes.figure.dpi_scale_trans)
    for name, shown, first, last in labels.groups:
        text = axes.annotate(shown, ((first + last) / 2, 0), (0, -(labels.ticks_px + 7)), xycoords=row,
                             textcoords="offset points", ha="center", va="top", fontsize=_GROUP_SIZE,
                             linespacing=LINE, color=INK)  # fmt: skip
        if shown != name:
            picture.tip(text, name)
        rule = axes.hlines(0, first - 0.42, last + 0.42, color=GRID, linewidth=1)
        rule.set(transform=row + lower, clip_on=False)
