"""Bar charts of a data-parallel study: time of a step, and memory of a rank."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from steplab import units
from steplab.records.ddp import CATEGORIES, MOMENTS, DdpCell, DdpRun, StateMemory
from steplab.report.ddp import figures
from steplab.report.ddp.words import MOMENT_WORDS
from steplab.report.kit import charts as ax
from steplab.report.kit.charts import BAD, INK, MUTED, SERIES, Drawing, drawing
from steplab.report.kit.document import Chart, Picture
from steplab.report.kit.labels import LINE, fit_all, text_width, wrap
from steplab.report.kit.text import reason

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _ROW_PX, _NAME_SIZE, _NAME_PX = 880, 26, 12, 250
_BELOW, _RIGHT = 26, 150
COMPUTED, EXPOSED = SERIES[0], SERIES[1]
_WORDS = {"optimizer": "optimizer state"}


def step_bars(run: DdpRun) -> Chart | None:
    """One bar per variant: the step without communication, and the exposed communication."""
    bars = [(cell, parts_of_step(run, cell)) for cell in run.cells]
    bars = [(cell, parts) for cell, parts in bars if parts or cell.failure]
    longest = max((sum(parts) for _, parts in bars if parts), default=0.0)
    if not longest:
        return None
    scale = ax.time_scale([0.0, longest])
    with drawing(_WIDTH, 10 + _ROW_PX * len(bars) + _BELOW, "step time by variant") as picture:
        axes = _frame(picture, [cell.contender.label for cell, _ in bars], scale)
        for index, (cell, parts) in enumerate(bars):
            if parts:
                _step_bar(picture, axes, index, cell.contender.label, parts)
            else:
                _failed(picture, axes, index, cell)
        svg = picture.to_svg()
    note = (
        "Median step of the slowest rank. Computation is the same step without communication, measured in turns with "
    )
    note += "each variant; its own bar is the median of those. Exposed communication is the rest of the step."
    legend = ((1, "■", "computation"), (2, "■", "exposed communication"))
    return Chart(pictures=(Picture(title="", svg=svg, width=_WIDTH),), legend=legend, note=note)


def parts_of_step(run: DdpRun, cell: DdpCell) -> tuple[float, float] | None:
    """Computation and exposed communication of a step, which sum to the step; None where it was not timed.

    A step that noise made shorter than the step without communication counts as computation alone. The step without
    communication is the median over its turns with all variants.
    """
    whole_s, without_s = figures.step_s(cell), figures.baseline_s(cell)
    if cell.contender.kind == "none" and whole_s is not None:
        whole_s = figures.usual_baseline_s(run)
    if whole_s is None:
        return None
    computed_s = whole_s if without_s is None else min(without_s, whole_s)
    return computed_s, whole_s - computed_s


def _step_bar(picture: Drawing, axes: "Axes", index: int, name: str, parts: tuple[float, float]) -> None:
    computed_s, exposed_s = parts
    show = units.format_time
    (bar,) = axes.barh(index, computed_s, 0.68, color=COMPUTED)
    picture.tip(bar, f"{name}: computation {show(computed_s)}")
    if exposed_s > 0:
        (bar,) = axes.barh(index, exposed_s, 0.68, computed_s, color=EXPOSED)
        picture.tip(bar, f"{name}: exposed communication {show(exposed_s)}")
    added = f", {show(exposed_s)} exposed" if exposed_s > 0 else ""
    axes.annotate(show(computed_s + exposed_s) + added, (computed_s + exposed_s, index), (6, 0),
                  textcoords="offset points", ha="left", va="center", fontsize=11, color=INK)  # fmt: skip


def memory_bars(run: DdpRun) -> Chart | None:
    """One panel per moment, one bar per variant: parameters, gradients, optimizer state and other memory.

    A mark shows what the formulas give for the first three.
    """
    cells = [cell for cell in run.cells if figures.memory_at(cell, MOMENTS[-1])]
    if not cells:
        return None
    held = [memory for cell in cells for moment in MOMENTS if (memory := figures.memory_at(cell, moment))]
    scale = ax.bytes_scale([memory.known_bytes + (memory.other_bytes or 0) for memory in held], None)
    pictures = []
    for moment in MOMENTS:
        with drawing(
            _WIDTH, 10 + _ROW_PX * len(cells) + _BELOW, f"memory of a rank, {MOMENT_WORDS[moment]}"
        ) as picture:
            axes = _frame(picture, [cell.contender.label for cell in cells], scale)
            for index, cell in enumerate(cells):
                if memory := figures.memory_at(cell, moment):
                    _memory_bar(picture, axes, index, cell, memory)
            pictures.append(Picture(title=MOMENT_WORDS[moment], svg=picture.to_svg(), width=_WIDTH))
    shown = [kind for kind in CATEGORIES if any(_bytes(memory, kind) for memory in held)]
    legend = tuple((CATEGORIES.index(kind) + 1, "■", _WORDS.get(kind, kind)) for kind in shown)
    note = (
        "Memory of the rank that holds most, at the first step, whose update creates the optimizer state. The stroke "
    )
    note += "marks what the formulas give for parameters, gradients and optimizer state."
    if any(memory.other_bytes is None for memory in held):
        note += " Other memory is not known where the allocator keeps no count, or where memory of an earlier variant "
        note += "was freed meanwhile."
    return Chart(pictures=tuple(pictures), legend=legend, note=note)


def _memory_bar(picture: Drawing, axes: "Axes", index: int, cell: DdpCell, memory: StateMemory) -> None:
    start = 0
    for number, kind in enumerate(CATEGORIES):
        size = _bytes(memory, kind)
        if not size:
            continue
        (bar,) = axes.barh(index, size, 0.68, start, color=SERIES[number])
        picture.tip(bar, f"{cell.contender.label}: {_WORDS.get(kind, kind)} {units.format_bytes(size)}")
        start += size
    expected = figures.expected_at(cell, memory.moment)
    if expected:
        (mark,) = axes.plot([expected.known_bytes] * 2, [index - 0.42, index + 0.42], color=INK, linewidth=2.5)
        picture.tip(mark, f"{cell.contender.label}, by formula: {units.format_bytes(expected.known_bytes)}")
    axes.annotate(units.format_bytes(start), (start, index), (8, 0), textcoords="offset points", ha="left",
                  va="center", fontsize=11, color=INK)  # fmt: skip


def _bytes(memory: StateMemory, kind: str) -> int:
    known = {
        "parameters": memory.parameters_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer": memory.optimizer_bytes,
        "other": memory.other_bytes or 0,
    }
    return known[kind]


def _frame(picture: Drawing, names: Sequence[str], scale: ax.Scale) -> "Axes":
    """Axes with one row per name and the scale below."""
    texts = fit_all(list(names), lambda text, _: "\n".join(wrap(text, _NAME_PX, _NAME_SIZE, 2)))
    left = 12 + max(text_width(line, _NAME_SIZE) for text in texts for line in text.split("\n"))
    axes = picture.axes(left, _BELOW, _RIGHT, 10)
    axes.set_xlim(0, scale.high)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), texts, fontsize=_NAME_SIZE, color=INK)
    for text in axes.get_yticklabels():
        text.set(linespacing=LINE, va="center")
    axes.set_xticks(scale.ticks, [ax.tidy(scale.show(tick)) for tick in scale.ticks], fontsize=11, color=MUTED)
    axes.grid(axis="x")
    axes.spines["bottom"].set_visible(False)
    return axes


def _failed(picture: Drawing, axes: "Axes", index: int, cell: DdpCell) -> None:
    assert cell.failure is not None
    word = axes.annotate(ax.failure_word(cell.failure.kind), (0, index), (6, 0), textcoords="offset points", ha="left",
                         va="center", fontsize=11, color=BAD)  # fmt: skip
    picture.tip(word, f"{cell.contender.label}: {reason(cell.failure.kind, cell.failure.message)}")
