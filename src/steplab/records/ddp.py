"""What a data-parallel study came to: for each variant every rank's samples, its messages, memory and a trace."""

from dataclasses import dataclass, replace

from steplab.records.failure import Outcome
from steplab.records.memory import PeakMemory
from steplab.records.profile import Timeline
from steplab.records.record import Benchmark
from steplab.records.timing import PhaseSamples, find_phase
from steplab.specs.ddp import DdpStudy, Variant
from steplab.units import MIB

DDP_SCHEMA = "steplab.ddp/1"

MOMENTS = ("initialised", "before_step", "after_step")
"""After model and optimizer are built; before and after the optimizer's first step, which makes its state."""
CATEGORIES = ("parameters", "gradients", "optimizer", "other")
_ROUNDING_BYTES = 16 * MIB
"""By which two counts of the same tensors may differ."""
COMPUTE_ROW, COMMUNICATION_ROW = 0, 1
"""Streams of the timeline of a traced step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateMemory:
    """What one rank holds at one moment, by whose it is."""

    moment: str
    """One of MOMENTS."""
    parameters_bytes: int
    """Parameters, with what a flat buffer of them leaves empty."""
    gradients_bytes: int
    """Gradients, with the buffers that they are views of."""
    optimizer_bytes: int
    """The optimizer's tensors."""
    allocated_bytes: int | None = None
    """All that this variant's tensors take of the device, with what peer copies share outside of the allocator; None
    where the allocator keeps no count."""

    @property
    def known_bytes(self) -> int:
        """Sum of the three."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def other_bytes(self) -> int | None:
        """Buffers, batches, messages and what is still alive of the step; None where the allocator keeps no count."""
        return None if self.allocated_bytes is None else max(self.allocated_bytes - self.known_bytes, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Messages:
    """Collectives of one kind in one step of a rank."""

    collective: str
    """all_reduce, all_gather, reduce_scatter or broadcast."""
    sizes_bytes: tuple[int, ...]
    """Of each, in their order: of all-gather the output, of reduce-scatter the input."""

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return sum(self.sizes_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpRank:
    """One rank's samples."""

    rank: int
    """From 0."""
    phases: tuple[PhaseSamples, ...] = ()
    """forward, backward, gradient sync where there is such a call, optimizer, and step."""
    baseline: tuple[PhaseSamples, ...] = ()
    """The same without communication, in turns with it; empty for the baseline itself."""
    held_s: float | None = None
    """For how long the device was held before each step of `phases` at the most, so that Python was ahead of it; None
    where the host is the device, or where that is not known."""
    alone_s: tuple[float, ...] = ()
    """The communication of one step with nothing beside it, a sample a repeat."""
    memory: tuple[StateMemory, ...] = ()
    """At MOMENTS."""
    peak: PeakMemory | None = None
    """Most at once in the warm-up steps, with what other variants held meanwhile; None where nobody counts."""
    beside_bytes: int | None = None
    """What others held meanwhile: the baseline's model."""

    def samples(self, phase: str, *, baseline: bool = False) -> tuple[float, ...]:
        """Seconds of each step; none where it was not timed."""
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
        """The memory at one of MOMENTS; without a count of all where that is not known."""
        found = next((memory for memory in self.memory if memory.moment == name), None)
        return replace(found, allocated_bytes=None) if found and self.baseline_freed else found


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedSteps:
    """Communication against computation of rank 0, from a trace of some steps, by unions of intervals.

    Under a profiler, which slows the host: lengths are never step times. All figures are a step's.
    """

    num_steps: int
    """How many were traced."""
    step_s: float
    """From a step's first piece of work to its last; on a CPU, where steps follow one another, of all over how many."""
    communication_s: float
    """Time in which at least one message was under way."""
    overlapped_s: float
    """Of it, time in which something was computed as well."""
    timeline: Timeline
    """The last step on two rows, COMPUTE_ROW and COMMUNICATION_ROW; work that follows closely on other work of its
    category is drawn together with it, and the names are those of the categories."""

    @property
    def exposed_s(self) -> float:
        """Communication with no computation beside it."""
        return self.communication_s - self.overlapped_s


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpCell(Outcome):
    """One variant."""

    contender: Variant
    """The variant."""
    ranks: tuple[DdpRank, ...] = ()
    """In their order; empty for a failure."""
    messages: tuple[Messages, ...] = ()
    """Of one step of a rank; empty where nothing is sent, or nobody knows."""
    wire_bytes: int | None = None
    """Bytes of a step's messages, each times the factor of nccl-tests for its collective (costs.communication): what
    the rank that sends most of it sends at the least. None where the messages are not known, and in records made before
    it was counted."""
    turns: str = ""
    """interleaved: the baseline was in memory beside it, and they took turns; before_and_after: it had not the room."""
    first_step_s: float | None = None
    """Rank 0's first step, with whatever is compiled in it."""
    traced: TracedSteps | None = None
    """None where nothing was traced."""
    expected: tuple[StateMemory, ...] = ()
    """The memory that the formulas of ZeRO give at MOMENTS (costs.data_parallel)."""
    notes: tuple[str, ...] = ()
    """What was not measured, and why."""

    @property
    def num_calls(self) -> int | None:
        """Collectives a step; None where nobody knows."""
        return sum(len(messages.sizes_bytes) for messages in self.messages) or None


@dataclass(frozen=True, kw_only=True, slots=True)
class CurvePoint:
    """What the model says of one bucket size."""

    bucket_mb: float
    """1e6 bytes."""
    num_buckets: float
    """How many such there are."""
    exposed_s: float
    """All calls overlapped: the last bucket, or what the link is behind."""
    serial_s: float
    """Each call's overhead exposed, and the last bucket's transfer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OverheadModel:
    """The model of what communication adds to the step, with what was measured put in (costs.data_parallel)."""

    gradient_bytes: float
    """s."""
    bytes_per_s: float
    """w, fitted."""
    call_s: float
    """o, fitted."""
    backward_s: float
    """The baseline's median backward pass."""
    num_fitted: int
    """From the communication of so many variants, each by itself."""
    worst_fit: float
    """Largest relative difference of those from the fit."""
    best_bucket_mb: float
    """sqrt(s w o)."""
    least_serial_s: float
    """What `serial_s` is then."""
    curve: tuple[CurvePoint, ...]
    """By bucket size, the smallest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """Where one rank ran."""

    rank: int
    """From 0."""
    host: str
    """Name of the machine."""
    device: str
    """What its device is called."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpFacts:
    """What holds for all variants, as the first one told it."""

    backend: str
    """nccl or gloo."""
    places: tuple[RankPlace, ...]
    """Where each rank ran."""
    num_parameters: int
    """Of the model."""
    num_tensors: int
    """Parameters as tensors, each of which has a gradient."""
    gradient_bytes: int
    """Of all gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpRun(Benchmark[DdpCell]):
    """A stored data-parallel study."""

    study: DdpStudy
    """What was asked, and how it was to be measured."""
    facts: DdpFacts | None = None
    """The ranks and the model; None if no process could say."""
    model: OverheadModel | None = None
    """None where too little was measured for a fit."""
    schema: str = DDP_SCHEMA
    """Format of this record."""

    @property
    def baseline(self) -> DdpCell | None:
        """The variant that sends nothing."""
        return next((cell for cell in self.cells if cell.contender.kind == "none"), None)
