"""The record of an attention benchmark: raw samples, memory and numerical errors per cell."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from math import prod
from statistics import median
from typing import Annotated

from steplab.records.failure import Failure, Outcome
from steplab.records.figure import Figure, MeasuredCell, measured_cell
from steplab.records.record import Benchmark, Problem, known, one_of
from steplab.records.timing import PhaseSamples, find_phase
from steplab.specs.attention import PASSES, AttentionSpec, AttentionStudy
from steplab.specs.step_fields import Scalar

TENSORS = {"output": "output", "queries": "dQ", "keys": "dK", "values": "dV"}
"""Tensors with measured errors, and their names in tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMemory:
    """Memory beyond the inputs (queries, keys, values and the output's gradient)."""

    saved_bytes: int | None = None
    """Bytes saved for backward, including the output but not the inputs."""
    forward_peak_bytes: int | None = None
    """Peak bytes of a forward pass without gradients; None: the allocator counts no peak."""
    both_peak_bytes: int | None = None
    """Peak bytes of forward and backward with gradients; None: the allocator counts no peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorError:
    """Errors of one result tensor against float64, for this implementation and for plain attention."""

    tensor: str
    """output, or the input of a gradient: queries, keys or values."""
    max_abs: float | None
    relative: float | None
    """Frobenius norm of the error over the float64 result's; None: not finite."""
    plain_max_abs: float | None = None
    plain_relative: float | None = None
    """`relative` of plain attention in the same format; None: it ran out of memory."""

    @property
    def ratio(self) -> float | None:
        """`relative` over `plain_relative`; None if one is missing, or the latter is zero."""
        return self.relative / self.plain_relative if self.relative is not None and self.plain_relative else None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCell(Outcome):
    spec: AttentionSpec
    passes: tuple[PhaseSamples, ...] = ()
    """Raw samples of forward, backward and both, one per repeat; empty after a failure."""
    first_call_s: float | None = None
    """Host seconds of the first, synchronised forward and backward, including compilation."""
    memory: AttentionMemory | None = None
    errors: tuple[TensorError, ...] = ()
    """Errors against float64; empty: no float64 reference was computed."""
    checked_heads: int | None = None
    """Heads compared with float64, summed over sequences."""
    flops: dict[Annotated[str, one_of(PASSES)], float] = field(default_factory=dict)
    """Nominal FLOPs by pass: 4 B H Sq Sk D forward, half if causal; backward 2.5 times as much. Recomputation does not
    count.
    """
    interleaved: tuple[str, ...] = ()
    """Implementations measured in alternation, one repeat each; empty: measured alone."""
    notes: tuple[str, ...] = ()
    """Missing data with reasons, the implementation that `auto` chose, and overhead that the times include."""

    def samples(self, name: str) -> tuple[float, ...]:
        found = find_phase(self.passes, name)
        return found.best_s if found else ()

    def median_s(self, name: str) -> float | None:
        samples = self.samples(name)
        return median(samples) if samples else None

    def flops_per_s(self, name: str) -> float | None:
        seconds, flops = self.median_s(name), self.flops.get(name)
        return flops / seconds if seconds and flops else None

    def problems(self) -> Iterator[Problem]:
        for index, timed in enumerate(self.passes):
            yield from known(f".passes[{index}].phase", timed.phase, PASSES)
            if not timed.best_s or not all(timed.best_s):
                yield f".passes[{index}]", "has no samples, or a sample without time"
        if not self.failure and not self.passes:
            yield ".passes", "is empty, and no failure says why"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class AttentionRun(Benchmark[AttentionCell]):
    study: AttentionStudy
    schema: str = "steplab.attention/1"

    @property
    def num_requested(self) -> int:
        return len(self.study.cells)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorTerm:
    what: str
    """Description of the tensor, such as 'scores, scaled'."""
    formula: str
    """Formula of its bytes in symbols of the shape, such as 'B H S K e'."""
    shape: tuple[int, ...]
    element_bytes: int
    kept: bool = False
    """True if autograd saves it for backward."""

    @property
    def num_bytes(self) -> int:
        return self.element_bytes * prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionAccount:
    """Tensors of plain attention at its memory peak, compared with the device's memory."""

    spec: AttentionSpec
    moment: str
    """Moment of the peak, such as 'backward of the softmax'."""
    terms: tuple[TensorTerm, ...]
    memory_bytes: int
    memory_source: str
    """Device, and source of its memory size."""
    asked: AttentionSpec | None = None
    """The requested spec, if it fits in memory; `spec` is then the first that does not, with the sequence doubled again
    and again. None: `spec` was requested.
    """
    previous: AttentionSpec | None = None
    """Spec with the longest sequence that was examined and fits in memory; None: none was examined."""
    previous_bytes: int | None = None
    measured: Failure | None = None

    @property
    def total_bytes(self) -> int:
        return sum(term.num_bytes for term in self.terms)


def _time(name: str) -> Figure[AttentionCell]:
    return Figure(
        key=f"{name}_s",
        header=name,
        note=BOTH if name == "both" else "",
        find=lambda cell: cell.median_s(name),
        group="time",
        samples=lambda cell: cell.samples(name),
        decides=True,
    )


def _rate(name: str) -> Figure[AttentionCell]:
    return Figure(
        key=f"{name}_flops_per_s",
        header=f"{name} rate",
        find=lambda cell: cell.flops_per_s(name),
        rank=2,
        note="Rates: of 4 B H Sq Sk D FLOPs forward, half of that if causal, and 2.5 times as many backward, whatever "
        "is executed.",
    )


BOTH = "Both: forward + backward."
_FIRST_CALL = "First call: the first forward and the first forward + backward, compilation included."
PASS_TIMES: tuple[Figure[AttentionCell], ...] = tuple(map(_time, PASSES))
PASS_RATES: tuple[Figure[AttentionCell], ...] = (
    *map(_rate, PASSES),
    Figure(key="first_call_s", header="first call", find=lambda cell: cell.first_call_s, rank=3, note=_FIRST_CALL),
)
MEMORY: tuple[Figure[AttentionCell], ...] = (
    Figure(
        key="saved_bytes",
        header="saved for backward",
        note="Saved for backward includes the output.",
        find=lambda cell: getattr(cell.memory, "saved_bytes", None),
        group="memory",
        decides=True,
    ),
    Figure(
        key="forward_peak_bytes",
        header="peak, forward",
        note="Peak, forward: without autograd.",
        find=lambda cell: getattr(cell.memory, "forward_peak_bytes", None),
        rank=1,
    ),
    Figure(
        key="both_peak_bytes",
        header="peak, both",
        note="The peaks include the output and the gradients.",
        find=lambda cell: getattr(cell.memory, "both_peak_bytes", None),
        group="memory",
        name="peak of both passes",
        decides=True,
    ),
)


def _errors(
    end: str,
    read: Callable[[TensorError], Scalar],
    words: str | None = None,
    rank: int = 0,
    unit: str = "error",
    note: str = "",
) -> Iterator[Figure[AttentionCell]]:
    """Yield one figure per tensor, read from its errors. `words` completes the header; None: no table shows it."""

    def find(tensor: str) -> Callable[[AttentionCell], Scalar]:
        return lambda cell: next((read(error) for error in cell.errors if error.tensor == tensor), None)

    for tensor, name in TENSORS.items():
        header = None if words is None else f"{name}{words}"
        yield Figure(key=f"{tensor}_{end}", header=header, unit=unit, find=find(tensor), rank=rank, note=note)


ERRORS: tuple[Figure[AttentionCell], ...] = (
    *_errors("error_ratio", lambda error: error.ratio, "", unit="times"),
    *_errors(
        "error",
        lambda error: error.relative,
        " relative",
        1,
        note="Relative: the norm of the difference over the norm of the result.",
    ),
    *_errors(
        "max_abs", lambda error: error.max_abs, " largest", 2, note="Largest: the largest difference of one element."
    ),
    *_errors("plain_error", lambda error: error.plain_relative),
    *_errors("plain_max_abs", lambda error: error.plain_max_abs),
)


def attention_cells(run: AttentionRun) -> tuple[MeasuredCell, ...]:
    return tuple(
        measured_cell(cell, asdict(cell.spec), f"{cell.spec.column}, {cell.spec.label}", (*PASS_TIMES, *MEMORY))
        for cell in run.cells
    )
