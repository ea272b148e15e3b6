"""Causes of long first steps, from their phases, the allocator and the clocks."""

from collections.abc import Iterator, Sequence
from statistics import median

from steplab import units
from steplab.records.disturbances import disturbances
from steplab.records.memory import AllocatorState
from steplab.records.rows import Row
from steplab.records.run import Run
from steplab.records.timing import Timing, curve
from steplab.report.kit.document import Column, Table
from steplab.report.kit.quantities import TIME
from steplab.report.run.cells import RunCell, label, varying
from steplab.report.run.one_run import phase_names

_NOTICEABLE = 0.1
"""Least excess of the first step, as a share of a settled one, for a reason."""
_REASONS = {
    ("cuda", "forward"): "the first call of every kernel loads its code onto the GPU, and cuBLAS and cuDNN make their "
    "handles and choose kernels",
    ("cuda", "backward"): "the kernels of the backward pass are loaded, and gradients are allocated",
    ("cuda", "optimizer"): "the optimizer makes its state in the first step, and its kernels are loaded",
    ("cpu", "forward"): "threads start, oneDNN prepares its primitives, and fresh memory is mapped page by page",
    ("cpu", "backward"): "autograd's threads start, and the memory of the gradients is mapped page by page",
    ("cpu", "optimizer"): "the optimizer makes its state in the first step",
}
"""By kind of device. Sources: CUDA C++ Programming Guide (lazy loading), cuBLAS (handles), torch.optim (state)."""


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
        caption="settled: median over the second half of all steps. + forward: its extra time in the first step.",
    )


def first_steps_reasons(cells: Sequence[RunCell]) -> list[str]:
    fields = varying(cells)
    told = []
    for kind in ("cuda", "cpu"):
        of_kind = [cell for cell in cells if cell.run.environment and cell.run.environment.device.kind == kind]
        for name in ("forward", "backward", "optimizer"):
            if worst := _worst(of_kind, name):
                cell, excess_s = worst
                told.append(
                    f"{name.capitalize()}: up to {units.format_time(excess_s)} more in the first step "
                    f"({label(cell, fields)}): {_REASONS[kind, name]}."
                )
    return told + list(_of_memory(cells, fields)) + list(_of_clocks(cells, fields))


def _worst(cells: Sequence[RunCell], name: str) -> tuple[RunCell, float] | None:
    """The undisturbed run with the largest excess of a phase in its first step; None if not noticeable.

    A compiled run's first step is not its first call: another compiled it.
    """
    found = []
    for cell in cells:
        timing = cell.run.timing
        settles = (
            timing
            and timing.first_step_s is None
            and all(found.word == "waits for host" for found in disturbances(cell.run))
        )
        excess_s = _excess_s(timing, name) if timing and settles else None
        if timing and excess_s is not None and excess_s > _NOTICEABLE * (_settled_s(timing, "step") or 0.0):
            found.append((cell, excess_s))
    return max(found, key=lambda pair: pair[1], default=None)


def _of_memory(cells: Sequence[RunCell], fields: Sequence[str]) -> Iterator[str]:
    grown = [(cell, states) for cell in cells if (states := _states(cell.run)) and _reserved(states, 1) > 0]
    if grown:
        cell, states = max(grown, key=lambda pair: _reserved(pair[1], 1))
        later = sum(_reserved(states, step) for step in range(2, len(states)))
        calls = states[1].num_device_allocations - states[0].num_device_allocations
        yield (
            f"Allocator: in the first step it took {units.format_bytes(_reserved(states, 1))} from the device in "
            f"{units.counted(calls, 'call')}, in later warm-up steps {units.format_bytes(later)} "
            f"({label(cell, fields)}); each call waits for the device."
        )


def _of_clocks(cells: Sequence[RunCell], fields: Sequence[str]) -> Iterator[str]:
    clocks = [
        (device.sm_clock_hz - device.idle_sm_clock_hz, device.idle_sm_clock_hz, device.sm_clock_hz, cell)
        for cell in cells
        if cell.run.environment
        and (device := cell.run.environment.device).sm_clock_hz is not None
        and device.idle_sm_clock_hz is not None
    ]
    if clocks and (risen := max(clocks, key=lambda found: found[0]))[0] > 0:
        _, idle, busy, cell = risen
        yield (
            f"Clocks: the SMs ran at {units.format_rate(idle, 'Hz')} before the first step and at "
            f"{units.format_rate(busy, 'Hz')} in the last warm-up step ({label(cell, fields)})."
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
