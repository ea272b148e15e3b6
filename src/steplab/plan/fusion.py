"""Operators of an eager step as the kernels of a compiled one: what a compiler fuses, and what that still moves.

A compiler runs the same matrix products and fused attention. It joins the operators between them, which bandwidth
bounds, into one kernel where one feeds the other, where two read the same tensor, and where the result of one has no
reader but the other. A joined kernel reads what comes from outside of it and writes what is read outside of it.

Where the host reads a value off a tensor (`.item()`), the compiled graph ends, and another begins behind it: no kernel
is of both. A product of half precision whose rows would begin at no multiple of 16 bytes is computed with padded sizes,
as Inductor does; the kernels that make its operands write the padding.

What forward keeps for backward is chosen as by torch's min-cut partitioner: tensors that exist anyway are read again,
the others are computed again from the inputs of the kernel that made them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from steplab.plan.dry_run.events import READS_A_VALUE, Operand, Operator

_REDUCTIONS = ("softmax", "norm", "nll_loss")
"""Parts of the names of operators that sum over a dimension."""
_OF_WEIGHTS_TOO = "norm_backward"
"""End of the names of operators whose gradient of a weight is a sum over rows, beside one that is made row by row."""
_ALONE = (
    *("embedding_dense_backward", "cross_entropy_softmax"),
    *("add_rms_norm", "rotary_heads", "swiglu", READS_A_VALUE),
)
"""Beginnings of the names of operators that are not joined with others."""
_HALF, _ALIGNED = ("bf16", "fp16"), 8
"""Number formats of two bytes, and the multiple to which Inductor pads the sizes of their products
(torch/_inductor/fx_passes/pad_mm.py, get_alignment_size)."""

Version = tuple[int, int]
"""A memory, and how often it was written before: what an operator in place makes is not what it took."""

Spans = frozenset[tuple[int, int]]
"""Begins and lengths, in bytes, of the parts of a memory that are read."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of a compiled step."""

    operator: Operator
    """Its operator, or the first of those that were joined."""
    moved_bytes: int
    """What it reads and writes."""
    fused: bool = False
    """Whether it is made of operators between products; else it is the operator as it is."""
    reduces: bool = False
    """Whether one of them sums over a dimension."""
    sums_rows: bool = False
    """Whether it adds up rows, which needs a pass of its own beside kernels that go row by row."""


def kernels_of(operators: Sequence[Operator], *, compiled: bool, blocks_alone: bool = False) -> list[Kernel]:
    """The kernels of operators, in order: each by itself, or as a compiler joins them."""
    if compiled:
        return fused_kernels(operators, blocks_alone=blocks_alone)
    return [Kernel(op, op.moved_bytes) for op in operators]


def fused_kernels(operators: Sequence[Operator], *, blocks_alone: bool = False) -> list[Kernel]:
    """The kernels of a step whose model is compiled, in the order in which they begin.

    With `blocks_alone` each block is compiled by itself: what lies outside of them is not, and no kernel is of two.
    """
    fuser = _Fuser(blocks_alone)
    for op in operators:
        fuser.take(op)
    fuser.join_only_readers()
    return list(fuser.kernels())


@dataclass(slots=True, eq=False)
class _Group:
    """Operators that become one kernel."""

    pass_name: str
    unit: str
    """What is compiled together: a block, or the part of the whole model between two values that the host reads."""
    level: int
    """Number of products on the longest way to it."""
    operators: list[Operator] = field(default_factory=list)
    reads: dict[Version, Spans] = field(default_factory=dict)
    """What comes from outside."""
    made: dict[Version, int] = field(default_factory=dict)
    """Bytes of what is made inside."""
    unnamed_bytes: int = 0
    """Read, and of no operand, such as rows of a table."""


@dataclass(slots=True)
class _Made:
    """What is known of one version of a memory."""

    group: _Group | None
    """The joined kernel that makes it; None: an operator by itself."""
    level: int
    reads: list[tuple[Version, Spans]] = field(default_factory=list)
    """What it is computed of."""
    casts: list[Version] = field(default_factory=list)
    """The same numbers in another format."""


class _Fuser:
    def __init__(self, blocks_alone: bool) -> None:
        self._blocks_alone = blocks_alone
        self._order: list[_Group | Operator] = []
        self._written: dict[int, int] = {}
        self._made: dict[Version, _Made] = {}
        self._needed: set[Version] = set()
        """What operators by themselves read."""
        self._num_values = 0
        """Values that the host has read."""
        self._readers: dict[Version, list[_Group]] = {}
        self._casts: dict[tuple[Version, int, str, str], Version] = {}
        self._same: dict[Version, Version] = {}
        """A cast that was made a second time -> the first."""

    def take(self, op: Operator) -> None:
        """The next operator of the step."""
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
        """What an operator is compiled with; None: it is not compiled, as an optimizer's is not with the model."""
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
        """The kernel that makes or reads one of the inputs with no product between; those of all inputs are joined."""
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
        other.operators = []  # it is no kernel any more

    def join_only_readers(self) -> None:
        """Join a kernel with the one that reads its results, if no other and no product of the same pass does."""
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
        """What the step has become."""
        for item in self._order:
            if isinstance(item, Operator):
                yield Kernel(item, item.moved_bytes)
            elif item.operators:
                reads: dict[Version, Spans] = {}
                for version, spans in item.reads.items():
                    reads = _merged(reads, self._read(version, spans, item))
                written = sum(size for version, size in item.made.items() if self._is_written(version, item))
                reduces = any(part in op.name for op in item.operators for part in _REDUCTIONS)
                moved = item.unnamed_bytes + sum(map(_covered_bytes, reads.values())) + written
                yield Kernel(item.operators[0], moved, fused=True, reduces=reduces)
                for op in item.operators:
                    if op.name.endswith(_OF_WEIGHTS_TOO):
                        yield Kernel(op, op.read_bytes, fused=True, reduces=True, sums_rows=True)

    def _read(self, version: Version, spans: Spans, reader: _Group) -> dict[Version, Spans]:
        """What is read in place of what the eager step reads: of a kernel of an earlier pass, what is in memory."""
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
        """Whether something of the same pass reads it outside of the kernel, or it is a gradient, which backward leaves
        for what comes after."""
        readers = self._readers.get(version, ())
        if version in self._needed or any(r is not group and r.pass_name == group.pass_name for r in readers):
            return True
        inside = any(operand.memory == version[0] for op in group.operators for operand in op.reads)
        return group.pass_name == "backward" and not readers and not inside


def _padded(op: Operator) -> Operator:
    """The operator with a product that Inductor pads."""
    if op.kind != "matmul" or op.product is None or op.dtype not in _HALF:
        return op
    return msgspec.structs.replace(op, product=op.product.padded(_ALIGNED))


def _merged(a: dict[Version, Spans], b: dict[Version, Spans]) -> dict[Version, Spans]:
    """What either reads."""
    return a | {version: spans | a.get(version, Spans()) for version, spans in b.items()}


def _covered_bytes(spans: Spans) -> int:
    """Bytes of all spans, those in several of them once."""
    covered = end = 0
    for start, length in sorted(spans):
        covered += max(0, start + length - max(start, end))
        end = max(end, start + length)
    return covered


def _pass(op: Operator) -> str:
    """Recomputation is a pass of its own: it makes anew what forward did not keep."""
    return f"{op.phase} again" if op.recomputed else op.phase
