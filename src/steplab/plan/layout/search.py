"""Predicts the step time of every layout of a job on a number of GPUs, or why it does not fit.

A job is a step and a global batch in sequences. Each layout takes the largest micro-batch that fits, and micro-steps
for the rest; a pipeline the fastest micro-batch and schedule that fit. Checkpointing `auto` is each layout's fastest
choice; `full` is reduced to the blocks that must be recomputed to fit.
"""

import bisect
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from steplab.costs.rates import Gpu
from steplab.errors import SteplabError, UserError
from steplab.plan.cards import fit_of, outside_bytes, safe_device_bytes, usable_of
from steplab.plan.layout.links import Cluster
from steplab.plan.layout.memory import RankPeak, peaks_by_rank
from steplab.plan.layout.model import TP_OF_TRANSFORMERS, ForeignModel, own_model
from steplab.plan.layout.ranks import RankGroup, rank_groups
from steplab.plan.layout.sharing import sharing_of
from steplab.plan.layout.time import LayoutClock
from steplab.plan.memory import workspace_of
from steplab.plan.time import model_utilizations
from steplab.records.layout_plan import LayoutCandidate, LayoutPlan, LayoutTime
from steplab.records.prediction import FitVerdict
from steplab.records.run import ModelFacts, Utilization
from steplab.specs.attention_kernels import with_attention_chosen
from steplab.specs.checkpointing import AUTO
from steplab.specs.hardware import hardware_named
from steplab.specs.layout import Layout
from steplab.specs.step import StepSpec
from steplab.specs.step_choices import OVERLAPPED, PipelineSchedule, Update
from steplab.units import format_bytes, format_rate

MOST_GPUS = 1 << 16
_CHECKPOINTING = ("none", "selective", "full")
"""Candidates for checkpointing `auto`; `full` is finally reduced to the fewest blocks that must be recomputed."""
_SCHEDULES: tuple[PipelineSchedule, ...] = ("1f1b", "interleaved")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutJob:
    spec: StepSpec
    """The step in one process, with its update after backward; each layout sets batch, micro-steps and microbatches."""
    update: Update
    """When parameters are updated; some layouts can only update after all gradients."""
    gpus: int
    global_batch: int
    gpu: Gpu
    machine: Cluster
    model: ForeignModel | None = None

    def __post_init__(self) -> None:
        check_job(self.gpus, self.global_batch)


def check_job(gpus: int, global_batch: int) -> None:
    if not 1 <= gpus <= MOST_GPUS:
        raise UserError(f"gpus must be between 1 and {MOST_GPUS}, not {gpus}")
    if global_batch < 1:
        raise UserError(f"the global batch must be at least 1 sequence, not {global_batch}")


def plan_of_layouts(job: LayoutJob) -> LayoutPlan:
    spec, said = with_attention_chosen(job.spec, job.spec.model.shape, job.gpu.device_names)
    search = _Search(dataclasses.replace(job, spec=spec))
    notes = [*said, "layouts are compared without the errors that both predictions share"]
    return _plan(job, notes, search, [search.candidate(layout) for layout in layouts_of(job.gpus)])


def plan_of_given(job: LayoutJob, spec: StepSpec) -> LayoutPlan:
    chosen, said = with_attention_chosen(spec, spec.model.shape, job.gpu.device_names)
    search = _Search(job)
    return _plan(job, said, search, [search.judged(chosen, timed=True)])


def _plan(job: LayoutJob, remarks: Sequence[str], search: "_Search", found: Sequence[LayoutCandidate]) -> LayoutPlan:
    ordered = sorted(found, key=_rank)
    fitting = [each for each in ordered if each.time]
    notes, facts = [*remarks, *_within_a_node(job)], (job.model or own_model(job.spec)).facts
    if job.model is not None and any(each.spec and each.spec.layout.pp > 1 for each in found):
        notes.append("pipelines of this model are planned, not run: steplab cuts only its own Transformer into stages")
    if job.model is not None and any(each.spec and each.spec.layout.tp > 1 for each in found):
        notes.append(TP_OF_TRANSFORMERS)
    if job.update == OVERLAPPED:
        notes.append("times assume the update after the backward pass: its overlap across ranks is not predicted")
    reached, stated = job.machine.network_bytes_per_s, job.machine.network_stated_bytes_per_s
    between_nodes = job.gpus > job.machine.gpus_per_node
    if between_nodes and reached is None:
        notes.append(
            f"no network of {job.gpu.name} is known, so layouts whose messages leave a node have no time; "
            "give its bandwidth in GB/s of one GPU, as `steplab plan layout --link network=45`"
        )
    elif between_nodes and reached and stated:
        notes.append(
            f"between nodes adapters are assumed to reach {reached / stated:.3g} of their stated bandwidth, as "
            "published for NCCL's large messages, not measured here; set the stated bandwidth by `steplab plan layout "
            "--link network=200Gb/s`, or the reached one by --link network=45, in GB/s of one GPU"
        )
    return LayoutPlan(
        spec=job.spec,
        gpu=job.gpu.name,
        gpus=job.gpus,
        gpus_per_node=job.machine.gpus_per_node,
        global_batch=job.global_batch,
        usable_bytes=search.usable_bytes,
        candidates=tuple(ordered),
        num_as_fast=_num_as_fast(fitting),
        network=job.machine.network,
        network_bytes_per_s=job.machine.network_bytes_per_s,
        network_stated_bytes_per_s=job.machine.network_stated_bytes_per_s,
        utilizations=_utilizations(fitting, job.gpu, facts),
        model=facts,
        sources=tuple(dict.fromkeys((*job.gpu.sources, *job.machine.sources))),
        notes=tuple(notes),
    )


def _within_a_node(job: LayoutJob) -> Iterator[str]:
    rates, machine = job.machine.node_bytes_per_s.values(), job.machine
    if job.gpus == 1:
        return
    low, high = (format_rate(edge(rates), "B/s") for edge in (min, max))
    reached = low if low == high else f"{low} to {high}, by collective"
    yield (
        f"within a node a GPU is assumed to send {reached}, over {machine.node}: the share of its stated bandwidth "
        "that NCCL reaches on H200s; give a measured one by `steplab plan layout --link node=330`"
        if machine.node_is_stated
        else f"within a node a GPU sends {reached}, as measured"
    )


def _utilizations(fitting: Sequence[LayoutCandidate], gpu: Gpu, facts: ModelFacts) -> tuple[Utilization, ...]:
    if not fitting or fitting[0].spec is None or fitting[0].time is None:
        return ()
    return model_utilizations(fitting[0].spec, gpu, fitting[0].time.seconds, facts)


def _num_as_fast(fitting: Sequence[LayoutCandidate]) -> int:
    times = [each.time for each in fitting if each.time and each.verdict == fitting[0].verdict]
    return sum(not is_slower(time, times[0]) for time in times)


def layouts_of(gpus: int) -> Iterator[Layout]:
    divisors = [size for size in range(1, gpus + 1) if gpus % size == 0]
    for pp in divisors:
        for tp in (size for size in divisors if gpus // pp % size == 0):
            data = gpus // pp // tp
            for fsdp in (size for size in divisors if data % size == 0):
                yield Layout(dp=data // fsdp, fsdp=fsdp, tp=tp, pp=pp)


def is_slower(one: LayoutTime, fastest: LayoutTime) -> bool:
    """True if `one` is slower than `fastest` by more than the predictions' errors, without those that both share."""
    unsure = one.communication_spread * one.exposed_s + fastest.communication_spread * fastest.exposed_s
    unsure += one.compute_spread * abs(one.seconds - one.exposed_s - fastest.seconds + fastest.exposed_s)
    return one.seconds - fastest.seconds > unsure


class _Search:
    def __init__(self, job: LayoutJob) -> None:
        self._job = job
        self._clock = LayoutClock(job.gpu, job.machine)
        self._hardware = job.gpu.hardware or hardware_named(job.gpu.name)
        self._workspace_bytes = workspace_of(self._hardware.device_names[0]).value
        self.usable_bytes, _ = usable_of(self._hardware)

    def candidate(self, layout: Layout) -> LayoutCandidate:
        job = self._job
        if job.global_batch % layout.data_ranks:
            why = f"{job.global_batch} sequences cannot be shared by {layout.data_ranks} data-parallel ranks"
            return LayoutCandidate(layout=str(layout), options="", reason=why)
        per_rank = job.global_batch // layout.data_ranks
        known = _CHECKPOINTING if job.model is None else ("none", "full")
        choices = known if job.spec.checkpointing == AUTO else (job.spec.checkpointing,)
        best = min((self._best(layout, per_rank, choice) for choice in choices), key=_rank)
        return self._with_fewest_recomputed(best) if job.spec.checkpointing == AUTO else best

    def _with_fewest_recomputed(self, best: LayoutCandidate) -> LayoutCandidate:
        spec = best.spec
        if spec is None or spec.checkpointing != "full" or best.verdict != "fits" or spec.layout.pp > 1:
            return best
        if spec.model.shape is None:  # transformers recomputes every layer, or no layer
            return best
        numbers = range(1, spec.model.shape.num_layers)

        def with_first(number: int) -> LayoutCandidate:
            return self.judged(dataclasses.replace(spec, checkpointing=f"first_{number}"))

        # One more recomputed block needs less memory, except the last, with which backward begins.
        fewest = bisect.bisect_left(numbers, True, key=lambda number: with_first(number).verdict == "fits") + 1
        found = with_first(fewest) if fewest in numbers else best
        return min(best, found, key=_rank)

    def _best(self, layout: Layout, per_rank: int, checkpointing: str) -> LayoutCandidate:
        best: LayoutCandidate | None = None
        for batch in _micro_batches(per_rank):
            for schedule in _SCHEDULES if layout.pp > 1 else _SCHEDULES[:1]:
                found = self._tried(layout, per_rank, batch, schedule, checkpointing)
                best = found if best is None else min(best, found, key=_rank)
            if layout.pp == 1 and best is not None and best.verdict == "fits":
                break  # smaller ones are slower
        assert best is not None
        return best

    def _tried(
        self, layout: Layout, per_rank: int, batch: int, schedule: PipelineSchedule, checkpointing: str
    ) -> LayoutCandidate:
        try:
            spec = dataclasses.replace(self._spec(layout, per_rank, batch, schedule), checkpointing=checkpointing)
            if self._job.model is not None:
                self._job.model.refuse_unplanned(spec)
            return self.judged(spec)
        except SteplabError as error:
            return LayoutCandidate(layout=str(layout), options="", reason=str(error))

    def judged(self, spec: StepSpec, *, timed: bool = False) -> LayoutCandidate:
        """Predict a layout's memory and time.

        timed: predict the time even if it does not fit.
        """
        layout = spec.layout
        model = self._job.model
        sharing = sharing_of(spec, model=model)
        groups = _candidates_for_peak(rank_groups(spec, sharing.model.num_layers))
        peaks = peaks_by_rank(spec, groups, self._workspace_bytes, sharing)
        place = max(range(len(groups)), key=lambda place: (peaks[place].num_bytes, -place))
        worst = peaks[place]
        outside = outside_bytes(layout)
        least = worst.num_bytes + outside
        safe = safe_device_bytes(worst.reserved_bytes, outside, by_compiled_block=spec.compile != "off")
        verdict = fit_of(self._hardware, "estimate", least, safe).verdict
        time = self._clock.time(spec, sharing=sharing) if timed or verdict != "does not fit" else None
        return LayoutCandidate(
            layout=str(layout),
            options=_options(spec, chosen=self._job.spec.checkpointing == AUTO),
            spec=spec,
            verdict=verdict,
            reason=_reason(verdict, spec, groups[place], worst, least, self.usable_bytes, unknown=time is None),
            peak_bytes=worst.num_bytes,
            reserved_bytes=worst.reserved_bytes,
            device_bytes=safe,
            worst_rank=groups[place].label,
            time=time,
        )

    def _spec(self, layout: Layout, per_rank: int, batch: int, schedule: PipelineSchedule) -> StepSpec:
        changed = partial(dataclasses.replace, self._job.spec, layout=layout, update=self._job.update)
        number = per_rank // batch
        if layout.pp == 1:
            return changed(batch=batch, accumulation=number)
        return changed(batch=per_rank, microbatches=number, pipeline_schedule=schedule)


def _micro_batches(per_rank: int) -> list[int]:
    powers = [1 << power for power in range(per_rank.bit_length()) if per_rank % (1 << power) == 0]
    return sorted({*powers, per_rank}, reverse=True)


def _rank(one: LayoutCandidate) -> tuple[bool, bool, float]:
    """Sort key of layouts, best first: those with a predicted time that fit, by time; then the others with a time.

    Layouts without a time follow, by memory, the least first.
    """
    if one.time is not None:
        return False, one.verdict != "fits", one.time.seconds
    return True, one.peak_bytes is None, one.peak_bytes or 0


def _candidates_for_peak(groups: tuple[RankGroup, ...]) -> tuple[RankGroup, ...]:
    """The first group, the last, and the first of the others with each number of blocks.

    Among groups of equal blocks, the first has most microbatches in flight.
    """
    first_of = {tuple(len(stage.blocks) for stage in group.stages): group for group in reversed(groups[1:-1])}
    return tuple(group for group in groups if group in (groups[0], groups[-1], *first_of.values()))


def _options(spec: StepSpec, *, chosen: bool) -> str:
    found = [f"--layout {spec.layout}", f"--batch {spec.batch}"]
    if spec.layout.pp > 1:
        found.append(f"--microbatches {spec.num_microbatches}")
        found += [f"--pipeline-schedule {spec.pipeline_schedule}"] if spec.pipeline_schedule != "1f1b" else []
    elif spec.accumulation > 1:
        found.append(f"--accumulation {spec.accumulation}")
    if chosen and spec.checkpointing != "none":
        found.append(f"--checkpointing {spec.checkpointing}")
    return " ".join(found)


def _reason(
    verdict: FitVerdict, spec: StepSpec, group: RankGroup, worst: RankPeak, least: int, usable: int, *, unknown: bool
) -> str:
    if verdict == "does not fit":
        sizes = Counter[str]()
        for bundle, times in worst.holdings:
            for held, count in bundle.holdings.items():
                sizes[held.category] += held.num_bytes * count * times
        ((most, size),) = sizes.most_common(1)
        of_it = f"{format_bytes(size)} of it {most.replace('_', ' ')}"
        if most == "gradients" and spec.layout.fsdp > 1 and spec.micro_steps > 1:
            of_it += ", whole until the last micro-step"
        needs = "needs" if group.num_ranks == 1 else "need"
        return f"{group.label} {needs} {format_bytes(least)} of {format_bytes(usable)}, {of_it}"
    if unknown:
        return "its messages leave the node, and the network is not known"
    return "" if verdict == "fits" else "it fits if memory fragments little"
