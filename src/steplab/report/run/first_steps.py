"""Compares the first step with settled ones: extra time by phase, and memory."""

from collections.abc import Sequence
from statistics import median

from steplab.records.memory import AllocatorState
from steplab.records.rows import Row
from steplab.records.run import Run
from steplab.records.timing import Timing, curve
from steplab.report.kit.document import Column, Table
from steplab.report.kit.quantities import TIME
from steplab.report.run.cells import RunCell, label, varying
from steplab.report.run.one_run import phase_names


def first_steps_table(cells: Sequence[RunCell]) -> Table | None:
    fields = varying(cells)
    timed = [(cell, cell.run.timing) for cell in cells if cell.run.timing and len(curve(cell.run.timing)) > 1]
    rows: list[Row] = []
    parts: dict[str, None] = {}
    for cell, timing in timed:
        names = phase_names(cell.run)
        parts |= dict.fromkeys(names)
        row: Row = {"run": label(cell, fields), "first_s": curve(timing)[0]}
        row |= {name: excess for name in names if (excess := _excess_s(timing, name)) is not None}
        row |= {"settled_s": _settled_s(timing, "step"), "compile_s": _compile_s(timing), "id": cell.id}
        rows.append(row | _growth(cell.run))
    if not rows:
        return None
    return Table(
        name="first steps",
        columns=(
            Column(key="run", wraps_from=16),
            Column(key="first_s", header="first step"),
            Column(key="settled_s", header="settled"),
            *(Column(key=name, header=f"+ {name}", quantity=TIME, rank=1) for name in parts),
            Column(key="compile_s", header="compile time", rank=2),
            Column(
                key="first_growth_bytes",
                header="reserved in the first",
                rank=2,
                note="reserved: taken from the device by the allocator.",
            ),
            Column(key="later_growth_bytes", header="reserved later", rank=2),
            Column(
                key="state_bytes",
                header="kept after the first",
                rank=2,
                note="kept: left allocated by the first step, such as gradients and optimizer state.",
            ),
            Column(key="id", header="record", rank=3),
        ),
        rows=tuple(rows),
        caption="settled: median over the second half of all steps. + forward: its extra time in the first step, which "
        "loads kernels, chooses algorithms, fills the allocator and makes the optimizer's state.",
    )


def _settled_s(timing: Timing, name: str) -> float | None:
    samples = curve(timing, name)
    return median(samples[len(samples) // 2 :]) if samples else None


def _excess_s(timing: Timing, name: str) -> float | None:
    samples, settled_s = curve(timing, name), _settled_s(timing, name)
    return samples[0] - settled_s if len(samples) > 1 and settled_s is not None else None


def _compile_s(timing: Timing) -> float | None:
    settled_s = _settled_s(timing, "step")
    return timing.first_step_s - settled_s if timing.first_step_s is not None and settled_s is not None else None


def _states(run: Run) -> tuple[AllocatorState, ...]:
    return run.memory.during_warmup if run.memory else ()


def _reserved(states: Sequence[AllocatorState], step: int) -> int:
    return states[step].reserved_bytes - states[step - 1].reserved_bytes


def _growth(run: Run) -> Row:
    states = _states(run)
    if len(states) < 2:
        return {}
    return {
        "first_growth_bytes": _reserved(states, 1),
        "later_growth_bytes": states[-1].reserved_bytes - states[1].reserved_bytes if len(states) > 2 else None,
        "state_bytes": states[1].allocated_bytes - states[0].allocated_bytes,
    }
