from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
from tests.distributed.ranks import Cases
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from steplab.errors import UserError
from steplab.measurement.ddp import session as ddp_session
from steplab.measurement.ddp.one_process import CHECKED_STEPS, OneProcess
from steplab.measurement.ddp.session import MeasuredVariant, measure_ddp
from steplab.measurement.ddp.variant import VariantStep
from steplab.measurement.jobs import CellsTask
from steplab.measurement.machine.device import open_device
from steplab.measurement.machine.world import World
from steplab.measurement.observer import Observer
from steplab.measurement.step.step import ModelStep
from steplab.model.build import build_workload
from steplab.parallel.collectives import GroupCollectives
from steplab.reading.traces.communication import traced_steps
from steplab.reading.traces.reading import read_trace
from steplab.records.ddp import MOMENTS, DdpCell, DdpFacts
from steplab.specs.ddp import KINDS, DdpStudy, Variant, variants_of
from steplab.specs.layout import Layout
from steplab.specs.resolve import resolve_step
from steplab.specs.step import StepSpec

cases = Cases()
SHAPE = {"model.num_layers": "2", "model.d_model": "32", "model.d_ff": "64", "model.vocab_size": "50"}
BUCKET_MB = 0.02
ROUNDING = 1e-3
"""Of a tensor's change in two steps, in fp32."""
CPU = torch.device("cpu")


def test_a_study_on_ranks(subtests: pytest.Subtests) -> None:
    cases.run(2, subtests)


def study_of(*names: str, **fields: str) -> DdpStudy:
    asked = {"model": "tiny", **SHAPE, "context": "16", "batch": "2", "steps": "3", "warmup": "1", "device": "cpu"}
    step = resolve_step(asked | fields)
    return DdpStudy(step=step, contenders=variants_of(names, (BUCKET_MB,)), turn=2, repeats=2)


def world_here() -> World:
    group = GroupCollectives()
    device = open_device("cpu")
    return World(rank=group.rank, size=group.size, host="here", device=device, backend="gloo", collectives=group)


def weights(step: VariantStep) -> list[Tensor]:
    return [
        parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()
        for parameter in step.module.parameters()
    ]


@cases
def all_variants_train_the_same_model_and_send_what_that_needs() -> None:
    world = world_here()
    found: dict[str, list[Tensor]] = {}
    sizes: dict[str, dict[str, tuple[int, ...]]] = {}
    study = study_of(*KINDS)
    for contender in study.contenders:
        step = VariantStep(study.step, contender, world)
        if contender.kind == "none":
            each = tuple(parameter.nbytes for parameter in step.module.parameters())
        step.run()
        step.run()
        found[contender.kind] = [weight.clone() for weight in weights(step)]
        sizes[contender.kind] = {sent.collective: sent.sizes_bytes for sent in step.messages()}
    for kind in set(KINDS) - {"none", "naive"}:
        for own, expected in zip(found[kind], found["naive"], strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)
    # Without communication each rank goes its own way: its batches are its own.
    assert not all(torch.equal(a, b) for a, b in zip(found["none"], found["naive"], strict=True))
    assert_sent(sizes, each)


def assert_sent(sizes: dict[str, dict[str, tuple[int, ...]]], each: tuple[int, ...]) -> None:
    total = sum(each)
    assert sizes["none"] == {}
    assert sizes["naive"] == sizes["overlap"] == {"all_reduce": each[::-1]}
    assert sizes["flat"] == {"all_reduce": (total,)}
    assert sum(sizes["bucketed"]["all_reduce"]) == sum(sizes["torch_ddp"]["all_reduce"]) == total
    assert all(size <= BUCKET_MB * 1e6 or size in each for size in sizes["bucketed"]["all_reduce"])
    # Every gradient goes to its owner, and every parameter is sent by it; slots begin at multiples of 256 bytes.
    padding = 256 * len(each)
    assert set(sizes["sharded"]) == {"reduce", "broadcast"}
    assert all(total <= sum(sent) <= total + padding for sent in sizes["sharded"].values())
    # Forward gathers the root, the embedding and two blocks, backward all but the root once more.
    assert sum(sizes["fsdp2"]["reduce_scatter"]) == total
    assert total < sum(sizes["fsdp2"]["all_gather"]) < 2 * total
    assert len(sizes["fsdp2"]["all_gather"]) == 4 + 3
    assert len(sizes["fsdp2"]["reduce_scatter"]) == 4


class Sent(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: dict[str, list[int]] = {"all_gather": [], "reduce_scatter": []}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("c10d.").partition(".")[0]
        if name == "_allgather_base_":
            self.sizes["all_gather"].append(args[0].nbytes)
        elif name == "_reduce_scatter_base_":
            self.sizes["reduce_scatter"].append(args[1].nbytes)
        return func(*args, **(kwargs or {}))


@cases
def sharded_parameters_are_sent_as_a_layout_sends_them_and_as_the_formula_says() -> None:
    world = world_here()
    for fields in ({}, {"precision": "bf16", "accumulation": "2"}, {"precision": "bf16_pure"}):
        step = VariantStep(study_of(**fields).step, Variant(kind="fsdp2"), world)
        spec = replace(step._spec, layout=Layout(fsdp=world.size))
        device = world.device.torch_device
        counts = []
        for built in (step, ModelStep(build_workload(spec, device), spec, device, world)):
            built.run()
            with Sent() as sent:
                built.run()
            counts.append({name: sorted(sizes) for name, sizes in sent.sizes.items()})
        expected = {messages.collective: sorted(messages.sizes_bytes) for messages in step.messages()}
        assert counts == [expected, expected], fields


def told(study: DdpStudy, numbers: Sequence[int], traces: Path | None) -> tuple[dict[int, DdpCell], list[DdpFacts]]:
    cells: dict[int, DdpCell] = {}
    facts: list[DdpFacts] = []
    task = CellsTask(study=study, groups=[list(numbers)], traces=str(traces) if traces else None)
    measure_ddp(task, Observer(on_cell=cells.__setitem__, on_facts=facts.append), world_here())
    return cells, facts


@cases
def every_rank_is_in_the_record_with_its_turns_and_its_memory() -> None:
    study = study_of("flat", "sharded")
    with TemporaryDirectory() as folder:
        cells, (facts,) = told(study, (0, 1, 2), Path(folder))
        rank = world_here().rank
        assert len(list(Path(folder).iterdir())) == (3 if rank == 0 else 0)
        if rank == 0:
            found = [traced_steps(read_trace(Path(folder, study.trace_name(number)))) for number in cells]
            assert found[0].communication_s == 0 < found[1].communication_s
            assert [steps.num_steps for steps in found] == [study.profiled_steps] * 3
    assert [cell.contender for cell in cells.values()] == list(study.contenders)
    assert [place.rank for place in facts.places] == [0, 1]
    baseline, flat, sharded = cells.values()
    assert not baseline.ranks[0].baseline
    assert not baseline.ranks[0].alone_s
    assert baseline.deviation is None
    for cell in (flat, sharded):
        assert cell.turns == "interleaved"
        assert cell.deviation is not None
        assert cell.deviation < ROUNDING
        assert [rank.rank for rank in cell.ranks] == [0, 1]
        for of_rank in cell.ranks:
            phases = {samples.phase for samples in of_rank.phases}
            assert phases == {"forward", "backward", "gradient sync", "optimizer", "step"}
            assert len(of_rank.samples("step")) == len(of_rank.samples("step", baseline=True)) == 4  # two turns of two
            assert len(of_rank.alone_s) == study.repeats
            assert [memory.moment for memory in of_rank.memory] == list(MOMENTS)
    held = {cell.contender.kind: cell.ranks[0].memory[-1] for cell in cells.values()}
    whole = facts.gradient_bytes
    assert held["flat"].optimizer_bytes >= 2 * whole
    assert held["sharded"].optimizer_bytes < 1.2 * whole
    assert held["flat"].allocated_bytes is None
    assert held["flat"].other_bytes is None


@cases
def the_check_finds_parameters_that_are_not_one_process_s() -> None:
    world = world_here()
    study = study_of("fsdp2", "torch_ddp", accumulation="2")
    one_process = OneProcess(study.step, world)

    def deviation(kind: str, *, off: float = 1.0) -> float:
        step = VariantStep(study.step, Variant(kind=kind), world)  # type: ignore[arg-type]
        for _ in range(CHECKED_STEPS):
            step.run()
        with torch.no_grad():
            next(step.module.parameters()).mul_(off)
        return one_process.deviation_of(step.module)

    assert all(change > 0 for change in one_process._changes)
    assert deviation("fsdp2") < ROUNDING
    assert deviation("torch_ddp") < ROUNDING
    assert deviation("none") > 0.3
    assert deviation("torch_ddp", off=1.01) > 10 * ROUNDING


@cases
def parts_updated_as_they_arrive_make_the_same_step() -> None:
    world = world_here()
    study = study_of("overlap", "bucketed", accumulation="2")
    for kind in ("overlap", "bucketed"):
        found = []
        for update in ("after", "overlapped"):
            size_mb = BUCKET_MB if kind == "bucketed" else None
            step = VariantStep(study.step, Variant(kind=kind, bucket_size_mb=size_mb, update=update), world)
            step.run()
            step.run()
            found.append(weights(step))
        spec = replace(study.step, layout=Layout(dp=world.size), data_parallel=kind, bucket_size_mb=BUCKET_MB)
        of_run = ModelStep(build_workload(spec, CPU), replace(spec, update="overlapped"), CPU, world)
        of_run.run()
        of_run.run()
        found.append([parameter.detach() for parameter in of_run.module.parameters()])
        assert all(torch.equal(own, expected) for own, *others in zip(*found, strict=True) for expected in others)
    cells, _ = told(replace(study, contenders=variants_of(("overlap",), (), updates=("overlapped",))), (1,), None)
    (of_rank, _) = cells[1].ranks
    assert {samples.phase for samples in of_rank.phases} == {"forward", "backward", "optimizer", "step"}
    assert [memory.moment for memory in of_rank.memory] == ["initialised", "after_step"]
    assert len(of_rank.alone_s) == study.repeats


@cases
def without_room_for_two_the_baseline_is_timed_before_and_after() -> None:
    study = study_of("flat", "bucketed")
    built: list[str] = []
    make = MeasuredVariant.__init__

    def counted(self: MeasuredVariant, study: DdpStudy, contender, *rest):  # type: ignore[no-untyped-def]
        built.append(contender.kind)
        make(self, study, contender, *rest)

    with (
        mock.patch.object(ddp_session._Session, "_has_room_beside", return_value=False),
        mock.patch.object(MeasuredVariant, "__init__", counted),
    ):
        cells, _ = told(study, (0, 1, 2), None)
    assert built == ["none", "none", "flat", "none", "bucketed", "none"]
    for cell in (cells[1], cells[2]):
        assert cell.turns == "before_and_after"
        assert all(len(rank.samples("step", baseline=True)) == 4 for rank in cell.ranks)


@cases
def a_refusal_of_all_ranks_is_a_row() -> None:
    study = study_of("flat", "naive")
    make = VariantStep.__init__

    def built(self: VariantStep, spec: StepSpec, contender, world) -> None:  # type: ignore[no-untyped-def]
        if contender.kind == "flat":
            raise UserError("no flat today")
        make(self, spec, contender, world)

    with mock.patch.object(VariantStep, "__init__", built):
        cells, _ = told(study, (0, 1, 2), None)
    assert [cell.status for cell in cells.values()] == ["ok", "error", "ok"]
    assert cells[1].failure
    assert cells[1].failure.message == "no flat today"
