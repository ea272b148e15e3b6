"""Predicts the peak memory of each rank of a layout, as a sum over the parts of its step.

A rank holds the tensors of the block that runs, for each microbatch in flight the activations of earlier blocks, its
share of weights, gradients and optimizer state, weights gathered from other ranks, and communication buffers.

FSDP2 (torch/distributed/fsdp/_fully_shard), with G a unit's bytes of weights as gathered and R of gradients as reduced:
forward holds the current unit's weights and the all-gather that brought them, 2 G. Backward holds its weights, the next
unit's all-gather, and the previous unit's gradients in transit: 2 G + R. The head's weights stay gathered between the
passes; without --reshard-after-forward all weights do.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from steplab.costs.weights import PartName, Weight, elements, trained
from steplab.ops.triton_places import implementation
from steplab.plan.dry_run.allocator import CachingAllocator
from steplab.plan.dry_run.optimizers import tables_of_one_kernel
from steplab.plan.dry_run.parts import Bundle, Held, Parts, bundle_of
from steplab.plan.dry_run.sizes import Split
from steplab.plan.layout.ranks import RankGroup, Stage, rank_groups
from steplab.plan.layout.sharing import Sharing, stage_bytes, weight_bytes
from steplab.plan.terms import Alike, terms_of
from steplab.records.prediction import RankMemory, Term
from steplab.specs.checkpointing import SELECTIVE, differs_by_block, is_recomputed
from steplab.specs.step import StepSpec
from steplab.specs.step_choices import WITH_MASTERS

_BATCHES = 2
_FP32_BYTES, _BF16_BYTES = 4, 2
_MOST_ROUNDED = 8
"""Number of blocks allocated one by one to find the rounding of their weights, which grows in proportion beyond."""

CACHED_SHARE = 0.04
"""Excess of reserved over allocated memory (gaps and cache), as a share of allocated memory.

The median over the ranks of benchmarks/results/layout_h200_202611.jsonl.gz is 0.035; over the single GPUs of
docs/memory_formulas.md it is 0.03.
"""

_Sizes = tuple[tuple[int, ...], ...]
Holdings = list[tuple[Bundle, int]]


class RankPeak(NamedTuple):
    num_bytes: int
    phase: str
    where: str
    reserved_bytes: int
    phase_peaks: dict[str, int]
    holdings: Holdings


def memory_by_rank(spec: StepSpec, workspace_bytes: int, sharing: Sharing) -> tuple[RankMemory, ...]:
    """Peak memory of each group of ranks, in pipeline order."""
    groups = rank_groups(spec, sharing.model.num_layers)
    return tuple(_Rank(spec, group, sharing, workspace_bytes).memory() for group in groups)


def peaks_by_rank(
    spec: StepSpec, groups: Sequence[RankGroup], workspace_bytes: int, sharing: Sharing
) -> list[RankPeak]:
    return [_Rank(spec, group, sharing, workspace_bytes).peak() for group in groups]


def parts_of_rank(spec: StepSpec, sharing: Sharing, block: int) -> Parts:
    """Memory and operators of one microbatch on a rank, with blocks checkpointed as block `block` is."""
    checkpointing = spec.checkpointing if spec.checkpoints_apply else "none"
    if checkpointing not in SELECTIVE:
        checkpointing = "full" if is_recomputed(checkpointing, block) else "none"
    batch = spec.batch // spec.num_microbatches
    split = Split(spec.layout.tp, sharing.splits_tokens)
    return sharing.model.parts(spec, split=split, gathering=sharing.gathering, batch=batch, recomputed=checkpointing)


def counted_parts(spec: StepSpec, sharing: Sharing, blocks: range) -> list[tuple[Parts, int]]:
    if not _differ(spec):
        return [(parts_of_rank(spec, sharing, 0), len(blocks))]
    found = [parts_of_rank(spec, sharing, block) for block in blocks]
    numbers = Counter(map(id, found))
    return [(parts, numbers[key]) for key, parts in {id(parts): parts for parts in found}.items()]


def _differ(spec: StepSpec) -> bool:
    """True if blocks differ in their checkpointing."""
    return spec.checkpoints_apply and differs_by_block(spec.checkpointing)


class _Rank:
    """Counts the memory of a group's first rank, whose shards are the largest."""

    def __init__(self, spec: StepSpec, group: RankGroup, sharing: Sharing, workspace_bytes: int) -> None:
        self._spec, self._group, self._sharing = spec, group, sharing
        model, tp = sharing.model, spec.layout.tp
        self._microbatches = spec.num_microbatches
        self._gradients = spec.pass_name != "forward"
        self._adds_up, self._num_ended = False, 0
        self._embedding = model.weights("embedding", tp) if group.stages[0].first else ()
        self._head = model.weights("head", tp) if group.stages[-1].last else ()
        self._block = model.weights("block", tp)
        self._num_blocks = len(group.blocks)
        self._has_masters = spec.precision in WITH_MASTERS
        self._alike = None if _differ(spec) else parts_of_rank(spec, sharing, 0)
        self._always = [*self._state(), (self._others(workspace_bytes), 1)]

    def peak(self) -> RankPeak:
        phases: dict[str, int] = {}
        highest: tuple[int, str, str, Holdings] | None = None
        most_of_main_stream = 0
        for phase, where, holdings in self._moments():
            size = sum(bundle.num_bytes * count for bundle, count in holdings)
            aside = sum(bundle.num_bytes * count for bundle, count in holdings if _is_aside(bundle))
            most_of_main_stream = max(most_of_main_stream, size - aside)
            phases[phase] = max(size, phases.get(phase, 0))
            if highest is None or size > highest[0]:
                highest = size, phase, where, holdings
        assert highest is not None
        reserved_bytes = round(most_of_main_stream * (1 + CACHED_SHARE)) + self._aside_bytes()
        return RankPeak(*highest[:3], reserved_bytes, phases, highest[3])

    def memory(self) -> RankMemory:
        peak = self.peak()
        return RankMemory(
            ranks=self._group.label,
            first_rank=self._group.first_rank,
            num_ranks=self._group.num_ranks,
            has=self._group.has,
            in_flight=max(stage.in_flight for stage in self._group.stages),
            peak_bytes=peak.num_bytes,
            peak_phase=peak.phase,
            peak_where=peak.where,
            phase_peaks=peak.phase_peaks,
            reserved_bytes=peak.reserved_bytes,
            terms=_terms(peak.holdings),
            parameters_bytes=self._parameter_bytes(),
            gradients_bytes=self._gradient_bytes() if self._gradients else 0,
            optimizer_bytes=self._optimizer_bytes(),
        )

    def _aside_bytes(self) -> int:
        """Memory of FSDP2's own streams, unusable for the compute stream: two all-gathers and all gradients' shards."""
        sharing = self._sharing
        if not sharing.gathers or not self._gradients:
            return 0
        unit = sharing.gathered_bytes * self._padded["block"]
        return 2 * max(unit, sharing.weight_bytes * self._padded["embedding"]) + self._trained_bytes

    # --- moments ------------------------------------------------------------------------------------------

    def _moments(self) -> Iterator[tuple[str, str, Holdings]]:
        for adds_up, num_ended in self._fullest():
            self._adds_up, self._num_ended = adds_up, num_ended
            yield from self._passes()
        if self._spec.pass_name == "train":
            in_allocator = not (self._sharing.buckets and self._sharing.buckets.shared_bytes)
            gradients = self._share("gradients", self._gradient_bytes()) if in_allocator else []
            yield "optimizer", self._spec.optimizer, [*self._always, *gradients, *self._of_optimizer()]

    def _fullest(self) -> list[tuple[bool, int]]:
        """Points of a step that may need most memory: (True if an earlier microbatch's gradients exist, number of
        microbatches that have ended).

        While all microbatches are in flight, no gradients exist yet; once they do, one microbatch has ended.
        """
        if not self._gradients or (self._spec.micro_steps == 1 and self._microbatches == 1):
            return [(False, 0)]
        if self._microbatches > max(stage.in_flight for stage in self._group.stages) or self._microbatches == 1:
            return [(True, 0)]
        return [(False, 0), (True, 1)]

    def _passes(self) -> Iterator[tuple[str, str, Holdings]]:
        for stage in self._group.stages:
            first, last = stage.blocks[0], stage.blocks[-1]
            parts: list[tuple[PartName, int]] = [("block", last)]
            parts += [("embedding", first)] if stage.first else []
            parts += [("head", last)] if stage.last else []
            for part, block in parts:
                yield from self._in_part(stage, "forward", part, block)
            if not self._gradients:
                continue
            for part, block in [*parts, ("block", first)]:
                yield from self._in_part(stage, "backward", part, block)

    def _in_part(self, stage: Stage, phase: str, part: PartName, block: int) -> Iterator[tuple[str, str, Holdings]]:
        moment = self._parts(block).moment(phase, part)
        if moment is None:
            return
        held = [*self._always, (moment.own, 1)]
        if part != "embedding":
            before = range(stage.blocks[0], block + (part == "head"))
            held += self._kept_by(before, embedding=stage.first, forward=phase == "forward")
        for other in self._group.stages:
            held += [
                (bundle, count * max(other.in_flight - (other is stage) - self._num_ended, 0))
                for bundle, count in self._kept_by(other.blocks, embedding=other.first, head=other.last)
            ]
        held += self._gathered(stage, phase, part, block)
        held += self._gradients_held(stage, phase, part, block)
        yield phase, moment.where, held

    def _parts(self, block: int) -> Parts:
        return parts_of_rank(self._spec, self._sharing, block) if self._alike is None else self._alike

    def _counted(self, blocks: range) -> list[tuple[Parts, int]]:
        if self._alike is not None:
            return [(self._alike, len(blocks))]
        return counted_parts(self._spec, self._sharing, blocks)

    def _kept_by(self, blocks: range, *, embedding: bool, head: bool = False, forward: bool = False) -> Holdings:
        held: Holdings = [
            (parts.held_by_block if forward else parts.kept_by_block, count) for parts, count in self._counted(blocks)
        ]
        if not self._gradients:
            return held if forward else []
        some = self._parts(self._group.blocks[0])
        held += [(some.kept_by_embedding, 1)] if embedding else []
        held += [(some.kept_by_head, 1)] if head else []
        return held

    # --- state --------------------------------------------------------------------------------------------

    def _weights(self) -> tuple[Weight, ...]:
        return (*self._embedding, *self._block * self._num_blocks, *self._head)

    def _local(self, weight: Weight) -> int:
        return weight.shard(self._sharing.fsdp)

    def _has_master(self, weight: Weight) -> bool:
        is_whole = weight.name == "head.weight" and implementation(self._spec.loss).in_chunks  # it stays in fp32
        return self._has_masters and weight.of_linear_layer and not is_whole

    def _bytes_of(self, weights: Sequence[Weight]) -> int:
        width = self._sharing.weight_bytes
        return sum((_BF16_BYTES if self._has_master(weight) else width) * self._local(weight) for weight in weights)

    def _parameter_bytes(self) -> int:
        return self._sharing.owned.parameters_bytes if self._sharing.owned else self._of_all(self._bytes_of)

    def _gradient_bytes(self) -> int:
        buckets = self._sharing.buckets
        if buckets and buckets.shared_bytes:
            return buckets.shared_bytes
        return buckets.buffered_bytes if buckets and self._sharing.owned else self._trained_bytes

    def _gradient_bytes_of(self, weights: Sequence[Weight]) -> int:
        return self._bytes_of([weight for weight in weights if weight.trained])

    @functools.cached_property
    def _trained_bytes(self) -> int:
        return self._of_all(self._gradient_bytes_of)

    @functools.cached_property
    def _padded(self) -> dict[PartName, int]:
        """Elements of each part's weights when gathered over all fsdp ranks, with padding."""
        parts: dict[PartName, Sequence[Weight]]
        parts = {"embedding": self._embedding, "block": self._block, "head": self._head}
        return {part: sum(each.padded(self._sharing.fsdp) for each in weights) for part, weights in parts.items()}

    def _of_all(self, measure: Callable[[Sequence[Weight]], int]) -> int:
        return measure(self._embedding) + self._num_blocks * measure(self._block) + measure(self._head)

    def _optimizer_bytes(self) -> int:
        if self._spec.pass_name != "train" or self._spec.optimizer == "sgd":
            return 0
        moments = 2 * self._trained_bytes
        number = self._of_all(lambda weights: sum(weight.trained for weight in weights))
        if self._sharing.owned:
            moments, number = 2 * self._sharing.owned.weights_bytes, self._sharing.owned.num_weights
        if self._has_masters:
            with_masters = self._of_all(lambda weights: elements([w for w in weights if self._has_master(w)]))
            moments = _FP32_BYTES * (2 * self._of_all(elements) + with_masters)
        in_one_kernel = self._spec.optimizer in ("adamw_fused", "adamw_triton")
        return moments + (_FP32_BYTES * number if in_one_kernel else 0) + self._table_bytes()

    def _table_bytes(self) -> int:
        if self._spec.optimizer != "adamw_triton":
            return 0
        sizes: dict[bool, list[int]] = {}
        for weight in self._weights():
            sizes.setdefault(self._has_master(weight), []).append(weight.elements)
        tables = (t for kind, of in sizes.items() for t in tables_of_one_kernel(of, has_masters=kind))
        return sum(table.size.value * table.dtype.num_bytes for table in tables)

    def _state(self) -> Holdings:
        is_shared = self._sharing.owned is not None and self._sharing.by_peer_copies  # outside torch's allocator
        return [
            *self._share("parameters", 0 if is_shared else self._parameter_bytes(), formula=self._formula(1)),
            *self._share("optimizer_state", self._optimizer_bytes(), formula=self._formula(2)),
            *self._share("rounding", self._rounding(with_state=self._optimizer_bytes() > 0)),
        ]

    def _share(self, category: str, num_bytes: int, what: str = "", formula: str = "") -> Holdings:
        if not num_bytes:
            return []
        return [(_single(category, what or _WORDS.get(category, category), formula or _SUM, num_bytes), 1)]

    def _formula(self, copies: int) -> str:
        if self._has_masters:
            return _SUM
        ranks = self._sharing.fsdp if self._sharing.gathers else 1
        return f"{copies * self._sharing.weight_bytes} W" + (f" / {ranks}" if ranks > 1 else "")

    def _rounding(self, *, with_state: bool) -> int:
        """Bytes that the allocator's rounding adds to weights or gradients; with_state: and optimizer state."""

        def sizes(weight: Weight) -> tuple[int, ...]:
            own = self._bytes_of([weight])
            if not with_state or not weight.trained:
                return (own,)
            return (own, *[_FP32_BYTES * self._local(weight)] * 3) if self._has_master(weight) else (own,) * 3

        parts = [tuple(map(sizes, part)) for part in (self._embedding, self._block, self._head)]
        return _rounding(*parts, self._num_blocks)

    def _others(self, workspace_bytes: int) -> Bundle:
        spec, model = self._spec, self._sharing.model
        held = {
            Held("inputs", "tokens and targets", "a batch", model.input_bytes(spec), 0): _BATCHES,
            Held("workspaces", "cuBLAS", "workspace", workspace_bytes, 0): 2 if self._gradients else 1,
        }
        if table := model.table_bytes(spec):
            what, formula = ("rotary table", "4 T d / h") if model.is_own else ("buffers", "as they are")
            held[Held("parameters", what, formula, table, 0)] = 1
        num_messages = sum((not stage.first) + (not stage.last) for stage in self._group.stages) * self._microbatches
        if num_messages:
            what, size = "residual stream and its gradient, from neighbours", stage_bytes(spec, self._sharing)
            held[Held("communication", what, f"{weight_bytes(spec)} B T d / n", size, -size % 512)] = num_messages
        return bundle_of(held)

    def _of_optimizer(self) -> Holdings:
        width = self._sharing.weight_bytes
        if self._spec.optimizer == "adamw_foreach":
            return self._share("temporaries", self._trained_bytes, "roots of the second moments")
        if self._spec.optimizer == "adamw_loop":
            return self._share("temporaries", 2 * width * max(map(self._local, self._weights())), "root, denominator")
        return []

    # --- gradients and messages ---------------------------------------------------------------------------

    def _gradients_held(self, stage: Stage, phase: str, part: PartName, block: int) -> Holdings:
        sharing, buckets = self._sharing, self._sharing.buckets
        if not self._gradients:
            return []
        whole = self._of_all(trained)
        if not whole:
            return []
        later = self._after(stage, part, block, trained) if phase == "backward" else 0
        if sharing.gathers:
            reduced = sharing.reduced_bytes
            if self._adds_up:
                return self._share("gradients", reduced * whole, "gradients, not yet sharded", f"{reduced} W")
            of_head = sharing.gathered_bytes * trained(self._head) if phase == "backward" and part != "head" else 0
            shards = sharing.weight_bytes * max(later - trained(self._head), 0) // sharing.fsdp
            return [
                *self._share("gradients", shards, _SHARDS),
                *self._share("gradients", of_head, "gradients of the head"),
            ]
        width = sharing.weight_bytes
        if buckets is None:
            all_bytes = self._trained_bytes
            later_bytes = self._after(stage, part, block, self._gradient_bytes_of) if phase == "backward" else 0
            held_bytes = all_bytes if self._adds_up else later_bytes
            rounding = round(self._rounding(with_state=False) * held_bytes / all_bytes)
            return [*self._share("gradients", held_bytes), *self._share("rounding", rounding)]
        alone = 0 if buckets.shared_bytes or sharing.owned else width * whole - buckets.buffered_bytes
        if self._adds_up:
            unbucketed = width * whole  # in autograd's own memory, until the last micro-step
            return self._share("gradients", buckets.buffered_bytes + unbucketed)
        share = later / whole
        waiting = min(width * later, buckets.waiting_bytes)
        return [
            *self._share("gradients", buckets.buffered_bytes + round(alone * share)),
            *self._share("communication", waiting, "gradients that wait for their bucket"),
        ]

    def _after(self, stage: Stage, part: PartName, block: int, measure: Callable[[Sequence[Weight]], int]) -> int:
        if part == "head":
            return 0
        after = measure(self._head)
        blocks = [b for other in self._group.stages for b in other.blocks if b > block or part == "embedding"]
        return after + measure(self._block) * len(blocks)

    def _gathered(self, stage: Stage, phase: str, part: PartName, block: int) -> Holdings:
        sharing = self._sharing
        if not sharing.gathers:
            return []
        unit, width = self._padded["block"], sharing.gathered_bytes
        of_head, of_embedding = width * self._padded["head"], sharing.weight_bytes * self._padded["embedding"]
        if not sharing.model.is_own:  # torch's root unit has both, from beginning to end
            of_head, of_embedding = of_head + of_embedding, 0
        if not sharing.reshard:
            all_of = of_embedding + of_head + width * unit * self._num_blocks
            return self._share("communication", all_of, "gathered weights")
        weights = of_embedding if part == "embedding" else 0 if part == "head" else width * unit
        message = of_embedding if part == "embedding" and phase == "forward" else width * unit
        if not sharing.model.is_own and part == "embedding" and phase == "forward":
            weights, message = width * unit, of_head + width * unit  # the root's message lasts until block 0 is there
        if phase == "backward" and block == stage.blocks[0] and part == "block":
            message = of_embedding
        if part == "embedding" and phase == "backward":
            message = 0
        follows_block = part == "embedding" or (part == "block" and block != stage.blocks[-1])
        sent = sharing.reduced_bytes * unit if phase == "backward" and follows_block and not self._adds_up else 0
        return [
            *self._share("communication", weights + of_head, "gathered weights"),
            *self._share("communication", message, _ON_THEIR_WAY),
            *self._share("communication", sent, "gradients on their way"),
        ]


_SHARDS, _ON_THEIR_WAY = "shards of gradients", "weights on their way"


def _is_aside(bundle: Bundle) -> bool:
    return len(bundle.holdings) == 1 and next(iter(bundle.holdings)).what in (_SHARDS, _ON_THEIR_WAY)


_SUM = "sum over weights"
_WORDS = {"optimizer_state": "moments, step numbers, masters and tables"}


@functools.lru_cache(maxsize=4096)
def _single(category: str, what: str, formula: str, num_bytes: int) -> Bundle:
    sizes = (0, num_bytes) if category == "rounding" else (num_bytes, 0)
    return bundle_of({Held(category, what, formula, *sizes): 1})


@functools.lru_cache(maxsize=4096)
def _rounding(embedding: _Sizes, block: _Sizes, head: _Sizes, num_blocks: int) -> int:
    """Bytes that the allocator's rounding adds to tensors of these sizes, with one tuple of sizes for each weight.

    The first tensor of every weight is allocated before any weight's other tensors.
    """
    placed = min(num_blocks, _MOST_ROUNDED)
    sizes = (*embedding, *block * placed, *head)
    allocator = CachingAllocator()
    for size in (*(first for first, *_ in sizes), *(size for _, *others in sizes for size in others)):
        allocator.allocate(size)
    return round((allocator.allocated_bytes - sum(map(sum, sizes))) * num_blocks / placed)


def _terms(holdings: Holdings) -> tuple[Term, ...]:
    counted: Counter[Alike] = Counter()
    rounding = 0
    for bundle, times in holdings:
        for held, count in bundle.holdings.items():
            rounding += held.rounding_bytes * count * times
            if held.num_bytes:
                counted[held.category, held.what, held.formula, held.num_bytes] += count * times
    return terms_of(counted, rounding)
