"""A module laid out over a mesh of ranks by torch's own engine.

A mesh has four named axes, outermost first, so that ranks that communicate most are neighbours. Along pp a rank has
some of the blocks, along dp a part of the batch. Along fsdp it also has a part of each parameter, along tp a part of
each matrix product.

`lay_out` splits products first, because that changes parameters. Then the caller wraps each unit's forward pass
(recomputation, then compilation). Then FSDP2 shards parameters unit by unit, so that its hooks stay outside of compiled
code. The caller names units and splits; this file does not depend on the module.

torch's schedules run a pipeline of stages along pp: `gpipe` (Huang et al. 2019), `1f1b` (Narayanan et al. 2019),
`interleaved` (Narayanan et al. 2021). The caller gives the shape of messages between stages, which saves a step for
finding it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from .buckets import refuse_sparse
from .errors import Unsupported, UserError

AXES = ("pp", "dp", "fsdp", "tp")


def open_mesh(sizes: Mapping[str, int], device_type: str) -> DeviceMesh:
    """A collective call; a missing axis has size 1. Raises UserError for an unknown axis, a size below 1, or another
    product than the number of ranks.
    """
    for axis, size in sizes.items():
        if axis not in AXES:
            raise UserError(f"axis '{axis}' is not known; choose among {', '.join(AXES)}")
        if size < 1:
            raise UserError(f"{axis} must be at least 1, not {size}")
    if not dist.is_initialized():
        raise UserError("there are no other processes to lay a model out on: start them by torchrun")
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    asked, present = prod(shape), dist.get_world_size()
    if asked != present:
        shown = ",".join(f"{axis}={size}" for axis, size in sizes.items())
        raise UserError(
            f"layout {shown} is for {asked} processes, and there are {present}: start {asked}, "
            f"or choose sizes whose product is {present}"
        )
    return init_device_mesh(device_type, shape, mesh_dim_names=AXES)


def data_share(mesh: DeviceMesh) -> tuple[int, int]:
    place, parts = mesh.get_local_rank("dp"), mesh["dp"].size()
    return place * mesh["fsdp"].size() + mesh.get_local_rank("fsdp"), parts * mesh["fsdp"].size()


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A submodule with parameters gathered together, when its forward pass begins."""

    module: nn.Module
    low_precision: bool = True
    """True if its parameters may be gathered in `Sharding.gather_dtype`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How FSDP2 stores and sends parameters."""

    gather_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    """Gradients are averaged in it; None: in their own dtype."""
    reshard_after_forward: bool = True
    """True to free a unit's gathered parameters after forward and gather them again for backward: less memory, half as
    much communication again.
    """


def lay_out(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    tensor_plan: Mapping[str, ParallelStyle],
    units: Sequence[Unit],
    wrap_units: Callable[[], None],
    sharding: Sharding,
) -> None:
    """Lay the module out in place, on all ranks of the mesh together; parameters outside of units are gathered with the
    root.

    Args:
        module: equal on all ranks that differ only in dp, fsdp and tp.
        mesh: from `open_mesh`.
        tensor_plan: style by name of submodule, `*` for any one name; names that the module lacks are skipped.
        units: in the order of their forward passes.
        wrap_units: called between both, to change how the units compute but not their parameters.
        sharding: how parameters are kept along dp and fsdp.
    """
    if mesh["tp"].size() > 1:
        split_products(module, mesh["tp"], tensor_plan)
    wrap_units()
    if mesh["dp"].size() * mesh["fsdp"].size() > 1:
        shard_parameters(module, mesh, units, sharding)


def split_products(module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
    """Split parameters over a mesh of one axis. Each rank cuts its part out of its copy, without a message."""
    names = [name for name, _ in module.named_modules()]
    present = {pattern: style for pattern, style in plan.items() if any(_matches(name, pattern) for name in names)}
    parallelize_module(module, mesh, present, src_data_rank=None)


def shard_parameters(module: nn.Module, mesh: DeviceMesh, units: Sequence[Unit], sharding: Sharding) -> None:
    """Shard along fsdp and, where dp is larger than 1, replicate along dp (hybrid sharding). Raises Unsupported if two
    units, or a unit and the rest of the module, share a parameter, and for sparse gradients."""
    refuse_shared(module, units)
    refuse_sparse(module, "sharding", "shards")
    data_mesh = mesh["dp", "fsdp"] if mesh["dp"].size() > 1 else mesh["fsdp"]
    as_kept = MixedPrecisionPolicy(cast_forward_inputs=False)
    # Inputs are not cast: autocast decides on low precision, as on one rank.
    lower = MixedPrecisionPolicy(
        param_dtype=sharding.gather_dtype, reduce_dtype=sharding.reduce_dtype, cast_forward_inputs=False
    )
    for unit in units:
        fully_shard(
            unit.module,
            mesh=data_mesh,
            mp_policy=lower if unit.low_precision else as_kept,
            reshard_after_forward=sharding.reshard_after_forward,
        )
    # Forward needs the root last and backward needs it first: freeing it between would gain nothing.
    fully_shard(module, mesh=data_mesh, mp_policy=lower, reshard_after_forward=False)


def refuse_shared(module: nn.Module, units: Sequence[Unit]) -> None:
    inside = {id(unit.module) for unit in units}
    modules = module.named_modules(remove_duplicate=False)
    unit_of = {name: id(inner) for name, inner in modules if id(inner) in inside}
    found: dict[nn.Parameter, tuple[str, int | None]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        around = (name.rsplit(".", parts)[0] for parts in range(1, name.count(".") + 1))
        unit = next((unit_of[prefix] for prefix in around if prefix in unit_of), None)
        other, its_unit = found.setdefault(parameter, (name, unit))
        if unit != its_unit:
            why = "they are one parameter, and would be gathered apart"
            raise Unsupported(f"sharding {other} and {name}", why, "use a layout of dp alone")


@contextmanager
def no_gradient_sync(module: nn.Module, *, keep_gathered: bool) -> Iterator[None]:
    """A context: backward passes add to whole gradients on each rank and send nothing; the next one outside sends all.
    `module` is the root that `shard_parameters` sharded. With `keep_gathered` parameters stay gathered after a backward
    pass, so that the next forward pass need not gather them.
    """
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(False)
    module.set_reshard_after_backward(not keep_gathered)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)
        module.set_reshard_after_backward(True)


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
"""Torch's, by name. The last one takes several stages a rank, the others one."""


def stage_numbers(mesh: DeviceMesh, stages_a_rank: int) -> list[int]:
    rank, ranks = mesh.get_local_rank("pp"), mesh["pp"].size()
    return [rank + ranks * turn for turn in range(stages_a_rank)]


class Pipeline:
    def __init__(
        self,
        stages: Sequence[nn.Module],
        mesh: DeviceMesh,
        device: torch.device,
        *,
        schedule: str,
        microbatches: int,
        between: Tensor,
        first_input: Tensor,
        last_output: Tensor,
        loss: Callable[[Any, Any], Tensor],
    ) -> None:
        """Shapes are of one microbatch on this rank.

        Args:
            stages: laid out, on their device, in the order of `stage_numbers`.
            mesh: from `layout.open_mesh`.
            device: this rank's.
            schedule: a key of SCHEDULES.
            microbatches: number of parts of a batch, along its first dimension.
            between: a tensor on torch's meta device, of the shape and dtype between stages.
            first_input: the same for the first stage's input.
            last_output: the same for the last stage's output.
            loss: (output of the last stage, target) -> the mean over a microbatch.
        """
        numbers = stage_numbers(mesh, len(stages))
        count = mesh["pp"].size() * len(stages)
        made = [
            PipelineStage(
                stage,
                number,
                count,
                device,
                input_args=first_input if number == 0 else between,
                output_args=last_output if number == count - 1 else between,
                group=mesh.get_group("pp"),
            )
            for number, stage in zip(numbers, stages, strict=True)
        ]
        self._gives_input = made[0].is_first
        self._gives_target = made[-1].is_last
        given: Any = made if schedule == "interleaved" else made[0]
        self._schedule = SCHEDULES[schedule](given, microbatches, loss_fn=loss)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Forward and backward passes of all microbatches; gradients are of the mean over the batch. Every rank
        receives the whole batch and uses its stages' part. Returns the mean loss on the ranks with the last stage, None
        on the others."""
        losses: list[Tensor] = []
        given = (inputs,) if self._gives_input else ()
        target = targets if self._gives_target else None
        self._schedule.step(*given, target=target, losses=losses, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else None
