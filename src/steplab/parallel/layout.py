"""A module laid out over a mesh of ranks by torch's engines.

A mesh has four axes, outermost first, so that ranks that communicate most are neighbours: pp divides blocks, dp the
batch, fsdp the batch and each parameter, tp each matrix product.

`lay_out` splits products, lets the caller wrap units (recomputation, compilation), then shards, so that FSDP2's hooks
stay outside of compiled code.

Pipelines run torch's schedules: `gpipe` (Huang et al. 2019), `1f1b` (Narayanan et al. 2019), `interleaved` (Narayanan
et al. 2021).
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
    """Create the mesh; a collective call. Raises UserError for an unknown axis, a size below 1, or a product other than
    the number of ranks.
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
    """A submodule whose parameters are gathered together when its forward pass begins."""

    module: nn.Module
    low_precision: bool = True


def lay_out(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    tensor_plan: Mapping[str, ParallelStyle],
    units: Sequence[Unit],
    wrap_units: Callable[[], None],
    policy: MixedPrecisionPolicy,
    reshard_after_forward: bool,
) -> None:
    """Split and shard the module in place; all ranks of the mesh call it together.

    Args:
        module: equal on ranks that differ only in dp, fsdp and tp.
        tensor_plan: style by name of submodule, `*` for any one name; absent names are skipped.
        units: in the order of their forward passes; other parameters are gathered with the root.
        wrap_units: called between splitting and sharding; parameters must stay the same objects.
        policy: dtypes of gathered parameters and of averaged gradients; units without low_precision keep theirs.
        reshard_after_forward: free gathered parameters after forward, and gather them again for backward.
    """
    if mesh["tp"].size() > 1:
        split_products(module, mesh["tp"], tensor_plan)
    wrap_units()
    if mesh["dp"].size() * mesh["fsdp"].size() > 1:
        shard_parameters(module, mesh, units, policy, reshard_after_forward)


def split_products(module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
    """Cut each rank's part out of its full copy, without communication."""
    names = [name for name, _ in module.named_modules()]
    present = {pattern: style for pattern, style in plan.items() if any(_matches(name, pattern) for name in names)}
    parallelize_module(module, mesh, present, src_data_rank=None)


def shard_parameters(
    module: nn.Module, mesh: DeviceMesh, units: Sequence[Unit], policy: MixedPrecisionPolicy, reshard: bool
) -> None:
    """Shard parameters along fsdp, and replicate along dp. Raises Unsupported for sparse gradients, and for a parameter
    shared between a unit and other modules.
    """
    refuse_shared(module, units)
    refuse_sparse(module, "sharding", "shards")
    data_mesh = mesh["dp", "fsdp"] if mesh["dp"].size() > 1 else mesh["fsdp"]
    as_kept = MixedPrecisionPolicy(cast_forward_inputs=False)
    for unit in units:
        fully_shard(
            unit.module,
            mesh=data_mesh,
            mp_policy=policy if unit.low_precision else as_kept,
            reshard_after_forward=reshard,
        )
    # Forward needs the root last and backward needs it first: freeing it between would gain nothing.
    fully_shard(module, mesh=data_mesh, mp_policy=policy, reshard_after_forward=False)


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
    """Accumulate gradients without communication; the next backward pass outside sends their sum. `keep_gathered` saves
    gathering in the next forward pass.
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
"""Pipeline schedules by name; only `interleaved` takes several stages per rank."""


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
        """All shapes are those of one microbatch on this rank.

        Args:
            stages: on their device, in the order of `stage_numbers`.
            microbatches: parts of a batch, along its first dimension.
            between, first_input, last_output: meta tensors of a stage's input or output.
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
        """Run both passes; every rank passes the whole batch. Returns the batch's mean loss on ranks with the last
        stage, else None.
        """
        losses: list[Tensor] = []
        given = (inputs,) if self._gives_input else ()
        target = targets if self._gives_target else None
        self._schedule.step(*given, target=target, losses=losses, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else None
