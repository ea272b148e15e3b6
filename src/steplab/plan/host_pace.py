"""Finds the phases of measured steps where the GPU waited for Python, and Python's time per kernel in them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from steplab.costs.rates import Gpu
from steplab.errors import Unsupported
from steplab.plan.time import parts_of, refuse_unknown_step
from steplab.records.run import Run
from steplab.records.step_time import TimePart
from steplab.records.timing import waits_for_host
from steplab.specs.step import StepSpec

_WAITED = 1.4
"""Ratio of measured time to kernel time above which Python's speed determines a phase's time."""
_AHEAD = 1.25
"""Ratio of kernel time to Python's time above which the GPU did not wait for Python."""

Machine = tuple[str, str]
"""(uuid of the GPU, '' if not recorded; `StepSpec.launcher`)"""


@dataclass(frozen=True, slots=True)
class PhaseCell:
    run: Run
    phase: str
    measured_s: float
    parts: tuple[TimePart, ...]
    step: tuple[TimePart, ...]
    """Predicted GPU time of the whole step; `parts`: of this phase."""
    replayed: bool

    @property
    def kernels(self) -> int:
        return sum(part.kernels for part in self.parts)

    @property
    def device_s(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def machine(self) -> Machine:
        device = self.run.environment.device if self.run.environment else None
        return (device.uuid or "" if device else "", self.run.spec.launcher if self.run.spec else "")


def phase_cells(runs: Sequence[Run], gpu: Gpu) -> list[PhaseCell]:
    found, known = [], dict[StepSpec, tuple[TimePart, ...]]()
    for run in runs:
        if run.spec is None or run.timing is None:
            continue
        if run.spec not in known:
            try:
                refuse_unknown_step(run.spec, gpu)
            except Unsupported:
                continue
            known[run.spec] = tuple(parts_of(run.spec, gpu))
        step = known[run.spec]
        for phase in ("forward", "backward"):
            samples = run.timing.phase(phase)
            own = tuple(part for part in step if part.phase == phase)
            if samples is not None and samples.best_s and own:
                found.append(PhaseCell(run, phase, median(samples.best_s), own, step, run.spec.replays_model))
    return found


def host_paces(cells: Sequence[PhaseCell]) -> dict[Machine, float]:
    """Python's seconds per kernel on each machine: the median over phases where the GPU waited."""
    found: dict[Machine, list[float]] = defaultdict(list)
    for cell in cells:
        if cell.measured_s > _WAITED * cell.device_s and not cell.replayed:
            found[cell.machine].append(cell.measured_s / cell.kernels)
    return {machine: median(paces) for machine, paces in found.items()}


def waited(cell: PhaseCell, paces: Mapping[Machine, float]) -> bool:
    """True if the GPU waited for Python in this phase; False for replayed CUDA graphs.

    Either Python was hardly ahead of the GPU at the phase's end, or the kernels' time is at most `_AHEAD` times
    Python's time to launch them. A machine of unknown pace gets the median pace of the others.
    """
    if cell.replayed:
        return False
    if cell.run.timing is not None and waits_for_host(cell.run.timing.back_to_back, cell.phase):
        return True
    pace = paces.get(cell.machine)
    if pace is None:
        usual = [s for (_, launcher), s in paces.items() if launcher == cell.machine[1]]
        pace = median(usual) if usual else 0.0
    return cell.device_s <= _AHEAD * cell.kernels * pace


def runs_that_waited(runs: Sequence[Run], gpu: Gpu) -> set[str]:
    cells = phase_cells(runs, gpu)
    paces = host_paces(cells)
    return {cell.run.id for cell in cells if waited(cell, paces)}
