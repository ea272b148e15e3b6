"""Chains of low-intensity operators, and the time that fusing them would save.

A multiply, an add or a cast does at most a few FLOPs for each byte it moves, so it lasts as long as memory takes to
deliver its tensors. A chain of them sends every intermediate to memory and fetches it back; one fused kernel reads the
chain's inputs and writes its output. How the operators feed each other is not in the record, so the members of a chain
are taken to be those that ran in the same phase of the same range of the model, and the fused kernel is taken to cost
what the dearest call among them costs now: that one already moves as many bytes as the ends of the chain. Where matmuls
run in the range too, there is a chain before each of them, and as many of the dearest calls are kept. What compilers
fuse across modules is left out, so the estimate is a low one.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from steplab.records.profile import ATTENTION_PARTS, KernelStats, OpStats, Profile

FUSABLE = ("elementwise", "normalisation", "softmax", "reduction", "copy")
"""Categories of work that is bound by memory, whatever its size."""

_PRODUCTS = ("matmul", "attention")
_ACROSS = re.compile(r"HtoD|DtoH|Host|Pageable|Pinned")
"""Matches the names of copies between host and device, which no compiler fuses."""

_PhaseAndRange = tuple[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """The fusable operators of one range in one phase; totals over all profiled steps."""

    phase: str
    range: str
    members: tuple[OpStats, ...]
    """The operators, the one with the longest call first."""
    num_ends: int
    """Calls that stay: as many as there are products that enclose chains, and all calls of the longest operator."""

    @property
    def total_s(self) -> float:
        """Device time of all members."""
        return sum(op.device_s for op in self.members)

    @property
    def saves_s(self) -> float:
        """Device time of the calls that would be fused into the dearest ones."""
        return sum(op.device_s * calls / op.calls for op, calls in self._fused())

    @property
    def saves_kernels(self) -> float:
        """Kernels that would no longer be launched."""
        return sum(op.kernels * calls / op.calls for op, calls in self._fused())

    def _fused(self) -> Iterator[tuple[OpStats, int]]:
        """Each member with the number of its calls that are fused away."""
        kept = self.num_ends
        for op in self.members:
            stays = min(kept, op.calls)
            kept -= stays
            yield op, op.calls - stays


def chains(profile: Profile) -> list[Chain]:
    """Chains of two operators and more, largest saving first; only where the record says the range. The optimizer's
    step is not the model's, and not compiled with it."""
    fed_from_host = {_place(k) for k in profile.kernels if k.category == "copy" and _ACROSS.search(k.name)}
    groups: dict[_PhaseAndRange, list[OpStats]] = {}
    products: dict[_PhaseAndRange, int] = {}
    for op in profile.ops:
        place = _place(op)
        if not op.range or op.phase == "optimizer" or place in fed_from_host or op.name.startswith("triton_"):
            continue
        if op.category in FUSABLE and op.device_s > 0 and op.calls:
            groups.setdefault(place, []).append(op)
        elif op.category in _PRODUCTS and not _is_attention(op.range):
            products[place] = products.get(place, 0) + op.calls
    found = (_chain(place, ops, products.get(place, 0)) for place, ops in groups.items() if len(ops) > 1)
    return sorted(found, key=lambda chain: -chain.saves_s)


def _chain(place: _PhaseAndRange, ops: list[OpStats], num_products: int) -> Chain:
    members = tuple(sorted(ops, key=lambda op: -op.device_s / op.calls))
    return Chain(phase=place[0], range=place[1], members=members, num_ends=max(num_products, members[0].calls))


def _place(of: OpStats | KernelStats) -> _PhaseAndRange:
    """Phase and range. The parts of plain attention are one: its two products enclose scale, mask and softmax."""
    return of.phase, f"{of.range.rpartition('.')[0]}.{ATTENTION_PARTS[0]}" if _is_attention(of.range) else of.range


def _is_attention(name: str) -> bool:
    outer, _, last = name.rpartition(".")
    return bool(outer) and last in ATTENTION_PARTS
