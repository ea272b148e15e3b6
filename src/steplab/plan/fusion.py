"""Derives the kernels of a compiled step from the operators of the eager one.

torch.compile keeps matmuls and fused attention. It fuses bandwidth-bound operators between them if one feeds the other,
both read the same tensor, or one is the other's only reader. `.item()` ends the compiled graph. Inductor pads
half-precision matmuls to rows of whole 16 bytes, in the kernels that make their operands. Like torch's min-cut
partitioner, backward reads tensors that exist anyway, and recomputes others from their kernel's inputs.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from steplab.costs.operators import FLOATING_BYTES
from steplab.plan.dry_run.events import READS_A_VALUE, Operand, Operator

_REDUCTIONS = ("softmax", "norm", "nll_loss")
_OF_WEIGHTS_TOO = "norm_backward"
"""Suffix of operators that return an input's gradient row by row, and a weight's gradient as a sum over rows."""
_EMBEDDING, _ZEROS = "embedding_dense_backward", "zero"
"""Operators that fill with zeros; autograd does so for the gradient of an unused output of a graph, such as logits."""
_ALONE = (*(_EMBEDDING, _ZEROS, "cross_entropy_softmax"), *("add_rms_norm", "rotary_heads", "swiglu", READS_A_VALUE))
_HALF, _ALIGNED = ("bf16", "fp16"), 8
"""Half-precision formats, and the multiple of elements that Inductor pads their matmuls to.

(torch/_inductor/fx_passes/pad_mm.py, get_alignment_size)
"""

Version = tuple[int, int]
"""(allocation number, number of earlier writes to it): an in-place operator makes a new version."""

Spans = frozenset[tuple[int, int]]
"""(offset, length), in bytes, of the parts of an allocation that are read."""


@dataclass(frozen=True, slots=True)
class Kernel:
    operator: Operator
    moved_bytes: int
    fused: bool = False
    reduces: bool = False
    sums_rows: bool = False
    """True if it sums over rows, as for a norm's weight gradient, in a pass of its own."""
    exponentials: bool = False
    """True if it computes a softmax of logits: its time depends on fp32 elements, not on the bytes it reads."""


def kernels_of(operators: Iterable[Operator], *, compiled: bool, blocks_alone: bool = False) -> list[Kernel]:
    """Kernels of a step, in order.

    blocks_alone: each block is compiled alone, operators outside of blocks are eager, and no kernel spans two blocks.
    """
    if not compiled:
        return [kernel for op in operators for kernel in lone_kernels(op)]
    fuser = _Fuser(blocks_alone)
    for op in operators:
        fuser.take(op)
    fuser.join_only_readers()
    return list(fuser.kernels())


def lone_kernels(op: Operator) -> Iterator[Kernel]:
    """Yield the kernels of an operator that is not fused.

    An embedding's backward has two: one fills the table's gradient with zeros, one adds rows to it.
    """
    if op.name != _EMBEDDING:
        yield Kernel(op, op.moved_bytes)
        return
    yield Kernel(msgspec.structs.replace(op, name="fill", flops=0.0), op.written_bytes)
    yield Kernel(msgspec.structs.replace(op, rate=""), op.read_bytes)


@dataclass(slots=True, eq=False)
class _Group:
    pass_name: str
    unit: str
    level: int
    """Number of matmuls on the longest path of operators that leads to it."""
    operators: list[Operator] = field(default_factory=list)
    reads: dict[Version, Spans] = field(default_factory=dict)
    made: dict[Version, int] = field(default_factory=dict)
    unnamed_bytes: int = 0
    """Bytes read besides whole operands, such as rows of an embedding table."""


@dataclass(slots=True)
class _Made:
    group: _Group | None
    """The fused kernel that writes it; None: an operator that is not fused."""
    level: int
    reads: list[tuple[Version, Spans]] = field(default_factory=list)
    casts: list[Version] = field(default_factory=list)
    """Versions that hold the same numbers in another format."""


class _Fuser:
    def __init__(self, blocks_alone: bool) -> None:
        self._blocks_alone = blocks_alone
        self._order: list[_Group | Operator] = []
        self._written: dict[int, int] = {}
        self._made: dict[Version, _Made] = {}
        self._needed: set[Version] = set()
        self._num_values = 0
        self._readers: dict[Version, list[_Group]] = {}
        self._casts: dict[tuple[Version, int, str, str], Version] = {}
        self._same: dict[Version, Version] = {}

    def take(self, op: Operator) -> None:
        read = [(self._now(each.memory), Spans({(each.start, each.num_bytes)})) for each in op.reads]
        level = max((self._made[version].level for version, _ in read if version in self._made), default=0)
        unit = self._unit(op)
        if op.kind != "streaming" or op.name.startswith(_ALONE) or unit is None:
            self._needed.update(version for version, _ in read)
            self._write(op.writes, None, level + 1)
            self._order.append(op if unit is None else _padded(op))
            self._num_values += op.name == READS_A_VALUE
            return
        cast_of = read[0][0] if op.name == "copy" and not op.strided and read else None
        if cast_of is not None:
            known = self._casts.get((cast_of, op.written_bytes, _pass(op), unit))
            if known is not None:
                self._same[self._next(op.writes[0].memory)] = known
                return
        group = self._group(op, unit, [version for version, _ in read], level)
        for version, spans in read:
            if version not in group.made:
                group.reads[version] = spans | group.reads.get(version, Spans())
                self._add_reader(version, group)
        for version in self._write(op.writes, group, level):
            self._made[version].reads = read
            if cast_of is not None:
                self._casts[cast_of, op.written_bytes, _pass(op), unit] = version
                if cast_of in self._made:
                    self._made[cast_of].casts.append(version)

    def _unit(self, op: Operator) -> str | None:
        """Name of the compiled graph that contains the operator; None: it stays eager."""
        if op.phase == "optimizer":
            return None
        if not self._blocks_alone:
            return str(self._num_values)
        return op.where if op.where.startswith("block ") else None

    def _now(self, memory: int) -> Version:
        version = (memory, self._written.get(memory, 0))
        return self._same.get(version, version)

    def _next(self, memory: int) -> Version:
        self._written[memory] = self._written.get(memory, 0) + 1
        return memory, self._written[memory]

    def _write(self, operands: tuple[Operand, ...], group: _Group | None, level: int) -> list[Version]:
        versions = [self._next(operand.memory) for operand in operands]
        for version, operand in zip(versions, operands, strict=True):
            self._made[version] = _Made(group, level)
            if group is not None:
                group.made[version] = operand.num_bytes
        return versions

    def _add_reader(self, version: Version, group: _Group) -> None:
        readers = self._readers.setdefault(version, [])
        if group not in readers:
            readers.append(group)

    def _group(self, op: Operator, unit: str, read: list[Version], level: int) -> _Group:
        """Kernel that the operator joins: all that make or read its inputs, with no matmul between, merged."""
        found: list[_Group] = []
        for version in read:
            made = self._made.get(version)
            near = [made.group] if made and made.group else []
            for group in (*near, *self._readers.get(version, ())):
                same = (group.level, group.pass_name, group.unit) == (level, _pass(op), unit)
                if same and group not in found:
                    found.append(group)
        if not found:
            found = [_Group(_pass(op), unit, level)]
            self._order.append(found[0])
        for other in found[1:]:
            self._join(found[0], other)
        found[0].operators.append(op)
        found[0].unnamed_bytes += op.read_bytes - sum(operand.num_bytes for operand in op.reads)
        return found[0]

    def _join(self, group: _Group, other: _Group) -> None:
        group.operators += other.operators
        group.made |= other.made
        group.unnamed_bytes += other.unnamed_bytes
        both = _merged(other.reads, group.reads)
        group.reads = {version: spans for version, spans in both.items() if version not in group.made}
        for version in other.made:
            self._made[version].group = group
        for version in other.reads:
            self._readers[version].remove(other)
            if version in group.reads:
                self._add_reader(version, group)
        for version in group.made:
            if group in self._readers.get(version, ()):
                self._readers[version].remove(group)
        other.operators = []  # marks it as merged

    def join_only_readers(self) -> None:
        """Merge each kernel with its reader, if no other kernel or matmul of the same pass reads its results."""
        for item in self._order:
            if not isinstance(item, _Group) or not item.operators:
                continue
            readers: list[_Group] = []
            for version in item.made:
                readers += [r for r in self._readers.get(version, ()) if r.pass_name == item.pass_name]
            only = readers[0] if readers else None
            alone = only and only.unit == item.unit and all(r is only for r in readers)
            if only and alone and not any(v in self._needed for v in item.made):
                self._join(only, item)

    def kernels(self) -> Iterator[Kernel]:
        for item in self._order:
            if isinstance(item, Operator):
                yield from lone_kernels(item)
            elif item.operators:
                reads: dict[Version, Spans] = {}
                for version, spans in item.reads.items():
                    reads = _merged(reads, self._read(version, spans, item))
                written = sum(size for version, size in item.made.items() if self._is_written(version, item))
                reduces = any(part in op.name for op in item.operators for part in _REDUCTIONS)
                logits = [op for op in item.operators if op.name == "_log_softmax"]
                wide_bytes = sum(4 * op.written_bytes // FLOATING_BYTES[op.dtype] for op in logits)
                moved = max(wide_bytes, item.unnamed_bytes + sum(map(_covered_bytes, reads.values())) + written)
                yield Kernel(item.operators[0], moved, fused=True, reduces=reduces, exponentials=bool(logits))
                for op in item.operators:
                    if op.name.endswith(_OF_WEIGHTS_TOO):
                        yield Kernel(op, op.read_bytes, fused=True, reduces=True, sums_rows=True)

    def _read(self, version: Version, spans: Spans, reader: _Group) -> dict[Version, Spans]:
        """Tensors in memory that a fused kernel reads to obtain this version.

        What an earlier pass (forward, or backward) did not store is recomputed from its kernel's inputs.
        """
        made = self._made.get(version)
        if made is None or made.group is None or made.group.pass_name == reader.pass_name:
            return {version: spans}
        for same in (*made.casts, version):
            if self._is_written(same, made.group):
                whole = made.group.made.get(same)
                return {same: spans if whole is None else Spans({(0, whole)})}
        found: dict[Version, Spans] = {}
        for source, parts in made.reads:
            found = _merged(found, self._read(source, parts, reader))
        return found

    def _is_written(self, version: Version, group: _Group) -> bool:
        readers = self._readers.get(version, ())
        if version in self._needed or any(r is not group and r.pass_name == group.pass_name for r in readers):
            return True
        inside = any(operand.memory == version[0] for op in group.operators for operand in op.reads)
        return group.pass_name == "backward" and not readers and not inside


def _padded(op: Operator) -> Operator:
    if op.kind != "matmul" or op.product is None or op.dtype not in _HALF:
        return op
    return msgspec.structs.replace(op, product=op.product.padded(_ALIGNED))


def _merged(a: dict[Version, Spans], b: dict[Version, Spans]) -> dict[Version, Spans]:
    return a | {version: spans | a.get(version, Spans()) for version, spans in b.items()}


def _covered_bytes(spans: Spans) -> int:
    covered = end = 0
    for start, length in sorted(spans):
        covered += max(0, start + length - max(start, end))
        end = max(end, start + length)
    return covered


def _pass(op: Operator) -> str:
    """Recomputation is a separate pass, because it makes tensors that forward did not keep."""
    return f"{op.phase} again" if op.recomputed else op.phase
