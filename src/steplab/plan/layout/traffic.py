"""Lists the transfers of one rank in a step, axis by axis, as in measurement.step.distribute and parallel.

Sizes follow nccl-tests: an all-gather's output, a reduce-scatter's input.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from steplab.costs.communication import bus_factor
from steplab.costs.weights import Weight, trained
from steplab.plan.layout.links import Group
from steplab.plan.layout.model import ForeignModel, SpreadModel
from steplab.plan.layout.ranks import RankGroup
from steplab.plan.layout.sharing import Sharing, stage_bytes, weight_bytes
from steplab.specs.checkpointing import SELECTIVE, is_recomputed
from steplab.specs.step import StepSpec

_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    axis: str
    collective: str
    carries: str
    phase: str
    """'forward', 'backward', 'after backward' or 'optimizer'."""
    message_bytes: int
    count: int
    """Number of these transfers in a step of one rank."""
    group: Group
    beside: bool
    """True if it overlaps with computation."""

    @property
    def total_bytes(self) -> int:
        return self.message_bytes * self.count

    @property
    def wire_bytes(self) -> float:
        return self.total_bytes * bus_factor(self.collective, self.group.size)


def groups_of(spec: StepSpec) -> dict[str, Group]:
    """Ranks that communicate along each axis; tp is innermost (parallel.layout)."""
    layout, stride, found = spec.layout, 1, {}
    for axis in ("tp", "fsdp", "dp", "pp"):
        size = getattr(layout, axis)
        found[axis] = Group(size=size, stride=stride)
        stride *= size
    return found


def traffic_of(spec: StepSpec, rank: RankGroup, sharing: Sharing) -> tuple[Traffic, ...]:
    of_data = (*_data_parallel(spec, sharing), *_sharded(spec, rank, sharing))
    return (*of_data, *_split(spec, rank, sharing), *_staged(spec, rank, sharing))


def _data_parallel(spec: StepSpec, sharing: Sharing) -> Iterator[Traffic]:
    buckets = sharing.buckets
    if buckets is None or spec.pass_name == "forward":
        return
    messages = partial(Traffic, axis="dp", group=groups_of(spec)["dp"])
    collective = "reduce_scatter" if sharing.owned else "all_reduce"
    during = buckets.during_backward
    send = partial(messages, collective=collective, phase="backward" if during else "after backward", beside=during)
    for size, count in Counter(buckets.sizes_bytes).items():
        yield send(carries="gradients, in buckets", message_bytes=size, count=count)
    if sharing.owned:  # the next forward pass waits for its weights part by part
        number = len(buckets.sizes_bytes)
        size, gather = sharing.owned.parameters_bytes // number, partial(messages, collective="all_gather", beside=True)
        yield gather(carries="updated weights", phase="forward", message_bytes=size, count=number)


def _sharded(spec: StepSpec, rank: RankGroup, sharing: Sharing) -> Iterator[Traffic]:
    if not sharing.gathers:
        return
    groups, model, tp = groups_of(spec), sharing.model, spec.layout.tp
    fsdp = Group(size=sharing.fsdp, stride=groups["fsdp"].stride)
    width, micro_steps = sharing.gathered_bytes, spec.micro_steps
    gradients = spec.pass_name != "forward"
    ends = [model.weights("embedding", tp) if rank.stages[0].first else ()]
    ends.append(model.weights("head", tp) if rank.stages[-1].last else ())
    block = model.weights("block", tp)
    # weights, bytes of a gathered one, number, True if freed between the passes
    units: list[tuple[Sequence[Weight], int, int, bool]] = [(block, width, len(rank.blocks), True)]
    if model.is_own:
        units = [*(((table,), sharing.weight_bytes, 1, True) for table in ends[0]), *units, (ends[1], width, 1, False)]
    else:
        units.append(((*ends[0], *ends[1]), width, 1, False))
    for weights, of_one, number, freed in (unit for unit in units if unit[0]):
        padded, reduced = (
            sum(w.padded(fsdp.size) for w in those) for those in (weights, [w for w in weights if w.trained])
        )
        again = freed and sharing.reshard
        forward = number * (micro_steps if sharing.reshard else 1)
        if fsdp.size > 1:
            shards = partial(Traffic, axis="fsdp", group=fsdp, beside=True)
            gather = partial(shards, collective="all_gather", carries="weights", message_bytes=padded * of_one)
            yield gather(phase="forward", count=forward)
            if again and gradients:
                yield gather(phase="backward", count=forward)
            if gradients and reduced:
                reduce, size = partial(shards, collective="reduce_scatter"), reduced * sharing.reduced_bytes
                yield reduce(carries="gradients", phase="backward", message_bytes=size, count=number)
        if gradients and reduced and sharing.replicas > 1:
            average = partial(Traffic, axis="dp", group=groups["dp"], beside=True, collective="all_reduce")
            size = reduced * sharing.reduced_bytes // fsdp.size
            yield average(carries="gradients of shards", phase="backward", message_bytes=size, count=number)


def _split(spec: StepSpec, rank: RankGroup, sharing: Sharing) -> Iterator[Traffic]:
    if spec.layout.tp == 1:
        return
    group, tokens = groups_of(spec)["tp"], spec.tokens * spec.micro_steps
    calls = spec.micro_steps * spec.num_microbatches
    stream = weight_bytes(spec)
    product = 2 if spec.precision in ("bf16", "bf16_pure") else 4
    whole = tokens * sharing.model.width // calls
    blocks, ends = len(rank.blocks), (rank.stages[0].first, rank.stages[-1].last)
    recomputes_all = spec.checkpointing in SELECTIVE
    again = sum(recomputes_all or is_recomputed(spec.checkpointing, block) for block in rank.blocks)
    again = again if spec.checkpoints_apply else 0
    gradients = spec.pass_name != "forward"

    messages = partial(Traffic, axis="tp", group=group, beside=False)

    def sent(collective: str, phase: str, of_one: int, number: int) -> Iterator[Traffic]:
        carries = "activations" if phase == "forward" else "activations and their gradients"
        if number:
            size, count = whole * of_one, number * calls
            yield messages(collective=collective, carries=carries, phase=phase, message_bytes=size, count=count)

    def gathered(carries: str, phase: str, widths: Sequence[int], number: int) -> Iterator[Traffic]:
        for width in widths if number else ():
            size, count = tokens // calls * width * product, number * calls
            yield messages(collective="all_gather", carries=carries, phase=phase, message_bytes=size, count=count)

    if isinstance(sharing.model, ForeignModel):
        spread = sharing.model.spread_over(spec.layout.tp)
        one, other = spread.of_block, spread.of_ends
        yield from sent("all_reduce", "forward", product, blocks * one.forward + ends[0] * other.forward)
        yield from gathered("logits", "forward", other.gathered_forward, int(ends[1]))
        yield from gathered("activations", "forward", one.gathered_forward, blocks)
        if gradients:
            yield from sent("all_reduce", "backward", stream, blocks * one.backward + ends[1] * other.backward)
            yield from sent("all_reduce", "backward", product, again * one.forward)
            yield from gathered("activations", "backward", one.gathered_forward, again)
            yield from gathered("gradients of activations", "backward", one.gathered_backward, blocks)
        return
    # Forward gathers the norms' outputs and scatters the last products' sums; backward is the reverse.
    yield from sent("all_gather", "forward", stream, 2 * blocks + ends[1])
    yield from sent("reduce_scatter", "forward", product, 2 * blocks)
    yield from sent("reduce_scatter", "forward", stream, int(ends[0]))
    if gradients:
        yield from sent("all_gather", "backward", product, 2 * blocks)
        yield from sent("all_gather", "backward", stream, int(ends[0]))
        yield from sent("reduce_scatter", "backward", stream, 2 * blocks + ends[1])
        yield from sent("all_gather", "backward", stream, 2 * again)
        yield from sent("reduce_scatter", "backward", product, again)  # torch stops before the last product
    if spec.pass_name == "train":
        carries, size, count = "gradients of norms", _FP32_BYTES * sharing.model.width, 2 * blocks + ends[1]
        yield messages(collective="all_reduce", carries=carries, phase="optimizer", message_bytes=size, count=count)


def _staged(spec: StepSpec, rank: RankGroup, sharing: Sharing) -> Iterator[Traffic]:
    if spec.layout.pp == 1:
        return
    group = groups_of(spec)["pp"]
    pair = Group(size=2, stride=group.stride, in_line=group.size)
    send = partial(Traffic, axis="pp", collective="send_recv", group=pair, beside=False)
    for phase, ends in (("forward", "last"), ("backward", "first")):
        count = sum(not getattr(stage, ends) for stage in rank.stages) * spec.num_microbatches
        carries = "activations" if phase == "forward" else "gradients of activations"
        if count:
            yield send(carries=carries, phase=phase, message_bytes=stage_bytes(spec, sharing), count=count)


def updated_elements(spec: StepSpec, rank: RankGroup, model: SpreadModel) -> int:
    """Number of elements that a rank's optimizer updates, before sharding over fsdp."""
    tp = spec.layout.tp
    found = trained(model.weights("block", tp)) * len(rank.blocks)
    found += trained(model.weights("embedding", tp)) if rank.stages[0].first else 0
    return found + (trained(model.weights("head", tp)) if rank.stages[-1].last else 0)
