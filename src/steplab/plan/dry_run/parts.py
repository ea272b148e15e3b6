"""Finds the memory of a step's parts (embedding, one block, head), from a dry run of a model of two blocks.

plan.layout.memory composes a rank of n blocks from these parts. Each part's peak lists every tensor alive, without
weights, gradients of finished parts and optimizer state, which a layout shards.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from steplab.costs.weights import PartName
from steplab.plan.dry_run.allocator import Block, CachingAllocator
from steplab.plan.dry_run.events import Allocated, Began, Event, Freed, Listener, Operator
from steplab.plan.dry_run.machine import Gathering
from steplab.plan.dry_run.sizes import Split
from steplab.plan.dry_run.step import run_dry
from steplab.plan.dry_run.tensors import Piece
from steplab.specs.model import ModelSpec, TransformerShape
from steplab.specs.step import StepSpec

_STATE = ("parameters", "optimizer_state", "inputs", "workspaces")
_LAST, _FIRST = "block 1", "block 0"
BEFORE, BEHIND = "embedding", "head and loss"
_WHERE: dict[PartName, str] = {"embedding": BEFORE, "block": _LAST, "head": BEHIND}
_KEPT_BEFORE: dict[PartName, tuple[str, ...]] = {
    "embedding": (),
    "block": ("embedding", _FIRST),
    "head": ("embedding", _FIRST, _LAST),
}
"""Parts whose saved tensors exist while a part runs."""


@dataclass(frozen=True, slots=True)
class Held:
    category: str
    """As in MEMORY_CATEGORIES."""
    what: str
    formula: str
    num_bytes: int
    rounding_bytes: int


@dataclass(frozen=True, slots=True)
class Bundle:
    holdings: Mapping[Held, int]
    num_bytes: int


def bundle_of(holdings: Mapping[Held, int]) -> Bundle:
    total = sum(count * (held.num_bytes + held.rounding_bytes) for held, count in holdings.items())
    return Bundle(holdings, total)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Peak memory of one part in one pass."""

    phase: str
    part: PartName
    where: str
    """The allocation that reached the peak, in words."""
    own: Bundle
    """Tensors alive at the peak, with gradients of the part's weights, without tensors that earlier parts saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    moments: tuple[Moment, ...]
    kept_by_block: Bundle
    """Tensors that a block saves for its backward pass."""
    held_by_block: Bundle
    """Tensors of a block while later parts run forward, with autocast copies that are freed after the forward pass."""
    kept_by_embedding: Bundle
    kept_by_head: Bundle
    operators: Mapping[tuple[str, PartName], tuple[Operator, ...]]
    """Operators of one block, by phase and part, without the optimizer's."""

    def moment(self, phase: str, part: PartName) -> Moment | None:
        """Peak of a part in a pass; None: the pass does not run."""
        return next((moment for moment in self.moments if (moment.phase, moment.part) == (phase, part)), None)


@functools.lru_cache(maxsize=2048)
def parts_of(spec: StepSpec, *, split: Split, gathering: Gathering | None, batch: int, recomputed: str) -> Parts:
    """Memory and operators of each part of a micro-step of `batch` sequences.

    recomputed: checkpointing of each block: none, full or selective. split, gathering: as in `run_dry`. The spec's
    layout, batch, checkpointing and micro-steps are ignored (a loss in chunks multiplies its gradients once more in
    several micro-steps). Blocks are compiled one by one; the rest is eager.
    """
    assert spec.model.shape is not None
    two_blocks = StepSpec(
        model=_two_blocks(spec.model.shape),
        batch=batch,
        context=spec.context,
        pass_name="forward_backward" if spec.pass_name != "forward" else "forward",
        precision=spec.precision,
        compile="block" if spec.compile != "off" else "off",
        attention=spec.attention,
        block_ops=spec.block_ops,
        loss=spec.loss,
        checkpointing=recomputed,
    )
    return _parts_of(two_blocks, split, gathering)


@functools.lru_cache(maxsize=256)
def _two_blocks(shape: TransformerShape) -> ModelSpec:
    return ModelSpec(name="two blocks", kind="transformer", shape=dataclasses.replace(shape, num_layers=2))


@functools.lru_cache(maxsize=2048)
def _parts_of(spec: StepSpec, split: Split, gathering: Gathering | None) -> Parts:
    found = _Reading(partial(run_dry, spec, split=split, gathering=gathering))
    if spec.compile == "off":
        return _parts(found)
    # The memory of a compiled block is an estimate without operators; head and loss are eager.
    eager = _parts_of(dataclasses.replace(spec, compile="off"), split, gathering)
    of_blocks = [moment for moment in found.moments() if moment.part == "block"]
    others = [moment for moment in eager.moments if moment.part != "block"]
    kept = found.kept(_FIRST)
    return dataclasses.replace(eager, moments=(*of_blocks, *others), kept_by_block=kept, held_by_block=kept)


def parts_of_run(run: Callable[[Listener], None]) -> Parts:
    """Memory and operators of each part of a micro-step with two blocks, `block 0` and `block 1`.

    run: reports the micro-step's events. `block 0` represents all blocks; the head's moments add what `block 1`
    saves more than it, or less. After a frozen embedding `block 0` saves less, so the larger block represents all.
    """
    found = _Reading(run)
    parts, first, last = _parts(found), found.kept(_FIRST), found.kept(_LAST)
    if parts.moment("backward", "embedding") is None:
        return dataclasses.replace(parts, kept_by_block=max(first, last, key=lambda kept: kept.num_bytes))
    more = _unrounded(last)
    more.subtract(_unrounded(first))

    def with_more(own: Bundle) -> Bundle:
        held = Counter(own.holdings)
        held.update({one: count for one, count in more.items() if count})
        return bundle_of(held)

    moments = [
        dataclasses.replace(each, own=with_more(each.own)) if each.part == "head" else each for each in parts.moments
    ]
    return dataclasses.replace(parts, moments=tuple(moments))


def _unrounded(kept: Bundle) -> Counter[Held]:
    """The bundle's tensors without the allocator's rounding, which may differ between equal tensors of two blocks."""
    found = Counter[Held]()
    for held, count in kept.holdings.items():
        found[dataclasses.replace(held, rounding_bytes=0)] += count
    return found


def _parts(found: "_Reading") -> Parts:
    return Parts(
        moments=tuple(found.moments()),
        kept_by_block=found.kept(_FIRST),
        held_by_block=found.held_by_block(),
        kept_by_embedding=found.kept("embedding"),
        kept_by_head=found.kept(BEHIND),
        operators=_by_part(found.operators),
    )


class _Reading:
    """A run's peaks and saved tensors, read after it, when the category of each allocation is settled."""

    def __init__(self, run: Callable[[Listener], None]) -> None:
        events: list[Event] = []
        run(events.append)
        self.operators = [event for event in events if isinstance(event, Operator)]
        self._peaks: dict[tuple[str, str], tuple[int, str, list[tuple[Piece, int]]]] = {}
        self._after_forward: list[tuple[Piece, int]] = []
        alive: dict[int, tuple[Piece, int]] = {}
        allocator, blocks, phase = CachingAllocator(), dict[int, Block](), ""
        for event in events:
            if isinstance(event, Began):
                phase = event.phase
                if phase == "backward":
                    self._after_forward = list(alive.values())
            elif isinstance(event, Freed):
                allocator.free(blocks.pop(id(event.piece)))
                alive.pop(id(event.piece), None)
            elif isinstance(event, Allocated):
                piece = event.piece
                block = blocks[id(piece)] = allocator.allocate(piece.num_bytes)
                if piece.category not in _STATE:
                    alive[id(piece)] = piece, block.num_bytes
                    self._raise_peak(phase, piece, alive.values())
        if not self._after_forward:
            self._after_forward = list(alive.values())

    def _raise_peak(self, phase: str, piece: Piece, alive: Iterable[tuple[Piece, int]]) -> None:
        now = [
            (other, of_other)
            for other, of_other in alive
            if other.category != "gradients" or other.where == piece.where or _waits_for_embedding(other)
        ]
        level = sum(of_other for _, of_other in now)
        if level > self._peaks.get((phase, piece.where), (0,))[0]:
            part = "a block" if piece.where in (_FIRST, _LAST) else piece.where
            self._peaks[phase, piece.where] = level, f"{part}: {piece.what}", now

    def moments(self) -> Iterable[Moment]:
        """Peaks of the embedding, the last block and the head in each pass."""
        for phase in ("forward", "backward"):
            for part, where in _WHERE.items():
                if (phase, where) not in self._peaks:
                    continue
                _, reached, alive = self._peaks[phase, where]
                own = [one for one in alive if one[0].where not in _KEPT_BEFORE[part]]
                streams = [one for one in alive if one[0].what == "residual stream"]
                if part == "head" and not any(piece.where == _FIRST for piece, _ in streams):
                    own += [one for one in streams if one[0].where == _LAST]  # no block keeps it, and the head reads it
                yield Moment(phase=phase, part=part, where=reached, own=_counted(own))

    def held_by_block(self) -> Bundle:
        return _counted(one for one in self._peaks["forward", BEHIND][2] if one[0].where == _FIRST)

    def kept(self, where: str) -> Bundle:
        return _counted(one for one in self._after_forward if one[0].where == where)


def _counted(alive: Iterable[tuple[Piece, int]]) -> Bundle:
    return bundle_of(
        Counter(
            Held(piece.category, piece.what, piece.formula, piece.num_bytes, size - piece.num_bytes)
            for piece, size in alive
        )
    )


def _waits_for_embedding(piece: Piece) -> bool:
    """True for the embedding's gradient from a tied head, which lives until the embedding's own gradient."""
    return piece.category == "gradients" and piece.where == BEHIND and "embedding.weight" in piece.what


def _by_part(operators: Iterable[Operator]) -> dict[tuple[str, PartName], tuple[Operator, ...]]:
    found: dict[tuple[str, PartName], list[Operator]] = {}
    names = {where: part for part, where in _WHERE.items()}
    for operator in operators:
        if operator.where in names:
            found.setdefault((operator.phase, names[operator.where]), []).append(operator)
    return {key: tuple(those) for key, those in found.items()}
