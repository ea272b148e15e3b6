"""The record of a data-parallel study."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Annotated

import msgspec

from steplab.records.failure import Outcome
from steplab.records.figure import Figure, Group, MeasuredCell, measured_cell
from steplab.records.memory import PeakMemory
from steplab.records.profile import PHASES, Timeline
from steplab.records.record import Benchmark, Problem, RankPlace, numbered, one_of
from steplab.records.rows import step_key
from steplab.records.timing import PhaseSamples, find_phase, measured_problems
from steplab.specs.comm import COLLECTIVES
from steplab.specs.ddp import DdpStudy, Variant
from steplab.units import MIB

MOMENTS = ("initialised", "before_step", "after_step")
"""Moments of memory readings: after building, then before and after the first optimizer step, which allocates the
optimizer state.
"""
CATEGORIES = ("parameters", "gradients", "optimizer", "other")
SENT = (*COLLECTIVES, "reduce", "gather", "scatter", "barrier")
_ROUNDING_BYTES = 16 * MIB
"""Largest difference between two counts of the same tensors that the allocator's rounding explains."""
COMPUTE_ROW, COMMUNICATION_ROW = 0, 1
"""Stream numbers in TracedSteps.timeline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateMemory:
    """Memory of one rank at one moment, by kind of tensor."""

    moment: Annotated[str, one_of(MOMENTS)]
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    allocated_bytes: int | None = None
    """Bytes of all tensors of this variant, including memory for peer copies, which the allocator does not manage.
    None: the allocator keeps no count.
    """

    @property
    def known_bytes(self) -> int:
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def other_bytes(self) -> int | None:
        """Other allocated bytes: buffers, batches, messages, activations. None: no count."""
        return None if self.allocated_bytes is None else max(self.allocated_bytes - self.known_bytes, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Messages:
    """Consecutive collectives of one kind in one step of a rank."""

    collective: Annotated[str, one_of(SENT)]
    sizes_bytes: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]
    """Bytes of each call, in order: of the output for all-gather, of the input for reduce-scatter."""

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpRank:
    rank: int
    phases: tuple[PhaseSamples, ...] = ()
    """Samples of forward, backward, optimizer, step, and gradient sync if the variant has it."""
    baseline: tuple[PhaseSamples, ...] = ()
    """Samples of the alternating step without communication; empty for the baseline."""
    held_s: float | None = None
    """Longest time in seconds that the device was kept waiting before a timed step, so that Python could launch ahead.
    None: unknown, or a CPU.
    """
    alone_s: tuple[float, ...] = ()
    """Seconds of one step's collectives alone, one sample per repeat."""
    memory: tuple[StateMemory, ...] = ()
    peak: PeakMemory | None = None
    """Peak during warm-up, including the baseline's memory; None: the allocator keeps no count."""
    beside_bytes: int | None = None
    """Bytes that other models, such as the baseline's, held before the variant was built; `peak` includes them."""

    def samples(self, phase: str, *, baseline: bool = False) -> tuple[float, ...]:
        found = find_phase(self.baseline if baseline else self.phases, phase)
        return found.best_s if found else ()

    @property
    def baseline_freed(self) -> bool:
        """True if memory that the baseline or an earlier variant held was freed after this variant was built.

        `allocated_bytes`, a difference from the bytes before, is then too low, and other memory is unknown.
        """
        counted = ((memory.allocated_bytes, memory.known_bytes) for memory in self.memory)
        return any(allocated is not None and allocated + _ROUNDING_BYTES < known for allocated, known in counted)

    def moment(self, name: str) -> StateMemory | None:
        """Memory at one of MOMENTS; its `allocated_bytes` is None if `baseline_freed`.

        Records of early versions have several readings at after_step; the last one is returned.
        """
        looks = [memory for memory in self.memory if memory.moment == name]
        if not looks:
            return None
        found = looks[-1 if name == "after_step" else 0]
        return replace(found, allocated_bytes=None) if self.baseline_freed else found

    def problems(self) -> Iterator[Problem]:
        yield from measured_problems(".phases", self.phases)
        yield from measured_problems(".baseline", self.baseline)


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedSteps:
    """Overlap of communication and computation on rank 0, per profiled step.

    A profiler slows the host: these are no step times.
    """

    num_steps: int
    step_s: float
    """Seconds from a step's first device work to its last; on a CPU, total time over steps."""
    communication_s: float
    """Seconds with at least one collective running."""
    overlapped_s: float
    """Seconds of `communication_s` that overlap computation."""
    timeline: Timeline
    """The last step, on streams COMPUTE_ROW and COMMUNICATION_ROW; adjacent kernels of one category are merged."""

    @property
    def exposed_s(self) -> float:
        return self.communication_s - self.overlapped_s


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpCell(Outcome):
    contender: Variant
    ranks: tuple[DdpRank, ...] = ()
    messages: tuple[Messages, ...] = ()
    """Collectives of one rank's step, in order; empty: none, or unknown."""
    wire_bytes: int | None = None
    """Least bytes that the busiest rank must send per step: message sizes times nccl-tests' factors
    (costs.communication). None: unknown.
    """
    turns: str = ""
    """interleaved: steps alternated with the baseline's. before_and_after: memory did not hold both models, so the
    baseline ran before and after.
    """
    first_step_s: float | None = None
    """Seconds of rank 0's first step, including compilation."""
    deviation: float | None = None
    """Check of the results against training in one process on all batches, after two steps. It is the distance (2-norm)
    between the two values of a parameter tensor over the tensor's change, largest over tensors. None: not checked.
    """
    traced: TracedSteps | None = None
    expected: tuple[StateMemory, ...] = ()
    """Predicted memory at MOMENTS by ZeRO's formulas (costs.data_parallel)."""
    notes: tuple[str, ...] = ()

    @property
    def num_calls(self) -> int | None:
        return sum(len(messages.sizes_bytes) for messages in self.messages) or None

    def problems(self) -> Iterator[Problem]:
        if not self.failure and not self.ranks:
            yield ".ranks", "is empty, and no failure says why"


@dataclass(frozen=True, kw_only=True, slots=True)
class CurvePoint:
    bucket_mb: float
    """Size in 1e6 bytes."""
    num_buckets: float
    exposed_s: float
    """Exposed seconds if calls can overlap backward fully: the last bucket's call, or more if the link falls behind."""
    serial_s: float
    """Exposed seconds if each call's overhead is exposed, and the last bucket's transfer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OverheadModel:
    """Fitted model of the time that communication adds to a step (costs.data_parallel)."""

    gradient_bytes: float
    """Bytes of all gradients, s in the formulas."""
    bytes_per_s: float
    """Bandwidth of the link, w in the formulas."""
    call_s: float
    """Overhead per call, o in the formulas."""
    backward_s: float
    """Median seconds of the baseline's backward pass."""
    num_fitted: int
    worst_fit: float
    best_bucket_mb: float
    """Size in 1e6 bytes with the smallest `serial_s`: sqrt(s w o)."""
    least_serial_s: float
    curve: tuple[CurvePoint, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpFacts:
    backend: str
    """nccl or gloo."""
    places: tuple[RankPlace, ...]
    num_parameters: int
    num_tensors: int
    gradient_bytes: int
    knows_tokens: bool = True
    """False if batches may differ from the study's; tokens per step are then unknown."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class DdpRun(Benchmark[DdpCell]):
    study: DdpStudy
    facts: DdpFacts | None = None
    model: OverheadModel | None = None
    schema: str = "steplab.ddp/1"

    @property
    def num_requested(self) -> int:
        return len(self.study.contenders)

    @property
    def baseline(self) -> DdpCell | None:
        return next((cell for cell in self.cells if cell.contender.kind == "none"), None)

    def problems(self) -> Iterator[Problem]:
        for index, cell in enumerate(self.cells):
            yield from numbered(f".cells[{index}].ranks", [rank.rank for rank in cell.ranks], self.study.processes)
            if cell.contender not in self.study.contenders:
                yield f".cells[{index}].contender", f"must be a variant of the study, not {cell.contender.label}"
        if self.facts:
            yield from numbered(".facts.places", [place.rank for place in self.facts.places], self.study.processes)


def _families(run: DdpRun) -> str:
    return "; ".join(dict.fromkeys(who.family for who in run.study.contenders if who.kind != "none"))


DDP_ROW: tuple[Figure[DdpRun], ...] = (
    Figure(key="num_ranks", find=lambda run: run.study.processes),
    Figure(key="backend", find=lambda run: run.facts.backend if run.facts else None),
    Figure(key="variants", find=_families, shared="variants: {}", rank=1, wraps_from=20, folds=True),
)


def _time(
    name: str, group: Group, read: Callable[[DdpRank], tuple[float, ...]], *, decides: bool = False
) -> Figure[DdpCell]:
    """Figure of a time on the rank with the slowest median step; the time is None if a sample is zero."""

    def samples(cell: DdpCell) -> tuple[float, ...]:
        timed = [rank for rank in cell.ranks if rank.samples("step")]
        return read(max(timed, key=lambda rank: median(rank.samples("step")))) if timed else ()

    def find(cell: DdpCell) -> float | None:
        found = samples(cell)
        return median(found) if found and all(found) else None

    return Figure(key=f"{name}_s", name=name, group=group, find=find, samples=samples, decides=decides)


COMPARED: tuple[Figure[DdpCell], ...] = (
    *(_time(name, "phase", partial(DdpRank.samples, phase=name)) for name in PHASES),
    _time("step time", "time", partial(DdpRank.samples, phase="step"), decides=True),
    _time("communication alone", "communication", lambda rank: rank.alone_s),
)


def ddp_cells(run: DdpRun) -> tuple[MeasuredCell, ...]:
    shared = step_key(run.study.step) | {"num_ranks": run.study.processes}
    labels = [cell.contender.label for cell in run.cells]
    return tuple(
        measured_cell(cell, shared | {"variant": label}, label, COMPARED)
        for cell, label in zip(run.cells, labels, strict=True)
    )
