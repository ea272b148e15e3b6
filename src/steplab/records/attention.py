"""The record of an attention benchmark: raw samples, memory and errors by cell."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from steplab.records.failure import Failure, Outcome
from steplab.records.measured import MeasuredCell, MeasuredFigure
from steplab.records.problems import Problem, known
from steplab.records.record import Benchmark
from steplab.records.rows import Row, head, tail
from steplab.records.timing import PhaseSamples, find_phase
from steplab.specs.attention import PASSES, AttentionSpec, AttentionStudy


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMemory:
    """Bytes beyond the inputs: queries, keys, values and the output's gradient."""

    saved_bytes: int | None = None
    """Memory saved for backward, including the output, excluding inputs."""
    forward_peak_bytes: int | None = None
    """Peak of a forward pass without gradients; None: the allocator keeps no high-water mark."""
    both_peak_bytes: int | None = None
    """Peak of forward and backward with gradients; None as above."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorError:
    """Error of a result against float64, with plain attention's error in the same format."""

    tensor: str
    """output; or queries, keys or values for their gradients."""
    max_abs: float | None
    """Largest absolute difference; None: not finite."""
    relative: float | None
    """Frobenius norm of the difference over the norm of float64's result; None: not finite."""
    plain_max_abs: float | None = None
    """Largest absolute difference of plain attention; None: it did not fit."""
    plain_relative: float | None = None
    """Relative error of plain attention; None: it did not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCell(Outcome):
    """One implementation on one shape."""

    spec: AttentionSpec
    """The requested cell."""
    passes: tuple[PhaseSamples, ...] = ()
    """Raw samples of forward, backward and both, one per repeat; empty after a failure."""
    first_call_s: float | None = None
    """Synchronised host seconds of the first forward and backward, including compilation."""
    memory: AttentionMemory | None = None
    """Memory used; None after a failure."""
    errors: tuple[TensorError, ...] = ()
    """Errors against float64; empty: float64 results were not computed."""
    checked_heads: int | None = None
    """Heads compared with float64, over all sequences."""
    flops: dict[str, float] = field(default_factory=dict)
    """Nominal FLOPs by pass: 4 B H Sq Sk D forward, half if causal, backward 2.5 times as much. Extra executed FLOPs do
    not count.
    """
    interleaved: tuple[str, ...] = ()
    """Implementations alternated repeat by repeat; empty: timed alone."""
    notes: tuple[str, ...] = ()
    """Gaps and their reasons, the choice of `auto`, and overhead that times may include."""

    def samples(self, name: str) -> tuple[float, ...]:
        """Seconds per repeat; empty if not timed."""
        found = find_phase(self.passes, name)
        return found.best_s if found else ()

    def problems(self) -> Iterator[Problem]:
        for index, timed in enumerate(self.passes):
            yield from known(f".passes[{index}].phase", timed.phase, PASSES)
            if not timed.best_s or not all(timed.best_s):
                yield f".passes[{index}]", "has no samples, or a sample without time"
        for name in self.flops:
            yield from known(".flops", name, PASSES)
        if not self.failure and not self.passes:
            yield ".passes", "is empty, and no failure says why"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class AttentionRun(Benchmark[AttentionCell]):
    """A stored attention benchmark: every implementation on every shape."""

    study: AttentionStudy
    """The requested study."""
    schema: str = "steplab.attention/1"
    """Format of this record."""

    @property
    def num_requested(self) -> int:
        return len(self.study.cells)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorTerm:
    """A tensor in an account."""

    what: str
    """Meaning of the tensor, such as 'scores, scaled'."""
    formula: str
    """Size in bytes in symbols of the shape, such as 'B H S K e'."""
    shape: tuple[int, ...]
    """Size of each dimension."""
    element_bytes: int
    """Bytes per element."""
    kept: bool = False
    """True if saved for backward."""

    @property
    def num_bytes(self) -> int:
        total = self.element_bytes
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionAccount:
    """Tensors of plain attention at its memory peak, against the device's memory."""

    spec: AttentionSpec
    """The cell."""
    moment: str
    """Moment of the peak, such as 'backward of the softmax'."""
    terms: tuple[TensorTerm, ...]
    """Tensors alive at the peak."""
    memory_bytes: int
    """Memory of the device in bytes."""
    memory_source: str
    """The device, and the source of its memory size."""
    asked: AttentionSpec | None = None
    """The requested cell if it fits: `spec` doubles its sequence until it no longer does. None: `spec` was
    requested.
    """
    previous: AttentionSpec | None = None
    """Largest smaller cell, which fits; None: none was examined."""
    previous_bytes: int | None = None
    """Peak of `previous` in bytes."""
    measured: Failure | None = None
    """Measured failure; None: not tried."""

    @property
    def total_bytes(self) -> int:
        """Peak in bytes: the sum of the terms."""
        return sum(term.num_bytes for term in self.terms)


def attention_row(run: AttentionRun) -> Row:
    return head(run, "attention") | {"description": run.study.name} | tail(run)


def attention_cells(run: AttentionRun) -> tuple[MeasuredCell, ...]:
    """Cells for comparison: time of each pass, and memory beyond the inputs."""
    return tuple(
        MeasuredCell(
            key=asdict(cell.spec),
            label=f"{cell.spec.column}, {cell.spec.label}",
            figures=tuple(_figures(cell)),
            failure=cell.failure.message if cell.failure else None,
        )
        for cell in run.cells
    )


def _figures(cell: AttentionCell) -> Iterator[MeasuredFigure]:
    for timed in cell.passes:
        yield MeasuredFigure(name=timed.phase, group="time", unit="s", samples=timed.best_s, decides=True)
    memory = cell.memory or AttentionMemory()
    for name, held in (("saved for backward", memory.saved_bytes), ("peak of both passes", memory.both_peak_bytes)):
        if held:
            yield MeasuredFigure(name=name, group="memory", unit="bytes", samples=(float(held),), decides=True)
