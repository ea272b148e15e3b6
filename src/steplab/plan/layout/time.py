"""Predicts the time of a step on a layout: each rank's computation and communication, and the pipeline's bubble.

Computation follows plan.time. Transfers beside computation are hidden while it lasts, but slow it: NCCL takes
multiprocessors and memory bandwidth, peer copies only bandwidth. A pipeline of m microbatches takes (m - 1) times its
slowest rank's time per microbatch, plus once every rank's. Interleaved stages shorten the bubble (Narayanan et al.
2021, section 2.2).
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from steplab.costs.data_parallel import peer_copy_memory_bytes
from steplab.costs.rates import Gpu
from steplab.plan.layout.compute import DTENSOR_KERNEL_S, DTENSOR_KERNEL_SLOW_S, HOOKS_S, HOOKS_SLOW_S, PartTimes, Work
from steplab.plan.layout.links import Cluster, machine_of, message_s
from steplab.plan.layout.memory import counted_parts, parts_of_rank
from steplab.plan.layout.ranks import RankGroup, rank_groups
from steplab.plan.layout.sharing import Sharing, sharing_of
from steplab.plan.layout.traffic import Traffic, traffic_of, updated_elements
from steplab.plan.time import as_chosen, refuse_unknown_step, step_spread, throttling
from steplab.records.layout_plan import AxisTraffic, LayoutTime
from steplab.specs.checkpointing import differs_by_block
from steplab.specs.hardware import hardware_named
from steplab.specs.layout import SINGLE
from steplab.specs.step import STAGES_A_RANK, StepSpec

CONTENTION = {"buckets": 0.52, "fsdp2": 0.76, "peer_copy_to_owners": 0.164}
"""Seconds that concurrent computation loses per second of the transfers alone, over a node's link.

Medians of (exposed - copies) / alone over the variants of benchmarks/results/ddp_h200_202611.jsonl.gz on two GPUs.
"""
PEER_COPY_CONTENTION = 0.68
"""Seconds that computation loses per second that peer copies of buckets take at the GPU's memory bandwidth.

The median over the backward passes of benchmarks/results/ddp_update_h200_202611.jsonl.gz, two and four GPUs.
"""
COMMUNICATION_SPREAD = 0.3
"""Half of the 90 % interval of the time that communication adds, as a share of it.

All except three records are within.
"""
UNMEASURED_SPREAD = 0.5
"""COMMUNICATION_SPREAD across a network, which no record measures."""


def layout_step_s(spec: StepSpec, gpu: Gpu) -> float | None:
    """Seconds of a step on its layout, on the known nodes of this GPU; None: their network is unknown.

    Raises Unsupported for an unpredictable step.
    """
    refuse_unknown_step(dataclasses.replace(spec, layout=SINGLE), gpu)
    found = LayoutClock(gpu, machine_of(hardware_named(gpu.name), None)).time(as_chosen(spec, gpu))
    return found.seconds if found else None


class LayoutClock:
    def __init__(self, gpu: Gpu, machine: Cluster, *, head_start: bool = False, dtensor: bool = True) -> None:
        """Predict step times on GPUs of this kind in a cluster.

        Args:
            head_start: Python is ahead of the GPU before each step, as in a data-parallel study, so its time does
                not count.
            dtensor: torch's DTensor splits tensors, as in steplab, which costs Python time.
        """
        self.gpu, self.machine, self._head_start, self._dtensor = gpu, machine, head_start, dtensor
        self._times = PartTimes(gpu)

    def time(self, spec: StepSpec, sharing: Sharing | None = None) -> LayoutTime | None:
        """Predict the step's time; None: its transfers cross an unknown network.

        sharing: None: as in `spec`. The interval's upper end is for a slow CPU.
        """
        shared = sharing or sharing_of(spec)
        alike: dict[tuple[object, ...], list[RankGroup]] = {}
        for group in rank_groups(spec, shared.model.num_layers):
            alike.setdefault(_kind(spec, group), []).append(group)
        found: tuple[list[_Share], list[_Share]] = ([], [])  # for a quick CPU, and for a slow one
        for groups in alike.values():
            turns = self._turns(spec, groups[0], shared)
            if turns is None:
                return None
            for turn, those in zip(turns, found, strict=True):
                those.append((turn, len(groups)))
        central, slow = (_of_all(spec, those) for those in found)
        turn, filling = central
        spread = step_spread(spec, self.gpu)
        unsure = UNMEASURED_SPREAD if turn.crosses else COMMUNICATION_SPREAD
        seconds = turn.step_s + filling
        aside = spread * (seconds - turn.exposed_s) + unsure * turn.exposed_s
        return LayoutTime(
            seconds=seconds,
            low_s=seconds - aside,
            high_s=max(seconds, slow[0].step_s + slow[1]) + aside,
            compute_spread=spread,
            communication_spread=unsure,
            compute_s=turn.compute_s,
            waiting_s=turn.waiting_s,
            optimizer_s=turn.optimizer_s,
            copies_s=turn.copies_s,
            exposed_s=turn.exposed_s,
            bubble_s=filling,
            ranks=turn.group.label,
            traffic=turn.traffic,
        )

    def _turns(self, spec: StepSpec, group: RankGroup, sharing: Sharing) -> "tuple[_Turn, _Turn] | None":
        """Times of a rank's step, with a quick and with a slow CPU; None: the network between nodes is unknown."""
        messages = traffic_of(spec, group, sharing)
        alone = [self._alone(each) for each in messages]
        known = [(each, one) for each, one in zip(messages, alone, strict=True) if one is not None]
        if len(known) < len(messages):
            return None
        works, update = self._passes(spec, group, sharing), self._update(spec, group, sharing)
        total = works["forward"] + works["backward"] + update
        slower = throttling(total.ideal_s / total.seconds, self.gpu.rates.step) if total.seconds else 1.0
        device = {phase: work.tensor_s * slower + work.other_s for phase, work in works.items()}
        copies_s = self._copies_s(messages, sharing)
        found = []
        for slow in (False, True):
            host = {phase: self._host_s(spec, group, sharing, work, slow) for phase, work in works.items()}
            times = {phase: max(device[phase], host[phase]) for phase in works} | {"optimizer": update.seconds}
            waiting = {phase: times[phase] - device[phase] for phase in works}
            exposed = self._exposed(known, times, waiting, sharing)
            traffic = (self._axis_traffic(each, one, more) for (each, one), more in zip(known, exposed, strict=True))
            turn = _Turn(
                group=group,
                compute_s=device["forward"] + device["backward"],
                waiting_s=waiting["forward"] + waiting["backward"],
                optimizer_s=update.seconds,
                copies_s=copies_s,
                traffic=tuple(traffic),
                crosses=any(self._crosses(each) for each in messages),
            )
            found.append(turn)
        return found[0], found[1]

    def _passes(self, spec: StepSpec, group: RankGroup, sharing: Sharing) -> dict[str, Work]:
        calls = spec.num_microbatches * spec.micro_steps
        compiled = spec.compile != "off"
        found = {}
        for phase in ("forward", "backward"):
            work = Work()
            for stage in group.stages:
                for parts, number in counted_parts(spec, sharing, stage.blocks):
                    work += self._times.of(parts, phase, "block", compiled=compiled) * number
                some = parts_of_rank(spec, sharing, stage.blocks[0])
                work += self._times.of(some, phase, "embedding", compiled=compiled) if stage.first else Work()
                work += self._times.of(some, phase, "head", compiled=compiled) if stage.last else Work()
            found[phase] = work * calls
        return found

    def _host_s(self, spec: StepSpec, group: RankGroup, sharing: Sharing, work: Work, slow: bool) -> float:
        if self._head_start:
            return 0.0
        paces = self.gpu.rates.host.paces(spec.launcher)
        if spec.layout.tp > 1 and self._dtensor:
            paces = DTENSOR_KERNEL_S, DTENSOR_KERNEL_SLOW_S
        each = paces[slow]
        if not sharing.gathers or not work.kernels:
            return work.kernels * each
        calls = spec.num_microbatches * spec.micro_steps
        return work.kernels * each + len(group.blocks) * calls * (HOOKS_SLOW_S if slow else HOOKS_S)

    def _update(self, spec: StepSpec, group: RankGroup, sharing: Sharing) -> Work:
        if spec.pass_name != "train":
            return Work()
        local = updated_elements(spec, group, sharing.model) / (sharing.fsdp if sharing.gathers else 1)
        if sharing.owned:
            local = sharing.owned.weights_bytes / sharing.weight_bytes
        return self._times.update_s(sharing.weight_bytes, local, spec.optimizer)

    def _copies_s(self, messages: Sequence[Traffic], sharing: Sharing) -> float:
        """Seconds to copy gradients into buckets, or FSDP2's weights out of all-gathers and gradients into
        reduce-scatters."""
        if sharing.buckets is not None:
            return self._times.copy_s(sharing.buckets.copied_bytes)
        return sum(self._times.copy_s(each.message_bytes) * each.count for each in messages if each.axis == "fsdp")

    # --- messages -----------------------------------------------------------------------------------------

    def _alone(self, each: Traffic) -> float | None:
        one = message_s(self.machine, each.collective, each.message_bytes, each.group)
        return None if one is None else one * each.count

    def _crosses(self, each: Traffic) -> bool:
        return each.group.ranks_in_node(self.machine.gpus_per_node) < each.group.size

    def _exposed(
        self,
        messages: Sequence[tuple[Traffic, float]],
        times: dict[str, float],
        waiting: dict[str, float],
        sharing: Sharing,
    ) -> list[float]:
        alone, hidden = defaultdict[str, float](float), defaultdict[str, float](float)
        for each, one in messages:
            (hidden if each.beside else alone)[each.phase] += one
        found = []
        for each, one in messages:
            if not each.beside:
                free = waiting.get(each.phase, 0.0)
                found.append(one * max(0.0, 1 - free / alone[each.phase]) if free else one)
                continue
            late = max(0.0, hidden[each.phase] - times[each.phase]) * one / hidden[each.phase]
            last = one / each.count if each.phase == "backward" and each.collective != "all_gather" else 0.0
            last /= max(sum(other.phase == "backward" and other.beside for other, _ in messages), 1)
            slowed = self._slowed_s(each, sharing)
            found.append(min(max(late, last) + slowed * (1 - late / one), one))
        return found

    def _slowed_s(self, each: Traffic, sharing: Sharing) -> float:
        if sharing.by_peer_copies and sharing.owned is None:
            moved_bytes = peer_copy_memory_bytes(each.total_bytes, each.group.size)
            return PEER_COPY_CONTENTION * moved_bytes / self.gpu.bandwidth_bytes_per_s
        kind = "peer_copy_to_owners" if sharing.by_peer_copies else "fsdp2" if sharing.gathers else "buckets"
        return CONTENTION[kind] * each.wire_bytes / self.machine.node_bytes_per_s[each.collective]

    def _axis_traffic(self, each: Traffic, alone_s: float, exposed_s: float) -> AxisTraffic:
        return AxisTraffic(
            axis=each.axis,
            collective=each.collective,
            carries=each.carries,
            phase=each.phase,
            ranks=each.group.size,
            link=self.machine.network if self._crosses(each) else self.machine.node,
            messages=each.count,
            total_bytes=each.total_bytes,
            wire_bytes=each.wire_bytes,
            alone_s=alone_s,
            exposed_s=exposed_s,
        )


def _kind(spec: StepSpec, group: RankGroup) -> tuple[object, ...]:
    if differs_by_block(spec.checkpointing):
        return (group.place,)
    return tuple((len(stage.blocks), stage.first, stage.last) for stage in group.stages)


def _of_all(spec: StepSpec, shares: "list[_Share]") -> "tuple[_Turn, float]":
    slowest, _ = max(shares, key=lambda one: one[0].step_s)
    if spec.layout.pp == 1:
        return slowest, 0.0
    others = sum(turn.pass_s * (number - (turn is slowest)) for turn, number in shares) / spec.num_microbatches
    return slowest, others / STAGES_A_RANK[spec.pipeline_schedule]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turn:
    group: RankGroup
    compute_s: float
    waiting_s: float
    optimizer_s: float
    copies_s: float
    traffic: tuple[AxisTraffic, ...]
    crosses: bool

    @property
    def exposed_s(self) -> float:
        return sum(each.exposed_s for each in self.traffic)

    @property
    def pass_s(self) -> float:
        sent_s = sum(each.exposed_s for each in self.traffic if each.axis in ("pp", "tp"))
        return self.compute_s + self.waiting_s + sent_s

    @property
    def step_s(self) -> float:
        return self.compute_s + self.waiting_s + self.optimizer_s + self.copies_s + self.exposed_s


_Share = tuple[_Turn, int]
