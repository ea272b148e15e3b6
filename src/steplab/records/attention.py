"""What a benchmark of attention came to: cells with raw samples, memory and errors."""

from dataclasses import dataclass, field

from steplab.records.failure import Failure, Outcome
from steplab.records.record import Benchmark
from steplab.records.timing import PhaseSamples, find_phase
from steplab.specs.attention import AttentionSpec
from steplab.specs.attention_study import AttentionStudy

ATTENTION_SCHEMA = "steplab.attention/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMemory:
    """Bytes beyond the inputs (queries, keys, values and the output's gradient), which lie there before."""

    saved_bytes: int | None = None
    """Kept from the end of forward until backward, the output among it; the inputs, which are kept too, are not."""
    forward_peak_bytes: int | None = None
    """Most at once in forward without gradients; None where the allocator keeps no high-water mark."""
    both_peak_bytes: int | None = None
    """Most at once in forward and backward, the gradients among it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorError:
    """How far one result is from float64's, beside how far the plain formula is in the same number format."""

    tensor: str
    """output, or the gradient of: queries, keys, values."""
    max_abs: float | None
    """Largest difference of an element; None: the result is not finite."""
    relative: float | None
    """Norm of the difference over the norm of float64's result (Frobenius); None: the result is not finite."""
    plain_max_abs: float | None = None
    """The same of plain attention; None where that did not fit."""
    plain_relative: float | None = None
    """The same of plain attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCell(Outcome):
    """One implementation on one shape."""

    spec: AttentionSpec
    """What was asked."""
    passes: tuple[PhaseSamples, ...] = ()
    """Raw samples of forward, backward and both, a sample a repeat; empty for a failure."""
    first_call_s: float | None = None
    """Synchronised host time of the first forward and backward, whatever is compiled in it included."""
    memory: AttentionMemory | None = None
    """What it took; None for a failure."""
    errors: tuple[TensorError, ...] = ()
    """Against float64; empty where that was not computed."""
    checked_heads: int | None = None
    """Heads (of all sequences) whose results the errors are of."""
    flops: dict[str, float] = field(default_factory=dict)
    """By pass: 4 B H Sq Sk D forward, half of it if causal, 2.5 times as much backward, whatever is executed."""
    interleaved: tuple[str, ...] = ()
    """Who took turns with it, repeat by repeat; empty: it was timed by itself."""
    notes: tuple[str, ...] = ()
    """What was not measured, and why; whom `auto` chose; what its time holds besides its work."""

    def samples(self, name: str) -> tuple[float, ...]:
        """Seconds of each repeat of a pass; none where it was not timed."""
        found = find_phase(self.passes, name)
        return found.best_s if found else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRun(Benchmark[AttentionCell]):
    """A stored benchmark of attention."""

    study: AttentionStudy
    """What was asked, and how it was to be measured."""
    schema: str = ATTENTION_SCHEMA
    """Format of this record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorTerm:
    """One tensor of an accounting."""

    what: str
    """'scores, scaled'."""
    formula: str
    """Of its bytes, in the symbols of the shape: 'B H S K e'."""
    shape: tuple[int, ...]
    """Its sizes."""
    element_bytes: int
    """Of one element."""
    kept: bool = False
    """Whether forward keeps it for backward."""

    @property
    def num_bytes(self) -> int:
        """All of them."""
        total = self.element_bytes
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionAccount:
    """The tensors that plain attention holds at its highest moment, and the memory they must fit into."""

    spec: AttentionSpec
    """The cell."""
    moment: str
    """'backward of the softmax'."""
    terms: tuple[TensorTerm, ...]
    """What is alive then."""
    memory_bytes: int
    """Of the device."""
    memory_source: str
    """Whose memory that is."""
    asked: AttentionSpec | None = None
    """What was asked for, where that fits and this is it with its sequence doubled until it did not; None: this was."""
    previous: AttentionSpec | None = None
    """The largest smaller cell, which fits; None: none was looked at."""
    previous_bytes: int | None = None
    """What that one needs."""
    measured: Failure | None = None
    """What the device said, where the cell was tried."""

    @property
    def total_bytes(self) -> int:
        """The sum."""
        return sum(term.num_bytes for term in self.terms)
