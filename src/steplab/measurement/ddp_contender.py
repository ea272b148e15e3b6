"""One contender of a data-parallel study, built on this rank: its model, its optimizer, the phases of its step.

All contenders compute the same step on the same weights, each rank on a batch of its own. They differ in who averages
the gradients, when, and where the optimizer's state is.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from steplab.errors import Unsupported
from steplab.measurement import compat
from steplab.measurement.ddp_messages import RecordingCollectives, fsdp_messages
from steplab.measurement.loop import Phase
from steplab.measurement.step import LEARNING_RATE, set_fp32_matmuls, to_bf16
from steplab.measurement.world import World
from steplab.model.build import build_workload
from steplab.model.workload import call, loss_of
from steplab.parallel import DataParallel, ShardedOptimizer
from steplab.parallel.collectives import Collectives
from steplab.records.ddp import Messages
from steplab.specs.ddp import BYTES_PER_MB, COLLECTIVES, OWN, Contender, DdpStudy

SYNC_PHASE = "gradient sync"
_BATCHES = 2
_STRATEGIES = {"sharded": "bucketed"}


class ContenderStep:
    """The step of one contender on this rank."""

    def __init__(self, study: DdpStudy, contender: Contender, world: World) -> None:
        """A collective call. Raises UserError or Unsupported where the contender cannot be had, on every rank alike."""
        spec = study.step
        device = world.device.torch_device
        workload = build_workload(spec, device)
        if workload.module is None or workload.make_batch is None:
            raise Unsupported(f"comparing strategies on {spec.model.label}", "it gives a whole step", "give a module")
        self._contender, self._world = contender, world
        self.module = workload.module
        """The model: each parameter and its gradient are here, whoever wraps it."""
        self._called: Callable[..., Any] = self.module
        self._recording = RecordingCollectives(world.collectives)
        self._by_collectives = contender.transport in (None, COLLECTIVES)
        self._sync: Callable[[], None] | None = None
        self._prepare(study)
        torch.manual_seed(spec.seed + 1 + world.rank)
        self._batches = [workload.make_batch() for _ in range(_BATCHES)]
        if spec.precision == "bf16_pure":
            self._batches = [to_bf16(batch) for batch in self._batches]
        self._wrap()
        self.optimizer = self._make_optimizer(spec.optimizer)
        self._autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        if spec.precision == "bf16":
            self._autocast = partial(torch.autocast, device.type, dtype=torch.bfloat16)
        self._steps_begun = 0
        self._loss: Tensor | None = None
        self.on_update: Callable[[str], None] = _nobody_looks
        """Called with before_step and after_step around the optimizer's update."""
        self.phases = [Phase(name="forward", run=self._forward), Phase(name="backward", run=self._backward)]
        """What is run, in order."""
        if self._sync is not None:
            self.phases.append(Phase(name=SYNC_PHASE, run=self._sync))
        self.phases.append(Phase(name="optimizer", run=self._update))

    def step(self) -> None:
        """One step, its phases in order."""
        for phase in self.phases:
            phase.run()

    @property
    def shared_bytes(self) -> int:
        """Device memory of its transport that torch's allocator does not count."""
        return self._called.shared_bytes if isinstance(self._called, DataParallel) else 0

    def gradients_unsent(self) -> None:
        """Forward and backward, after which every rank has gradients of its own that the next synchronisation sends."""
        self.optimizer.zero_grad(set_to_none=True)
        assert isinstance(self._called, DataParallel)
        with self._called.no_sync():
            self._forward()
            self._backward()

    def messages(self) -> tuple[Messages, ...]:
        """What a step sends; empty where nobody can say. A collective call: it runs a step."""
        kind = self._contender.kind
        if kind in OWN:
            with self._recording.on() as found:
                self.step()
            return tuple(found) if self._by_collectives else ()  # what went another way was not written down
        if kind == "torch_ddp":
            self.step()
            sizes = compat.bucket_bytes(self._called)
            return (Messages(collective="all_reduce", sizes_bytes=sizes),) if sizes else ()
        return fsdp_messages(self.module, blocks_of(self.module), self._world.size) if kind == "fsdp2" else ()

    def _prepare(self, study: DdpStudy) -> None:
        set_fp32_matmuls("high" if study.step.precision == "tf32" else "highest")
        if study.step.precision == "bf16_pure":
            for parameter in self.module.parameters():
                parameter.data = to_bf16(parameter.data)
        self.module.train()
        if study.compile == "block":
            compat.compile_alike_in_all_wrappers()
            for block in blocks_of(self.module):
                block.forward = torch.compile(block.forward)  # hooks of whoever wraps it stay outside

    def _wrap(self) -> None:
        """Put around the model what averages its gradients."""
        kind, size_mb, device = self._contender.kind, self._contender.bucket_size_mb, self._world.device.torch_device
        if kind in OWN:
            choices: dict[str, Any] = {} if size_mb is None else {"bucket_size_mb": size_mb}
            # A transport of another kind brings its own way to the other ranks, and is to find the group it knows.
            group: Collectives = self._recording
            if not self._by_collectives:
                group, choices["transport"] = self._world.collectives, self._contender.transport
            wrapped = DataParallel(self.module, _STRATEGIES.get(kind, kind), group=group, **choices)
            self._called, self._sync = wrapped, wrapped.finish_gradient_synchronization
        elif kind == "torch_ddp":
            assert size_mb is not None
            self._called = nn.parallel.DistributedDataParallel(
                self.module,
                device_ids=[device.index] if device.type == "cuda" else None,
                bucket_cap_mb=size_mb * BYTES_PER_MB / 2**20,  # torch's MB are MiB
                gradient_as_bucket_view=True,
                broadcast_buffers=False,  # they never change, and nobody else sends them
            )
        elif kind == "fsdp2":
            _shard_fully(self.module, device, self._world.size)

    def _make_optimizer(self, name: str) -> torch.optim.Optimizer:
        parameters = list(self.module.parameters())
        made, options = _optimizer(name)
        if self._contender.kind == "sharded":
            return ShardedOptimizer(parameters, made, group=self._recording, **options)
        return made(parameters, **options)

    def _forward(self) -> None:
        batch = self._batches[self._steps_begun % len(self._batches)]
        self._steps_begun += 1
        with self._autocast():
            self._loss = loss_of(call(self._called, batch))

    def _backward(self) -> None:
        assert self._loss is not None
        self._loss.backward()
        self._loss = None

    def _update(self) -> None:
        self.on_update("before_step")
        self.optimizer.step()
        self.on_update("after_step")
        self.optimizer.zero_grad(set_to_none=True)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The model's repeated blocks: the modules of its largest list of them.

    Raises Unsupported where it has no such list.
    """
    lists = [inner for inner in module.modules() if isinstance(inner, nn.ModuleList) and len(inner)]
    if not lists:
        raise Unsupported("working block by block", "the model has no nn.ModuleList of blocks", "use another model")
    largest = max(lists, key=lambda blocks: sum(parameter.numel() for parameter in blocks.parameters()))
    return list(largest)


def _shard_fully(module: nn.Module, device: torch.device, size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (size,))
    for block in blocks_of(module):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)


def _optimizer(name: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    if name == "sgd":
        return torch.optim.SGD, {"lr": LEARNING_RATE}
    ways = {"fused": name == "adamw_fused", "foreach": name == "adamw_foreach"}
    return torch.optim.AdamW, {"lr": LEARNING_RATE, **ways}


def _nobody_looks(moment: str) -> None:
    """Between two steps that are timed."""
