"""A benchmark of attention at a glance: a row a shape, a column an implementation, and how they compare over all."""

import math
from collections.abc import Callable, Sequence
from statistics import median, quantiles

from steplab import units
from steplab.records.attention import AttentionCell
from steplab.report.attention_rows import median_s, peers_of, speed
from steplab.report.formats import escape_markdown
from steplab.report.grid import Grid
from steplab.report.kit.text import ABSENT
from steplab.specs.attention import PASSES, AttentionSpec

PASS_WORDS = {"forward": "forward", "backward": "backward", "both": "forward + backward"}
"""What a pass is called."""
_BY_INTEREST = ("both", "forward", "backward")
_SCATTERED = 0.2
"""Of a median: where the middle half of the samples is spread over more, it is marked. Kernels by themselves repeat
within a few per cent; what scatters more is a wait for the host, or somebody else at work on the device."""


def telling_pass(cells: Sequence[AttentionCell]) -> str | None:
    """The pass that says most: both together where they were timed; None where nothing was."""
    return next((name for name in _BY_INTEREST if any(cell.samples(name) for cell in cells)), None)


def scatter(cell: AttentionCell, name: str) -> float:
    """How far the middle half of a pass's samples is spread, over their median; 0 with fewer than four."""
    samples = cell.samples(name)
    if len(samples) < 4:
        return 0.0
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return (high - low) / median(samples)


def speed_grid(cells: Sequence[AttentionCell], peer: str | None, name: str) -> Grid | None:
    """Median time of a pass, and speed against the peer: shapes by implementations. None with one implementation.
    Medians of samples that scatter are marked."""
    columns = {cell.spec.column for cell in cells}
    if len(columns) < 2 or not any(cell.samples(name) for cell in cells):
        return None
    peers = peers_of(cells, peer)

    def text(cell: AttentionCell) -> str | None:
        seconds = median_s(cell, name)
        against = None if cell is peers.get(cell.spec.shape) else speed(cell, peers, name)
        mark = "~" if scatter(cell, name) > _SCATTERED else ""
        return None if seconds is None else mark + units.format_time(seconds) + (f" {against:.2f}×" if against else "")

    compared = f", and how many times as fast as {peer}" if peer in columns else ""
    marked = any(scatter(cell, name) > _SCATTERED for cell in cells)
    scattering = (
        f" ~: the middle half of its samples is spread over more than {_SCATTERED:.0%} of it." if marked else ""
    )
    return by_shape(cells, text, f"{PASS_WORDS[name].capitalize()}: median time{compared}.{scattering}")


def by_shape(cells: Sequence[AttentionCell], text: Callable[[AttentionCell], str | None], caption: str) -> Grid:
    """A row a shape, a column an implementation; where there is no text for a cell that failed, how it did."""
    columns = list(dict.fromkeys(cell.spec.column for cell in cells))
    shapes = list(dict.fromkeys(cell.spec.shape for cell in cells))
    found = {(cell.spec.shape, cell.spec.column): cell for cell in cells}

    def shown(shape: AttentionSpec, column: str) -> str:
        cell = found.get((shape, column))
        known = text(cell) if cell else None
        failed = cell.failure.kind.replace("_", " ") if cell and cell.failure else None
        return known or failed or ABSENT

    failing = {cell.spec.shape for cell in cells if cell.failure}
    return Grid(
        headers=("B×H×S×D", *columns),
        rows=tuple((shape_label(shape, shapes), *(shown(shape, column) for column in columns)) for shape in shapes),
        numeric=(False, *(True for _ in columns)),
        caption=" · ".join([*_in_common(shapes), caption]),
        bad_rows=frozenset(index for index, shape in enumerate(shapes) if shape in failing),
    )


def shape_label(shape: AttentionSpec, others: Sequence[AttentionSpec]) -> str:
    """What tells a shape from the others."""
    words = [shape.sizes_label]
    if len({other.causal for other in others}) > 1:
        words += ["causal"] * shape.causal
    if len({other.dtype for other in others}) > 1:
        words.append(shape.dtype)
    return " ".join(words)


def _in_common(shapes: Sequence[AttentionSpec]) -> list[str]:
    """And what does not."""
    dtypes, masks = {shape.dtype for shape in shapes}, {shape.causal for shape in shapes}
    words = [*dtypes] if len(dtypes) == 1 else []
    return words + (["causal" if True in masks else "not causal"] if len(masks) == 1 else [])


def geometric_means(cells: Sequence[AttentionCell], peer: str | None) -> Grid | None:
    """Speed of each implementation against the peer over all shapes they share; None without anything to compare."""
    peers = peers_of(cells, peer)
    columns = [c for c in dict.fromkeys(cell.spec.column for cell in cells) if c != peer]
    rows = []
    for column in columns:
        own = [cell for cell in cells if cell.spec.column == column]
        found = {name: [s for cell in own if (s := speed(cell, peers, name)) is not None] for name in PASSES}
        if any(found.values()):
            texts = [text for name in PASSES for text in _mean_and_least(found[name])]
            rows.append((column, str(max(map(len, found.values()))), *texts))
    if not peer or not rows:
        return None
    headers = [text for name in PASSES for text in (name, f"{name}, least")]
    return Grid(
        headers=("implementation", "shapes", *headers),
        rows=tuple(rows),
        numeric=(False, *(True for _ in range(1 + len(headers)))),
        caption=f"Times as fast as {peer}: geometric mean over the shapes that both ran, and the least of them.",
    )


def _mean_and_least(speeds: Sequence[float]) -> tuple[str, str]:
    if not speeds:
        return ABSENT, ABSENT
    return f"{math.exp(sum(map(math.log, speeds)) / len(speeds)):.2f}", f"{min(speeds):.2f}"


def markdown(grid: Grid) -> str:
    """The table in Markdown, its caption under it."""
    lines = [grid.headers, ["---:" if numeric else "---" for numeric in grid.numeric], *grid.rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{escape_markdown(grid.caption)}"
