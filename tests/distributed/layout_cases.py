"""Cases of layout tests, run on every rank at once.

The truth is one process on the whole batch in float64. A layout may err four times as much as one float32 process, plus
some float32 steps of a weight, since ranks sum in another order. gloo on the CPU, NCCL on GPUs.
"""

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.sure import sure
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from steplab.measurement.machine.device import Device, open_device
from steplab.measurement.machine.world import World
from steplab.measurement.step.step import ModelStep
from steplab.model.build import build_workload
from steplab.model.workload import loss_of
from steplab.parallel.collectives import GroupCollectives
from steplab.parallel.errors import UserError
from steplab.parallel.layout import open_mesh
from steplab.specs.layout import parse_layout
from steplab.specs.resolve import resolve_step
from steplab.specs.step import StepSpec

VOCABULARY, WIDTH, FF, LAYERS, HEADS, CONTEXT, BATCH, STEPS = 52, 32, 72, 2, 4, 16, 8, 2
"""Sizes that split unevenly over four ranks if only fsdp splits them; BATCH is over all ranks."""
LEARNING_RATE = 0.5


def here() -> Device:
    on_gpus = "nccl" in str(dist.get_backend_config())
    return open_device(f"cuda:{torch.cuda.current_device()}" if on_gpus else "cpu")


def spec_of(layout: str, **fields: object) -> StepSpec:
    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_ff": FF, "num_layers": LAYERS, "num_heads": HEADS}
    given = {f"model.{name}": size for name, size in sizes.items()}
    ranks = parse_layout(layout).data_ranks
    common = {
        "optimizer": "sgd",
        "context": CONTEXT,
        "device": here().torch_device.type,
        "attention": "sdpa",
        "layout": layout,
    }
    micro_steps = int(str(fields.get("accumulation", 1)))
    return resolve_step({**given, **common, "batch": BATCH // ranks // micro_steps, **fields})


def world() -> World:
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        host="here",
        device=here(),
        backend="nccl" if here().torch_device.type == "cuda" else "gloo",
        collectives=GroupCollectives(),
    )


def laid_out(spec: StepSpec) -> ModelStep:
    joined = world()
    device = joined.device.torch_device
    return ModelStep(build_workload(spec, device), spec, device, joined)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCABULARY, (STEPS, 2, BATCH, CONTEXT), generator=generator)
    return [(step[0], step[1]) for step in tokens.to(here().torch_device)]


def alone(dtype: torch.dtype, spec: StepSpec) -> tuple[list[float], dict[str, Tensor]]:
    single = replace(spec_of("dp=1"), model=spec.model, attention=spec.attention)
    model = sure(build_workload(single, here().torch_device).module)
    model.to(dtype)
    losses = []
    for tokens, targets in batches():
        loss = loss_of(model(tokens, targets))
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(LEARNING_RATE * parameter.grad)
                parameter.grad = None
    return losses, {name: parameter.detach().double() for name, parameter in model.named_parameters()}


def train(step: ModelStep, spec: StepSpec) -> list[float]:
    assert step.optimizer is not None
    for group in step.optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    ranks = spec.layout.data_ranks
    part = step.distributed.data_index
    losses = []
    for tokens, targets in batches():
        own = tokens.chunk(ranks)[part], targets.chunk(ranks)[part]
        step.batches = list(zip(*(tensor.chunk(spec.micro_steps) for tensor in own), strict=True))
        mine: float | None = None
        for phase in step.phases:
            phase.run()
            if phase.name in ("forward", "pipeline") and step.loss is not None:
                mine = (mine or 0.0) + step.loss.item() / spec.micro_steps
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (part, mine))
        by_part = {index: loss for index, loss in everyone if loss is not None}
        assert len(by_part) == ranks
        losses.append(sum(by_part.values()) / ranks)
    return losses


def whole(parameter: nn.Parameter) -> Tensor:
    value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return value.detach().double()


def named(step: ModelStep) -> dict[str, nn.Parameter]:
    parts = list(step.module) if isinstance(step.module, nn.ModuleList) else [step.module]
    return {name: parameter for part in parts for name, parameter in part.named_parameters()}


def local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


# --- cases --------------------------------------------------------------------------------------------------


def case_trains_alike(layout: str, fields: dict[str, object]) -> None:
    spec = spec_of(layout, **fields)
    check_bytes(check_training(spec), spec)


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, FF), nn.GELU(), nn.Linear(FF, WIDTH))
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        x_BTC = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTC = x_BTC + block(x_BTC)
        logits_BTV = self.head(x_BTC)
        return logits_BTV, nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def foreign() -> tuple[nn.Module, Any]:
    return Foreign(), lambda: batches()[0]


def case_foreign_trains_alike(layout: str, fields: dict[str, object]) -> None:
    ranks = parse_layout(layout).data_ranks
    common = {"optimizer": "sgd", "context": CONTEXT, "device": here().torch_device.type, "layout": layout}
    micro_steps = int(str(fields.get("accumulation", 1)))
    spec = resolve_step({"model": f"{__name__}:foreign", **common, "batch": BATCH // ranks // micro_steps, **fields})
    step = check_training(spec)
    kept = sum(local(parameter).numel() for parameter in step.module.parameters())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, kept)
    assert sum(everyone) == spec.layout.dp * sum(parameter.numel() for parameter in Foreign().parameters())
    assert all(isinstance(block, FSDPModule) for block in step.module.blocks)  # type: ignore[union-attr]


def check_training(spec: StepSpec) -> ModelStep:
    step = laid_out(spec)
    expected_losses, expected = alone(torch.float64, spec)
    close_losses, close = alone(torch.float32, spec)
    losses = train(step, spec)
    for found, exact, near in zip(losses, expected_losses, close_losses, strict=True):
        assert abs(found - exact) <= 4 * abs(near - exact) + 4 * torch.finfo(torch.float32).eps * exact
    have = {name: whole(parameter) for name, parameter in named(step).items()}
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, list(have))
    assert {name for some in names for name in some} == set(expected)
    for name, weight in have.items():
        size = expected[name].abs().max()
        allowed = 4 * (close[name] - expected[name]).abs().max() + 4 * torch.finfo(torch.float32).eps * size
        difference = (weight - expected[name]).abs().max()
        assert difference <= allowed, f"{name} is off by {difference:.1e}, and {allowed:.1e} is allowed"
    return step


def case_compiled_trains_alike(layout: str, fields: dict[str, object]) -> None:
    """Uses torch's compiler on a GPU; on the CPU without code generation, which would dominate."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    backend = "inductor" if here().torch_device.type == "cuda" else "aot_eager"
    with patch("torch.compile", partial(torch.compile, backend=backend)):
        case_trains_alike(layout, {"compile": "default", **fields})
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 1, f"{LAYERS} alike blocks were compiled to {graphs} graphs"


def rows(total: int, parts: int, index: int) -> int:
    each = -(-total // parts)
    return max(0, min(each, total - index * each))


def parameter_elements(spec: StepSpec, rank: int) -> int:
    """Formula of docs/layout.md for one rank."""
    layout = spec.layout
    tp, fsdp = layout.tp, layout.fsdp
    part = rank // tp % fsdp
    stage = rank // (tp * fsdp * layout.dp)
    first, last = stage == 0, stage == layout.pp - 1

    def kept(num_rows: int, columns: int) -> int:
        return rows(num_rows, fsdp, part) * columns

    shape = sure(spec.model.shape)
    outputs = [WIDTH, shape.kv_width, shape.kv_width, *[FF] * (len(shape.feed_forward_layers) - 1)]
    norm = kept(WIDTH, 1) * (2 if shape.has_norm_biases else 1)
    block = sum(kept(width // tp, WIDTH) for width in outputs) + kept(WIDTH, WIDTH // tp) + kept(WIDTH, FF // tp)
    if shape.biases == "all":  # biases of input-split layers are whole on each rank of tp
        block += sum(kept(width // tp, 1) for width in outputs) + 2 * kept(WIDTH, 1)
    table, positions = kept(VOCABULARY // tp, WIDTH), kept(shape.learned_positions // tp, WIDTH)
    heads = 0 if shape.head == "tied" else table
    return shape.num_layers // layout.pp * (block + 2 * norm) + first * (table + positions) + last * (heads + norm)


def check_bytes(step: ModelStep, spec: StepSpec) -> None:
    step.optimizer = torch.optim.AdamW(step.module.parameters(), fused=True)
    for phase in step.phases:
        phase.run()
    expected = parameter_elements(spec, dist.get_rank())
    assert sum(local(parameter).numel() for parameter in step.module.parameters()) == expected
    moments = [local(value) for state in step.optimizer.state.values() for value in state.values() if value.dim() > 0]
    assert sum(moment.numel() * moment.element_size() for moment in moments) == 2 * 4 * expected


def counted(step: ModelStep) -> list[dict[str, int]]:
    found = []
    for phase in step.phases:
        with CommDebugMode() as mode:
            phase.run()
        found.append({str(name).split(".")[-1]: count for name, count in mode.get_comm_counts().items()})
    return found


def case_collectives(layout: str, fields: dict[str, object], expected: list[dict[str, int]]) -> None:
    step = laid_out(spec_of(layout, **fields))
    for phase in step.phases:
        phase.run()
    found = counted(step)
    assert found == expected, found


def case_another_number_of_ranks() -> None:
    with pytest.raises(UserError, match="layout pp=1,dp=2,fsdp=4,tp=1 is for 8 processes, and there are"):
        open_mesh({"pp": 1, "dp": 2, "fsdp": 4, "tp": 1}, here().torch_device.type)


def case_batches_are_shared_where_they_have_to_be() -> None:
    step = laid_out(spec_of("dp=2,tp=2"))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, step.batches[0][0].tolist())
    assert everyone[0] == everyone[1]
    assert everyone[2] == everyone[3]
    assert everyone[0] != everyone[2]


def case_bf16_is_autocast_over_fp32_weights(layout: str) -> None:
    spec = spec_of(layout, precision="bf16")
    step = laid_out(spec)
    losses = train(step, spec)
    exact, _ = alone(torch.float64, spec)
    assert {parameter.dtype for parameter in step.module.parameters()} == {torch.float32}
    for found, expected in zip(losses, exact, strict=True):
        assert abs(found - expected) <= torch.finfo(torch.bfloat16).eps * expected
