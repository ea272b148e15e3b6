from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.rendering import run_text
from tests.runs import make_run

from steplab.errors import Unsupported, UserError
from steplab.lab.machine import fields_here
from steplab.lab.utilization import PeakFigure, utilizations
from steplab.measurement.machine.device import open_device
from steplab.measurement.machine.world import World, refuse_too_few_gpus
from steplab.measurement.step.step import ModelStep, make_step
from steplab.model.build import build_workload
from steplab.records.codec import decode, encode
from steplab.records.rows import run_row
from steplab.records.run import RankSamples
from steplab.records.timing import PhaseSamples
from steplab.report.run.cells import cells_of, label, varying
from steplab.report.run.one_run import spread_words
from steplab.specs.layout import Layout, parse_layout, process_count, with_processes
from steplab.specs.resolve import resolve_step
from steplab.specs.step import describe
from steplab.store.selection import cell_key

CPU = torch.device("cpu")


class Alone:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def __getattr__(self, name: str) -> Any:
        return lambda *tensors, **settings: self  # a collective that is under way

    def wait(self) -> None: ...

    def host_maximum(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def host_gather(self, value: object) -> list[object]:
        return [value] * self.size


def world_of(rank: int, size: int = 2) -> World:
    return World(
        rank=rank, size=size, host="here", device=open_device("cpu"), backend="gloo", collectives=Alone(rank, size)
    )


def ranks_of(*columns: tuple[float, ...]) -> tuple[RankSamples, ...]:
    return tuple(
        RankSamples(
            rank=rank, host="node1", device_name="a GPU", back_to_back=(PhaseSamples(phase="step", device_s=column),)
        )
        for rank, column in enumerate(columns)
    )


# --- asked for --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "layout", "shown"),
    [
        ("dp=2,fsdp=4", Layout(dp=2, fsdp=4), "dp=2,fsdp=4"),
        (" tp = 2 ", Layout(tp=2), "tp=2"),
        ("dp=1", Layout(), "dp=1"),
    ],
)
def test_a_layout_is_written_as_it_is_read(text: str, layout: Layout, shown: str) -> None:
    assert parse_layout(text) == layout
    assert str(layout) == shown
    assert parse_layout(shown) == layout


@pytest.mark.parametrize("text", ["", "dp", "dp=", "dp=two", "dp=2,dp=2", "dp=-1", "ep=2", "dp=²"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="write each of dp, fsdp, tp, pp once"):
        parse_layout(text)


def test_an_axis_of_nobody_is_refused() -> None:
    with pytest.raises(UserError, match="layout dp must be from 1 to 1048576, not 0"):
        parse_layout("dp=0")


def test_a_number_of_processes_is_a_layout_and_a_device() -> None:
    assert with_processes({"batch": "2"}, None, None) == {"batch": "2"}
    assert with_processes({}, 4, None) == {"layout": "dp=4", "device": "cuda"}
    assert with_processes({"layout": "fsdp=2"}, None, 2) == {"layout": "fsdp=2", "device": "cpu"}
    assert process_count(None, 3, "cpu") == (3, "cpu")


def test_without_a_layout_the_fields_are_those_of_the_processes_that_torchrun_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert fields_here({"data_parallel": "flat"}) == {"data_parallel": "flat"}
    started = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    assert resolve_step(fields_here({"data_parallel": "flat"})).layout == Layout(dp=4)
    assert fields_here({"layout": "fsdp=4"}) == {"layout": "fsdp=4"}


def test_more_gpus_than_there_are_is_refused() -> None:
    refuse_too_few_gpus(2, 2)
    with pytest.raises(Unsupported, match=r"4 processes on GPUs of one machine is not supported: .* use at most 2"):
        refuse_too_few_gpus(4, 2)


# --- kept and told ----------------------------------------------------------------------------------------


def test_a_key_has_the_fields_of_several_processes_where_there_are_several() -> None:
    one = resolve_step({"model": "small", "context": 256})
    assert cell_key(replace(one, data_parallel="flat", bucket_size_mb=1.0)) == cell_key(one)
    keys = {
        cell_key(resolve_step({"model": "small", "context": 256, "layout": "dp=2"} | more))
        for more in ({}, {"data_parallel": "flat"}, {"bucket_size_mb": "1"}, {"layout": "dp=4"})
    }
    assert len(keys | {cell_key(one)}) == 5


def test_a_record_of_several_ranks_reads_back_and_tells_each() -> None:
    run = replace(make_run({"layout": "dp=2", "bucket_size_mb": 10}), ranks=ranks_of((1.0, 2.0, 3.0), (1.5, 2.0, 3.2)))
    assert decode(encode(run)) == run
    row = run_row(run)
    assert (row["processes"], row["layout"], row["data_parallel"], row["bucket_size_mb"]) == (2, "dp=2", "bucketed", 10)
    text = run_text(run, width=120)
    assert "layout dp=2 · bucketed gradients · buckets of 10 MB" in " ".join(text.split())
    assert spread_words(run.ranks) is not None
    assert "within a step the ranks are 200 ms (10.0 %) apart (median)" in " ".join(text.split())


def test_ranks_that_timed_different_steps_have_no_spread() -> None:
    assert spread_words(ranks_of((1.0, 2.0), (1.0,))) is None


def test_layouts_tell_cells_apart() -> None:
    fields: list[dict[str, object]] = [{}, {"layout": "dp=2"}, {"layout": "dp=2", "data_parallel": "naive"}]
    cells = cells_of([make_run({"model": "small"} | more) for more in fields])
    assert varying(cells) == ["layout", "data_parallel"]
    assert [label(cell, varying(cells)) for cell in cells] == [
        "one process",
        "layout dp=2 · naive gradients",
        "layout dp=2 · bucketed gradients",
    ]
    assert "layout" not in describe(resolve_step({}))


def test_a_step_is_described_by_what_has_an_effect_in_its_layout() -> None:
    def spread(layout: str, **fields: object) -> str:
        return describe(resolve_step({"layout": layout, **fields})).partition("layout ")[2]

    assert spread("dp=2") == "dp=2 · bucketed gradients · buckets of 25 MB"
    assert spread("dp=2,fsdp=2") == "dp=2,fsdp=2", "FSDP2 averages, not the strategy"
    assert spread("fsdp=2", reshard_after_forward="never") == "fsdp=2 · reshard after forward: never"
    assert spread("pp=2", pipeline_schedule="gpipe") == "pp=2 · gpipe schedule · 4 microbatches"


def test_a_share_of_the_peak_is_a_share_of_all_devices_peaks() -> None:
    peak = PeakFigure(flops_per_s=1e15, source="a data sheet")
    run, spec = make_run(), make_run().spec
    assert spec is not None
    alone, dp, tp = (
        utilizations(replace(run, spec=replace(spec, layout=layout)), peak)
        for layout in (Layout(), Layout(dp=2), Layout(tp=2))
    )
    for one, copied, split in zip(alone, dp, tp, strict=True):
        assert (one.num_devices, copied.num_devices, split.num_devices) == (1, 2, 2)
        assert (copied.flops, split.flops) == (2 * one.flops, one.flops)
        assert one.value is not None
        assert copied.value == pytest.approx(one.value)
        assert split.value == pytest.approx(one.value / 2)


# --- a rank's step ----------------------------------------------------------------------------------------


def step_of(rank: int | None, **fields: object) -> ModelStep:
    spec = resolve_step({"model.num_layers": 1, "context": 8, "layout": "dp=1" if rank is None else "dp=2"} | fields)
    step = make_step(build_workload(spec, CPU), spec, CPU, None if rank is None else world_of(rank))
    assert isinstance(step, ModelStep)
    return step


@pytest.mark.usefixtures("torch_settings_put_back")
def test_ranks_have_the_same_weights_and_batches_of_their_own() -> None:
    first, second, again = step_of(0), step_of(1), step_of(1)
    for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(a, b)
    tokens = [step.batches[0][0] for step in (first, second, again)]
    assert not torch.equal(tokens[0], tokens[1])
    assert torch.equal(tokens[1], tokens[2])


@pytest.mark.usefixtures("torch_settings_put_back")
def test_gradients_are_synchronised_before_anyone_uses_them() -> None:
    assert [phase.name for phase in step_of(None).phases] == ["forward", "backward", "optimizer"]
    step = step_of(1, **{"pass": "forward_backward"})
    assert [phase.name for phase in step.phases] == ["forward", "backward", "gradient sync"]
    seen: list[str] = []
    step.on_gradients = lambda: seen.append("gradients are made")
    for phase in step.phases:
        phase.run()
        seen.append(phase.name)
    assert seen == ["forward", "backward", "gradients are made", "gradient sync"]
    assert all(parameter.grad is None for parameter in step.module.parameters())
