"""Rank the layouts of a job on GPUs that are not at hand; this needs neither torch nor a GPU."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from steplab.errors import Unsupported, UserError
from steplab.lab.keeping import open_store
from steplab.lab.measuring import asked_step
from steplab.plan.layout.links import Cluster, machine_of, with_profile
from steplab.plan.layout.search import LayoutJob, check_job, plan_of_layouts
from steplab.plan.memory import refuse_unknown_memory, workspace_of
from steplab.plan.rates import gpu_named
from steplab.plan.time import refuse_unknown_step
from steplab.records.comm import CommRun
from steplab.records.layout_plan import LayoutPlan
from steplab.specs.command import options
from steplab.specs.hardware import HardwareSpec, hardware_named
from steplab.specs.hf_shape import shape_of
from steplab.specs.layout import Layout
from steplab.specs.model import ModelSpec
from steplab.specs.step import StepSpec
from steplab.specs.update import AFTER


def plan_layout(
    spec: StepSpec | str | None = None,
    *,
    gpus: int,
    global_batch: int,
    gpu: str = "H200 SXM",
    gpus_per_node: int | None = None,
    links: Sequence[str] = (),
    profile: str | None = None,
    store: Path | str | None = None,
    **fields: object,
) -> LayoutPlan:
    """Every factorisation of `gpus` into dp, fsdp, tp and pp: which fit, and how long a step takes on each.

    `spec` and `fields` are as in `measure`, without a layout and what follows from it. `links` are texts such as
    `network=45`, in GB/s of one GPU; `profile` is a record of `steplab comm`, whose lines replace stated links. With
    checkpointing `auto` each layout has the one of none, selective and full with which it is fastest.

        steplab.plan_layout("8b", gpus=64, gpu="H100 SXM", global_batch=512, precision="bf16").candidates[0].options

    Raises UserError for an invalid request, Unsupported for a step whose time or memory cannot be predicted.
    """
    check_job(gpus, global_batch)
    if gpus_per_node is not None and gpus_per_node < 1:
        raise UserError(f"gpus per node must be at least 1, not {gpus_per_node}")
    if "layout" in fields or (isinstance(spec, StepSpec) and spec.layout.world_size > 1):
        raise UserError("the layouts are what is searched for; leave --layout out")
    # Some fields are for several processes alone, and some steps are refused for one process alone.
    spread = {} if isinstance(spec, StepSpec) or gpus == 1 else {"layout": f"dp={gpus}"}
    given, hardware, chosen = asked_step("plan_layout", spec, fields | spread), hardware_named(gpu), gpu_named(gpu)
    _refuse_unknown_model(given.model)
    refuse_unknown_memory(dataclasses.replace(given, layout=Layout(dp=max(gpus, 2))))
    asked = dataclasses.replace(given, layout=Layout(), update=AFTER)
    refuse_unknown_step(asked, chosen)
    machine = _machine(hardware, gpus_per_node, links, profile, store)
    return plan_of_layouts(
        LayoutJob(
            spec=asked,
            update=given.update,
            gpus=gpus,
            global_batch=global_batch,
            hardware=hardware,
            gpu=chosen,
            machine=machine,
            workspace_bytes=workspace_of(hardware.device_names[0]).value,
        )
    )


def _refuse_unknown_model(model: ModelSpec) -> None:
    """Raise Unsupported for a model whose split is not known; of a configuration with the name of one that is."""
    doing = f"planning layouts of {model.label}"
    if model.shape is None:
        alike = StepSpec(model=ModelSpec(name="small", kind="transformer", shape=shape_of(model, doing)))
        why = "what its ranks share is known of steplab's own Transformer alone"
        raise Unsupported(doing, why, f"plan the one with the same parts, {options(alike)}")
    if not model.shape.num_heads:
        why = "it is a size for planning only, which no layout can split"
        raise Unsupported(doing, why, "use `steplab plan accounting`")


def _machine(
    hardware: HardwareSpec,
    gpus_per_node: int | None,
    links: Sequence[str],
    profile: str | None,
    store: Path | str | None,
) -> Cluster:
    machine = machine_of(hardware, gpus_per_node, _bandwidths(links))
    if profile is None:
        return machine
    with open_store(store, write=False) as opened:
        record = opened.get(profile)
    if not isinstance(record, CommRun) or not record.profile:
        raise UserError(f"record {profile} has no communication profile; measure one with `steplab comm`")
    return with_profile(machine, record.profile, f"the communication profile of record {record.id}")


def _bandwidths(links: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for text in links:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value) * 1e9
        except ValueError:
            raise UserError(f"--link takes a link and GB/s of one GPU, as network=45, not '{text}'") from None
        if not found[name] > 0:
            raise UserError(f"--link {name} must be more than 0 GB/s, not {value}")
    return found
