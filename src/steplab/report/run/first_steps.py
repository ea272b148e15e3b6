"""Compares the first step with settled ones: extra time by phase, and memory."""

from collections.abc import Sequence
from functools import partial
from statistics import median

from steplab.records.timing import curve
from steplab.report.kit.document import Column, Table
from steplab.report.kit.quantities import TIME
from steplab.report.run.cells import RunCell, label, varying
from steplab.report.run.one_run import phase_names

_KEPT = "kept: left allocated by the first step, such as gradients and optimizer state."
_GROWTH = (
    ("first_growth_bytes", "reserved in the first", "reserved_bytes", slice(0, 2), "reserved: added by the allocator."),
    ("later_growth_bytes", "reserved later", "reserved_bytes", slice(1, None), ""),
    ("state_bytes", "kept after the first", "allocated_bytes", slice(0, 2), _KEPT),
)
_COMPILED = "A compiled run did some of this in the step that compiles, before its first step here."


def first_steps_table(cells: Sequence[RunCell]) -> Table:
    fields = varying(cells)
    parts = dict.fromkeys(name for cell in cells for name in phase_names(cell.run))
    return Table.of(
        "first steps",
        cells,
        (
            Column(key="run", wraps_from=16, value=lambda cell: label(cell, fields)),
            Column(key="first_s", header="first step", value=lambda cell: _samples_s(cell)[0]),
            Column(key="settled_s", header="second half", value=lambda cell: _settled_s(_samples_s(cell))),
            *(
                Column(key=name, header=f"+ {name}", quantity=TIME, rank=1, value=partial(_excess_s, name))
                for name in parts
            ),
            Column(key="compile_s", header="compile time", rank=2, note=_COMPILED, value=_compile_s),
            *(
                Column(key=key, header=header, rank=2, note=note, value=partial(_growth, field, steps))
                for key, header, field, steps, note in _GROWTH
            ),
            Column(key="id", header="record", rank=3),
        ),
        caption="second half: the median of the later half of all steps, warm-up included. + forward: its time in the "
        "first step minus that median; a first step loads kernels, chooses algorithms, fills the allocator and makes "
        "the optimizer's state.",
    )


def _samples_s(cell: RunCell, name: str = "step") -> tuple[float, ...]:
    return curve(cell.run.timing, name) if cell.run.timing else ()


def _settled_s(samples_s: Sequence[float]) -> float:
    return median(samples_s[len(samples_s) // 2 :])


def _excess_s(name: str, cell: RunCell) -> float | None:
    samples_s = _samples_s(cell, name)
    return samples_s[0] - _settled_s(samples_s) if len(samples_s) > 1 else None


def _compile_s(cell: RunCell) -> float | None:
    first_s = cell.run.timing.first_step_s if cell.run.timing else None
    return None if first_s is None else first_s - _settled_s(_samples_s(cell))


def _growth(field: str, steps: slice, cell: RunCell) -> int | None:
    states = [getattr(state, field) for state in (cell.run.memory.during_warmup if cell.run.memory else ())[steps]]
    return states[-1] - states[0] if len(states) > 1 else None
