"""Rank the parallel layouts of a training job, without torch or a GPU."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steplab.costs.rates import Gpu, gpu_named
from steplab.errors import UserError
from steplab.lab.checkpointing import choose_checkpointing
from steplab.lab.keeping import open_store
from steplab.lab.measuring import asked_step
from steplab.lab.predicting import spread_model
from steplab.plan.layout.links import Cluster, machine_of, with_profile
from steplab.plan.layout.search import LayoutJob, check_job, plan_of_given, plan_of_layouts
from steplab.plan.memory import refuse_unknown_memory
from steplab.plan.time import refuse_unknown_step
from steplab.records.comm import CommRun
from steplab.records.layout_plan import LayoutPlan
from steplab.specs.hardware import HardwareSpec, hardware_named
from steplab.specs.layout import Layout
from steplab.specs.resolve import Grid
from steplab.specs.step import StepSpec
from steplab.specs.step_choices import AFTER


def plan_layout(
    spec: StepSpec | str | None = None,
    *,
    gpus: int,
    global_batch: int,
    gpu: Gpu | str = "H200 SXM",
    gpus_per_node: int | None = None,
    links: Sequence[str] = (),
    profile: str | None = None,
    tokens: float | None = None,
    store: Path | str | None = None,
    **fields: object,
) -> LayoutPlan:
    """Rank the factorisations of `gpus` into dp, fsdp, tp and pp by predicted step time and fit.

    `spec` and `fields` are as in `measure`, without a layout. `links`: `network=45` (GB/s that a GPU achieves)
    or `network=400Gb/s` (an adapter's stated bandwidth); `profile`: a record of `steplab comm` instead. Checkpointing
    `auto` gives each layout the fastest of none, selective and full. `tokens`: of the whole training, for its days.

        steplab.plan_layout("8b", gpus=64, gpu="H100 SXM", global_batch=512, precision="bf16").candidates[0].options

    Raises UserError for an invalid request, Unsupported for a step of unpredictable time or memory.
    """
    check_job(gpus, global_batch)
    if gpus_per_node is not None and gpus_per_node < 1:
        raise UserError(f"gpus per node must be at least 1, not {gpus_per_node}")
    if "layout" in fields or (isinstance(spec, StepSpec) and spec.layout.world_size > 1):
        raise UserError("the layouts are what is searched for; leave --layout out")
    # Some fields are for several processes alone, and some steps are refused for one process alone.
    spread = {} if isinstance(spec, StepSpec) or gpus == 1 else {"layout": f"dp={gpus}"}
    given, chosen = asked_step("plan_layout", spec, fields | spread), gpu_named(gpu) if isinstance(gpu, str) else gpu
    refuse_unknown_memory(dataclasses.replace(given, layout=Layout(dp=max(gpus, 2))))
    asked = dataclasses.replace(given, layout=Layout(), update=AFTER)
    machine = _machine(hardware_named(chosen.name), gpus_per_node, links, profile, store)
    job = _job(asked, chosen, update=given.update, gpus=gpus, global_batch=global_batch, machine=machine)
    return dataclasses.replace(plan_of_layouts(job), tokens=tokens)


def _job(alone: StepSpec, gpu: Gpu, **others: Any) -> LayoutJob:
    """`others`: the job's other fields. Raises Unsupported for a step of unpredictable time."""
    model = spread_model(alone)
    refuse_unknown_step(alone, gpu, operators_are_known=model is not None)
    return LayoutJob(spec=alone, gpu=gpu, model=model, **others)


def plan_given_layout(spec: StepSpec, gpu: Gpu) -> LayoutPlan:
    """Time and memory of the layout that the step names, on nodes of a known GPU. Raises Unsupported if unknown."""
    chosen = choose_checkpointing(spec, gpu.hardware)
    refuse_unknown_memory(chosen.spec)
    alone = dataclasses.replace(chosen.spec, layout=Layout(), update=AFTER, microbatches=None)
    machine, sequences = machine_of(hardware_named(gpu.name), None), spec.tokens_of_all // spec.context
    size = spec.layout.world_size
    job = _job(alone, gpu, update=spec.update, gpus=size, global_batch=sequences, machine=machine)
    if job.model is not None:
        job.model.refuse_unplanned(chosen.spec)
    found = plan_of_given(job, chosen.spec)
    return dataclasses.replace(found, notes=(*chosen.notes, *found.notes))


def plan_layouts(
    grid: Grid,
    *,
    gpus: Sequence[int],
    global_batches: Sequence[int],
    gpu_names: Sequence[Gpu | str],
    links: Sequence[str] = (),
    **given: Any,
) -> tuple[LayoutPlan, ...]:
    """Plan every combination of the values. `grid` lists values of step fields; a link may list values too, as
    `network=200Gb/s,400Gb/s`. `given`: further arguments of `plan_layout`.
    """
    steps: list[dict[str, Any]] = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    return tuple(
        plan_layout(**step, **given, gpus=number, global_batch=sequences, gpu=name, links=chosen)
        for step in steps
        for name in gpu_names
        for chosen in itertools.product(*map(_each_link, links))
        for sequences in global_batches
        for number in gpus
    )


def _each_link(text: str) -> list[str]:
    name, equals, values = text.partition("=")
    return [f"{name}{equals}{value.strip()}" for value in values.split(",")]


def _machine(
    hardware: HardwareSpec,
    gpus_per_node: int | None,
    links: Sequence[str],
    profile: str | None,
    store: Path | str | None,
) -> Cluster:
    reached, stated = _bandwidths(links)
    machine = machine_of(hardware, gpus_per_node, reached, network_stated_bytes_per_s=stated)
    if profile is None:
        return machine
    with open_store(store, write=False) as opened:
        record = opened.get(profile)
    if not isinstance(record, CommRun) or not record.profile:
        raise UserError(f"record {profile} has no communication profile; measure one with `steplab comm`")
    return with_profile(machine, record.profile, f"the communication profile of record {record.id}")


def _bandwidths(links: Sequence[str]) -> tuple[dict[str, float], float | None]:
    reached: dict[str, float] = {}
    stated: float | None = None
    for text in links:
        name, _, value = text.partition("=")
        is_stated = name == "network" and value.endswith(_STATED)
        try:
            number = float(value.removesuffix(_STATED) if is_stated else value.removesuffix("GB/s"))
        except ValueError:
            raise UserError(
                f"--link takes a link and GB/s that one GPU reaches, as network=45, or what is stated of its adapter, "
                f"as network=400{_STATED}, not '{text}'"
            ) from None
        if not 0 < number < float("inf"):
            raise UserError(f"--link {name} must be more than 0 GB/s, not {value}")
        if is_stated:
            stated = number * 1e9 / 8
        else:
            reached[name] = number * 1e9
    if stated and "network" in reached:
        raise UserError("--link network is given twice, as stated and as reached; leave one out")
    return reached, stated


_STATED = "Gb/s"
