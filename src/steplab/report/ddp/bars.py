"""Bars of a data-parallel study: what communication adds to a step, and memory of a rank."""

from collections.abc import Iterator

from steplab import units
from steplab.records.ddp import CATEGORIES, MOMENTS, DdpCell, DdpRun, StateMemory
from steplab.report.ddp import figures
from steplab.report.kit.document import Bar, Bars, Segment
from steplab.report.kit.text import why_failed

EXPOSED_COLOR = 2
_WORDS = {"optimizer": "optimizer state"}


def exposed_bars(run: DdpRun) -> Bars | None:
    """Exposed communication of each variant, the least first; the shortest step and torch DDP's best stand out."""
    timed = [(added_s, cell) for cell in run.cells if (added_s := figures.exposed_s(cell)) is not None]
    if not timed:
        return None
    cells = [cell for _, cell in timed]
    winner, theirs = figures.best(cells), figures.best_ddp(cells)
    bars = [_exposed_bar(cell, added_s, winner, theirs) for added_s, cell in sorted(timed, key=lambda pair: pair[0])]
    bars += [
        Bar(label=cell.contender.label, figure=why_failed(cell.failure), bad=True) for cell in run.cells if cell.failure
    ]
    note = (
        "Exposed communication: the median step of the slowest rank minus the same step without communication, "
        "measured in turns. In brackets are its bounds by the 95 % interval of their ratio."
    )
    return Bars(bars=tuple(bars), note=note)


def _exposed_bar(cell: DdpCell, added_s: float, winner: DdpCell | None, theirs: DdpCell | None) -> Bar:
    show, bounds, name = units.format_time, figures.exposed_range_s(cell), cell.contender.label
    between = f" ({show(bounds[0])} to {show(bounds[1])})" if bounds else ""
    told = [f"step {show(figures.step_s(cell) or 0.0)}"]
    told += ["shortest step"] if cell is winner else []
    told += ["torch DDP's best bucket size"] if cell is theirs else []
    tip = f"{name}: {show(added_s)} exposed{between}"
    return Bar(
        label=name,
        figure=f"{show(added_s)}{between}",
        segments=(Segment(value=added_s, color=EXPOSED_COLOR, tip=tip),) if added_s > 0 else (),
        detail=", ".join(told),
        strong=cell is winner or cell is theirs,
    )


def memory_bars(run: DdpRun) -> Bars | None:
    """Memory of the rank that holds most after the first update, by category, with a mark for the formulas."""
    held = [(cell, memory) for cell in run.cells if (memory := figures.memory_at(cell, MOMENTS[-1]))]
    if not held:
        return None
    kinds = [kind for kind in CATEGORIES if any(_bytes(memory, kind) for _, memory in held)]
    note = (
        "Memory of the rank that holds most, after the first update, which creates the optimizer state. The stroke "
        "marks what the formulas give for parameters, gradients and optimizer state."
    )
    if any(memory.other_bytes is None for _, memory in held):
        note += " Other memory is not known where the allocator keeps no count, or where memory of an earlier variant "
        note += "was freed meanwhile."
    return Bars(
        bars=tuple(_memory_bar(cell, memory) for cell, memory in held),
        legend=tuple((CATEGORIES.index(kind) + 1, "■", _WORDS.get(kind, kind)) for kind in kinds),
        note=note,
    )


def _memory_bar(cell: DdpCell, memory: StateMemory) -> Bar:
    name, expected = cell.contender.label, figures.expected_at(cell, memory.moment)
    return Bar(
        label=name,
        figure=units.format_bytes(memory.known_bytes + (memory.other_bytes or 0)),
        segments=tuple(_memory_segments(name, memory)),
        mark=expected.known_bytes if expected and expected.known_bytes else None,
        mark_tip=f"{name}, by formula: {units.format_bytes(expected.known_bytes)}" if expected else "",
    )


def _memory_segments(name: str, memory: StateMemory) -> Iterator[Segment]:
    for number, kind in enumerate(CATEGORIES, start=1):
        if size := _bytes(memory, kind):
            tip = f"{name}: {_WORDS.get(kind, kind)} {units.format_bytes(size)}"
            yield Segment(value=size, color=number, tip=tip)


def _bytes(memory: StateMemory, kind: str) -> int:
    size: int | None = getattr(memory, f"{kind}_bytes")
    return size or 0
