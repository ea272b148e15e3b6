"""The record of a data-parallel study: for each variant every rank's samples, messages, memory and traced steps."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

from steplab.records.failure import Outcome
from steplab.records.measured import MeasuredCell, MeasuredFigure, of_phase
from steplab.records.memory import PeakMemory
from steplab.records.problems import Problem, known, numbered
from steplab.records.profile import Timeline
from steplab.records.record import Benchmark
from steplab.records.rows import Row, head, step_columns, step_key, tail
from steplab.records.timing import PhaseSamples, find_phase, measured_problems
from steplab.specs.comm import COLLECTIVES
from steplab.specs.ddp import DdpStudy, Variant
from steplab.units import MIB

MOMENTS = ("initialised", "before_step", "after_step")
"""The moments at which memory is read: after model and optimizer are built, and before and after the optimizer's first
step, which allocates its state."""
CATEGORIES = ("parameters", "gradients", "optimizer", "other")
SENT = (*COLLECTIVES, "reduce", "gather", "scatter", "barrier")
"""The collectives that a step may call."""
_ROUNDING_BYTES = 16 * MIB
"""Largest difference between two counts of the same tensors that is due to rounding."""
COMPUTE_ROW, COMMUNICATION_ROW = 0, 1
"""Streams in the timeline of a traced step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateMemory:
    """Memory that one rank holds at one moment, by owner."""

    moment: str
    """One of MOMENTS."""
    parameters_bytes: int
    """Bytes of the parameters, including padding in a flat buffer of them."""
    gradients_bytes: int
    """Bytes of the gradients, including the buffers that they are views of."""
    optimizer_bytes: int
    """Bytes of the optimizer's tensors."""
    allocated_bytes: int | None = None
    """Bytes of all tensors of this variant on the device, including memory that peer copies share outside of the
    allocator; None if the allocator keeps no count."""

    @property
    def known_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state together."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def other_bytes(self) -> int | None:
        """Bytes of everything else, such as buffers, batches, messages and tensors of the step that are still alive;
        None if the allocator keeps no count."""
        return None if self.allocated_bytes is None else max(self.allocated_bytes - self.known_bytes, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Messages:
    """Consecutive collectives of one kind in one step of a rank."""

    collective: str
    """The collective: all_reduce, all_gather, reduce_scatter, reduce or broadcast."""
    sizes_bytes: tuple[int, ...]
    """Size of each message in order: for all-gather that of the output, for reduce-scatter that of the input."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all these messages together."""
        return sum(self.sizes_bytes)

    def problems(self) -> Iterator[Problem]:
        """Yield what cannot be right (records.problems)."""
        if not self.sizes_bytes:
            yield ".sizes_bytes", "is empty"


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpRank:
    """One rank's samples."""

    rank: int
    """Number of the rank, from 0."""
    phases: tuple[PhaseSamples, ...] = ()
    """Samples of forward, backward, optimizer and step, and of gradient sync if the variant has such a call."""
    baseline: tuple[PhaseSamples, ...] = ()
    """Samples of the baseline (the step without communication), taken in turns with the variant; empty for the baseline
    itself."""
    held_s: float | None = None
    """Longest time in seconds that the device was held before a step of `phases`, to give Python a head start; None if
    the device is the host, or the time is not known."""
    alone_s: tuple[float, ...] = ()
    """Seconds of one step's communication by itself, one sample per repeat."""
    memory: tuple[StateMemory, ...] = ()
    """Memory at each of MOMENTS."""
    peak: PeakMemory | None = None
    """Peak memory of the warm-up steps, including the baseline's memory; None if the allocator keeps no count."""
    beside_bytes: int | None = None
    """Bytes allocated outside of the variant while it was measured, such as the baseline's model."""

    def samples(self, phase: str, *, baseline: bool = False) -> tuple[float, ...]:
        """Seconds of a phase in each step; empty if it was not timed."""
        found = find_phase(self.baseline if baseline else self.phases, phase)
        return found.best_s if found else ()

    @property
    def baseline_freed(self) -> bool:
        """Whether memory of the baseline or an earlier variant was freed during this measurement.

        Then fewer bytes are counted for the variant than it is known to hold, and its other memory is not known.
        """
        counted = ((memory.allocated_bytes, memory.known_bytes) for memory in self.memory)
        return any(allocated is not None and allocated + _ROUNDING_BYTES < known for allocated, known in counted)

    def moment(self, name: str) -> StateMemory | None:
        """The memory at one of MOMENTS; `allocated_bytes` is None if it is not known.

        Of an update in parts, early records have what was held after each part: the step ends with the last.
        """
        looks = [memory for memory in self.memory if memory.moment == name]
        if not looks:
            return None
        found = looks[-1 if name == "after_step" else 0]
        return replace(found, allocated_bytes=None) if self.baseline_freed else found

    def problems(self) -> Iterator[Problem]:
        """Yield what cannot be right (records.problems)."""
        yield from measured_problems(".phases", self.phases)
        yield from measured_problems(".baseline", self.baseline)
        for index, memory in enumerate(self.memory):
            yield from known(f".memory[{index}].moment", memory.moment, MOMENTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedSteps:
    """Overlap of communication and computation on rank 0, from a trace of some steps, by unions of intervals.

    The steps ran under a profiler, which slows the host, so these times are never step times. All figures are means per
    step.
    """

    num_steps: int
    """Number of traced steps."""
    step_s: float
    """Seconds from a step's first piece of work to its last; on a CPU, where steps follow each other at once, the time
    of all steps divided by their number."""
    communication_s: float
    """Seconds in which at least one message was being sent."""
    overlapped_s: float
    """Seconds of `communication_s` in which computation ran as well."""
    timeline: Timeline
    """The last step on two rows, COMPUTE_ROW and COMMUNICATION_ROW. Pieces of work of one category that follow each
    other closely are merged, and named after the category."""

    @property
    def exposed_s(self) -> float:
        """Seconds of communication during which no computation ran."""
        return self.communication_s - self.overlapped_s


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpCell(Outcome):
    """The measurement of one variant."""

    contender: Variant
    """The variant that was measured."""
    ranks: tuple[DdpRank, ...] = ()
    """Samples of each rank in order; empty for a failure."""
    messages: tuple[Messages, ...] = ()
    """Messages in one step of a rank; empty if nothing is sent, or the messages are not known."""
    wire_bytes: int | None = None
    """Least number of bytes that the rank with the most traffic sends in a step: the size of each message times the
    factor of nccl-tests for its collective (costs.communication). None if the messages are not known, and in old
    records."""
    turns: str = ""
    """interleaved: the baseline was in memory too, and they took turns. before_and_after: memory was too small for
    both, so the baseline was timed before and after the variant."""
    first_step_s: float | None = None
    """Seconds of rank 0's first step, including compilation."""
    traced: TracedSteps | None = None
    """Overlap in the traced steps; None if no steps were traced."""
    expected: tuple[StateMemory, ...] = ()
    """Memory at MOMENTS by the formulas of ZeRO (costs.data_parallel)."""
    notes: tuple[str, ...] = ()
    """What was not measured, and why."""

    @property
    def num_calls(self) -> int | None:
        """Number of collectives per step; None if it is not known."""
        return sum(len(messages.sizes_bytes) for messages in self.messages) or None

    def problems(self) -> Iterator[Problem]:
        """Yield what cannot be right (records.problems)."""
        for index, messages in enumerate(self.messages):
            yield from known(f".messages[{index}].collective", messages.collective, SENT)
        if not self.failure and not self.ranks:
            yield ".ranks", "is empty, and no failure says why"


@dataclass(frozen=True, kw_only=True, slots=True)
class CurvePoint:
    """Predictions of the overhead model for one bucket size."""

    bucket_mb: float
    """Bucket size in units of 1e6 bytes."""
    num_buckets: float
    """Number of buckets of this size."""
    exposed_s: float
    """Exposed communication in seconds if all calls overlap with the backward pass: the last bucket, or the time by
    which the link is late."""
    serial_s: float
    """Exposed communication in seconds if the overhead of every call is exposed, and the transfer of the last
    bucket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OverheadModel:
    """Model of the time that communication adds to the step, with fitted parameters (costs.data_parallel)."""

    gradient_bytes: float
    """Bytes of all gradients; s in the formulas."""
    bytes_per_s: float
    """Fitted bandwidth of the link; w in the formulas."""
    call_s: float
    """Fitted overhead of a call in seconds; o in the formulas."""
    backward_s: float
    """Median of the baseline's backward pass in seconds."""
    num_fitted: int
    """Number of variants whose communication by itself the model was fitted to."""
    worst_fit: float
    """Largest relative difference between those times and the fit."""
    best_bucket_mb: float
    """Bucket size with the smallest `serial_s`, sqrt(s w o), in units of 1e6 bytes."""
    least_serial_s: float
    """Value of `serial_s` at that bucket size, in seconds."""
    curve: tuple[CurvePoint, ...]
    """The predictions by bucket size, the smallest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """Where one rank ran."""

    rank: int
    """Number of the rank, from 0."""
    host: str
    """Name of the machine."""
    device: str
    """Name of its device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpFacts:
    """Facts that are the same for all variants, reported by the first."""

    backend: str
    """Backend of torch.distributed: nccl or gloo."""
    places: tuple[RankPlace, ...]
    """Where each rank ran."""
    num_parameters: int
    """Number of parameters of the model."""
    num_tensors: int
    """Number of parameter tensors, each of which has a gradient."""
    gradient_bytes: int
    """Bytes of all gradients together."""
    knows_tokens: bool = True
    """Whether the model's batches have the study's batch and context, so that the tokens of a step are known."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class DdpRun(Benchmark[DdpCell]):
    """A stored data-parallel study."""

    study: DdpStudy
    """The study as requested."""
    facts: DdpFacts | None = None
    """Facts about the ranks and the model; None if no process reported them."""
    model: OverheadModel | None = None
    """The fitted overhead model; None if there are too few measurements for a fit."""
    schema: str = "steplab.ddp/1"
    """Format of this record."""

    @property
    def num_requested(self) -> int:
        """Number of variants in the study."""
        return len(self.study.contenders)

    @property
    def baseline(self) -> DdpCell | None:
        """The cell of the variant without communication; None if it is missing."""
        return next((cell for cell in self.cells if cell.contender.kind == "none"), None)

    def problems(self) -> Iterator[Problem]:
        """Yield what cannot be right (records.problems)."""
        for index, cell in enumerate(self.cells):
            yield from numbered(f".cells[{index}].ranks", [rank.rank for rank in cell.ranks], self.study.processes)
            if cell.contender not in self.study.contenders:
                yield f".cells[{index}].contender", f"must be a variant of the study, not {cell.contender.label}"
        if self.facts:
            yield from numbered(".facts.places", [place.rank for place in self.facts.places], self.study.processes)


def ddp_row(run: DdpRun) -> Row:
    """The row of a data-parallel study."""
    return (
        head(run, "ddp")
        | step_columns(run.study.step)
        | {
            "num_ranks": run.study.processes,
            "backend": run.facts.backend if run.facts else None,
            "contenders": "; ".join(dict.fromkeys(who.family for who in run.study.contenders if who.kind != "none")),
        }
        | tail(run)
    )


def ddp_cells(run: DdpRun) -> tuple[MeasuredCell, ...]:
    """The variants as they are compared: step and phases of the slowest rank, and its communication by itself."""
    shared = step_key(run.study.step) | {"num_ranks": run.study.processes}
    return tuple(
        MeasuredCell(
            key=shared | {"variant": cell.contender.label},
            label=cell.contender.label,
            figures=tuple(_figures(cell)),
            failure=cell.failure.message if cell.failure else None,
        )
        for cell in run.cells
    )


def _figures(cell: DdpCell) -> Iterator[MeasuredFigure]:
    timed = [rank for rank in cell.ranks if rank.samples("step")]
    if not timed:
        return
    slowest = max(timed, key=lambda rank: median(rank.samples("step")))
    for phase in slowest.phases:
        if phase.best_s and all(phase.best_s):
            yield of_phase(phase)
    if slowest.alone_s and all(slowest.alone_s):
        yield MeasuredFigure(name="communication by itself", group="communication", unit="s", samples=slowest.alone_s)
