"""Micro-steps on ranks: exact gradients of all sequences, sent once a step.

The model is linear with squared error, inputs are small integers and divisors powers of two, so float64 holds all sums
and the closed form matches to the last bit.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests.distributed import layout_cases
from tests.distributed.ranks import Cases, on_ranks
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from steplab.measurement.ddp.variant import RecordingCollectives
from steplab.measurement.step.step import ModelStep
from steplab.model.workload import Workload
from steplab.specs.ddp import KINDS, OWN, Variant, variants_of
from steplab.specs.resolve import resolve_step

cases = Cases()
WIDTH, BATCH, MICRO_STEPS, RANKS, LEARNING_RATE = 3, 4, 2, 2, 0.5


def test_micro_steps_on_ranks(subtests: pytest.Subtests) -> None:
    cases.run(RANKS, subtests)


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        ("dp=2", {"checkpointing": "every_2"}),
        ("fsdp=2", {}),
        ("fsdp=2", {"reshard_after_forward": "never"}),
        ("tp=2", {}),
    ],
    ids=str,
)
def test_layouts_train_on_micro_steps_as_one_process_on_the_whole_batch(layout: str, fields: dict[str, object]) -> None:
    on_ranks(2, layout_cases.case_trains_alike, layout, fields | {"accumulation": 2})


L = layout_cases.LAYERS


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {},
            [
                {"_allgather_base_": L + 2},
                {"_allgather_base_": L + 1},
                {"_allgather_base_": L + 2},
                {"_allgather_base_": L + 1, "_reduce_scatter_base_": L + 2},
                {},
            ],
        ),
        (
            {"reshard_after_forward": "never"},
            [{"_allgather_base_": L + 2}, {}, {}, {"_reduce_scatter_base_": L + 2}, {}],
        ),
    ],
    ids=["freed", "kept gathered"],
)
def test_sharded_gradients_are_scattered_once_a_step(fields: dict[str, object], expected: list[dict[str, int]]) -> None:
    on_ranks(2, layout_cases.case_collectives, "fsdp=2", fields | {"accumulation": 2}, expected)


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        linear = nn.Linear(WIDTH, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(torch.tensor([[1.0, -2.0, 3.0]]))
        self.blocks = nn.ModuleList([linear])

    def forward(self, x_BC: Tensor, y_B: Tensor) -> Tensor:
        for block in self.blocks:
            x_BC = block(x_BC)
        return (x_BC.squeeze(1) - y_B).square().mean()


def micro_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randint(-8, 8, (RANKS * MICRO_STEPS, BATCH, WIDTH + 1), generator=generator).double()
    return [(part[:, :WIDTH], part[:, WIDTH]) for part in numbers]


def updated_weight() -> Tensor:
    """After a step of gradient descent on the whole batch: w - lr 2 / N X^T (X w - y)."""
    x = torch.cat([inputs for inputs, _ in micro_batches()])
    y = torch.cat([targets for _, targets in micro_batches()])
    w = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    return w - LEARNING_RATE * 2 / len(x) * (x.T @ (x @ w - y))


def step_of(variant: Variant) -> tuple[ModelStep, RecordingCollectives]:
    world = layout_cases.world()
    recording = RecordingCollectives(world.collectives)
    spec = resolve_step({"model": "toy", "optimizer": "sgd", "accumulation": MICRO_STEPS, "device": "cpu"})
    mine = iter(micro_batches()[world.rank * MICRO_STEPS :])
    workload = Workload(module=Squares(), make_batch=lambda: next(mine))
    step = ModelStep(workload, spec, torch.device("cpu"), replace(world, collectives=recording), variant)
    assert step.optimizer is not None
    for group in step.optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    return step, recording


def weight_of(step: ModelStep) -> Tensor:
    (weight,) = step.module.parameters()
    return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight.detach())[0]


@cases
def every_variant_takes_the_step_of_the_whole_batch_to_the_last_bit() -> None:
    for variant in variants_of(KINDS, (25.0,)):
        step, _ = step_of(variant)
        assert [phase.name for phase in step.phases[:4]] == ["forward", "backward"] * MICRO_STEPS
        step.run()
        assert torch.equal(weight_of(step), updated_weight()) == (variant.kind != "none"), variant


@cases
def gradients_are_sent_in_the_last_micro_step_alone() -> None:
    for variant in variants_of(KINDS, (25.0,)):
        step, recording = step_of(variant)
        last_backward = 2 * MICRO_STEPS - 1
        sent = []
        for phase in step.phases:
            with recording.on() as own, CommDebugMode() as torch_s:
                phase.run()
            reductions = [name for name in own if "reduce" in name.collective]
            by_torch = [str(name) for name in torch_s.get_comm_counts() if "reduce" in str(name)]
            sent.append(len(reductions) if variant.kind in OWN else len(by_torch))
        assert sent[:last_backward] == [0] * last_backward, variant
        assert sum(sent) == (0 if variant.kind == "none" else 1), (variant, sent)


@cases
def gradients_that_nobody_sent_are_sent_by_the_next_synchronisation() -> None:
    step, recording = step_of(Variant(kind="flat"))
    with recording.on() as found:
        step.make_gradients_unsent()
    assert not found
    for phase in step.phases[2 * MICRO_STEPS :]:
        phase.run()
    assert torch.equal(weight_of(step), updated_weight())
    assert dist.get_world_size() == RANKS
