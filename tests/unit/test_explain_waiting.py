import dataclasses

import pytest
from tests.sure import sure
from tests.unit.explaining import MS, case, foreign, host_call, op, own, profile, timing

from steplab.explain.fusing import MOST_LEFT
from steplab.explain.host_copies_and_syncs import host_copies_and_syncs
from steplab.explain.launch_bound import launch_bound
from steplab.records.profile import CompiledShares, HostCallStats, OpStats

FORWARD = op("aten::mm", "matmul", 4.0, calls=300)
BACKWARD = op("aten::mm", "matmul", 6.0, phase="backward", calls=600)
UPDATE = op("aten::_fused_adamw_", "optimizer", 1.0, phase="optimizer", calls=10)
ALL = [FORWARD, BACKWARD, UPDATE]


# --- launch_bound -----------------------------------------------------------------------------------------


def test_a_launch_bound_step_is_predicted_to_lose_its_waiting() -> None:
    seen = profile(ALL, waiting_ms={"forward": 9.0, "backward": 5.0, "optimizer": 3.0})
    run = own({}, seen, timing(16.0, forward=7.0, backward=6.5, optimizer=2.5))
    found = sure(launch_bound(case(run)))
    # Unprofiled 7.0 + 6.5 ms less busy 4.0 + 6.0 ms. The optimizer's 1.5 ms stay: the model's compilation is not its.
    assert found.saves_s == pytest.approx(3.5 * MS)
    assert found.fields == {"compile": "block", "cuda_graph": "step"}
    assert found.change == "steplab run --model small --compile block --cuda-graph step"
    assert "the optimizer's wait" in found.prediction
    by_name = {e.what: e.value for e in found.evidence}
    assert by_name["idle while Python launches, forward, under the profiler"] == pytest.approx(9.0 * MS)
    assert by_name["launches"] == 1000
    assert "16.0 ms" in found.saw
    assert not found.at_most


def test_waiting_that_the_profiler_made_is_none() -> None:
    seen = profile(ALL, waiting_ms={"forward": 9.0, "backward": 5.0})
    timed = timing(11.2, forward=4.1, backward=6.1, optimizer=1.0)
    assert launch_bound(case(own({}, seen, timed))) is None


def test_a_busy_device_is_not_launch_bound() -> None:
    seen = profile(ALL, waiting_ms={"forward": 0.2, "backward": 0.3})
    # Were the timing believed alone, 3 ms of it would be waiting: the profile says what for.
    assert launch_bound(case(own({}, seen, timing(14.0, forward=5.5, backward=7.5, optimizer=1.0)))) is None


def test_waiting_in_the_optimizer_alone_is_not_the_models() -> None:
    seen = profile(ALL, waiting_ms={"optimizer": 12.0})
    assert launch_bound(case(own({}, seen, timing(20.0, forward=4.0, backward=6.0, optimizer=10.0)))) is None


def test_compiling_saves_what_is_fused_as_well() -> None:
    fusable = [
        op("aten::silu", "elementwise", 0.4, where="blocks.*.feed_forward", calls=12),
        op("aten::mul", "elementwise", 0.6, where="blocks.*.feed_forward", calls=12),
    ]
    seen = profile([*ALL, *fusable], waiting_ms={"forward": 9.0, "backward": 5.0})
    run = own({}, seen, timing(16.0, forward=8.0, backward=7.0, optimizer=1.0))
    found = sure(launch_bound(case(run)))
    # Waiting 8 - 5 and 7 - 6 ms, and what fusing saves of silu and mul.
    assert found.saves_s == pytest.approx((3.0 + 1.0 + (1 - MOST_LEFT.memory_bound) * 1.0) * MS)
    compiled = sure(launch_bound(case(own({"compile": "default"}, seen, run.timing))))
    assert compiled.saves_s == pytest.approx(4.0 * MS)
    assert compiled.fields == {"cuda_graph": "step"}


def test_a_step_that_cannot_be_recorded_whole_is_left_to_torchs_own_graphs() -> None:
    seen = profile(ALL, waiting_ms={"forward": 9.0, "backward": 5.0})
    found = sure(
        launch_bound(case(own({"precision": "fp16"}, seen, timing(16.0, forward=8.0, backward=7.0, optimizer=1.0))))
    )
    assert found.fields == {"compile": "reduce-overhead"}


@pytest.mark.parametrize("graphs", [{"compile": "reduce-overhead"}, {"cuda_graph": "step"}])
def test_a_step_that_replays_graphs_is_told_to_grow_instead(graphs: dict[str, object]) -> None:
    seen = profile(ALL, waiting_ms={"forward": 9.0})
    run = own(graphs, seen, timing(16.0, forward=9.0, backward=6.0, optimizer=1.0))
    found = sure(launch_bound(case(run)))
    assert found.fields == {}
    assert "--batch 8" in found.change


def test_a_foreign_trace_gives_the_waiting_it_shows_as_an_upper_bound() -> None:
    found = sure(launch_bound(case(foreign(profile(ALL, waiting_ms={"forward": 9.0, "optimizer": 2.0})))))
    assert found.saves_s == pytest.approx(9.0 * MS)
    assert found.at_most
    assert found.prediction.startswith("At most")
    assert "reduce-overhead" in found.change


def test_a_host_that_does_something_else_is_not_cured_by_launching_faster() -> None:
    # 50 ms for 100 launches: 500 µs each.
    found = sure(launch_bound(case(foreign(profile(ALL, waiting_ms={"forward": 50.0}, launches=100)))))
    assert found.fields == {}
    assert "compile" not in found.change


def test_a_cpu_launches_nothing() -> None:
    assert launch_bound(case(foreign(profile(ALL, waiting_ms={"forward": 50.0}, device="cpu")))) is None


# --- host_copies_and_syncs --------------------------------------------------------------------------------

READ_BACK = (
    host_call("cudaMemcpyAsync: Memcpy DtoH (Device -> Pageable)", phase="optimizer"),
    host_call("cudaStreamSynchronize", phase="optimizer", ms=7.0),
)


def with_calls(*calls: HostCallStats, waiting: float = 2.0, ops: list[OpStats] | None = None) -> object:
    seen = profile(ops or ALL, waiting_ms={"forward": waiting, "backward": 0.5}, host_calls=calls)
    return host_copies_and_syncs(case(own({}, seen, timing(14.0))))


def test_a_number_read_back_each_step_costs_the_idle_time_around_it() -> None:
    seen = profile(ALL, waiting_ms={"forward": 2.0, "backward": 0.5, "optimizer": 0.25}, host_calls=READ_BACK)
    found = sure(host_copies_and_syncs(case(own({}, seen, timing(14.0)))))
    # The optimizer's idle time and the following forward's, not the backward's.
    assert found.saves_s == pytest.approx(2.25 * MS)
    assert found.title == "The CPU waits for the GPU once per step"
    assert "cudaStreamSynchronize, 1 per step" in found.saw


def test_the_lines_that_read_values_are_those_of_the_dry_run() -> None:
    shares = CompiledShares(memory_bound=0.5, products=1.0, kernels=0.5, host=0.5, reads_at=("gpt.py:79", "gpt.py:81"))
    shares = dataclasses.replace(shares, made_at=("gpt.py:52",))
    seen = profile(ALL, waiting_ms={"forward": 2.0}, host_calls=READ_BACK)
    found = sure(host_copies_and_syncs(case(own({}, dataclasses.replace(seen, compiled=shares), timing(14.0)))))
    assert "reads values off tensors at gpt.py:79 and gpt.py:81." in found.saw
    assert "makes tensors without naming a device at gpt.py:52." in found.saw


@pytest.mark.parametrize(("calls", "said"), [(READ_BACK, True), ((), False)])
def test_a_launch_bound_step_that_synchronises_must_lose_that_before_it_is_a_graph(
    calls: tuple[HostCallStats, ...], said: bool
) -> None:
    seen = profile(ALL, waiting_ms={"forward": 9.0}, host_calls=calls)
    for fields in ({}, {"compile": "reduce-overhead"}):  # graphs already get another finding
        found = sure(launch_bound(case(own(fields, seen, timing(20.0, forward=13.0, backward=6.0, optimizer=1.0)))))
        assert ("remove those first" in found.note) == (said and not fields)


def test_no_more_than_the_unprofiled_step_is_idle() -> None:
    seen = profile(ALL, waiting_ms={"forward": 2.0}, host_calls=READ_BACK)
    found = sure(host_copies_and_syncs(case(own({}, seen, timing(11.5)))))
    assert found.saves_s == pytest.approx((11.5 - 11.0) * MS)


def test_a_call_outside_of_all_phases_is_felt_by_the_next_forward() -> None:
    calls = [dataclasses.replace(call, phase="outside") for call in READ_BACK]
    seen = profile(ALL, waiting_ms={"forward": 2.0, "backward": 0.5}, host_calls=tuple(calls))
    found = sure(host_copies_and_syncs(case(own({}, seen, timing(14.0)))))
    assert found.saves_s == pytest.approx(2.0 * MS)


def test_the_hosts_time_in_each_call_is_told() -> None:
    seen = profile(ALL, waiting_ms={"forward": 2.0}, host_calls=READ_BACK)
    found = sure(host_copies_and_syncs(case(own({}, seen, timing(14.0)))))
    assert "cudaStreamSynchronize, 1 per step, 7.00 ms of Python's time, most in optimizer" in found.saw


@pytest.mark.parametrize(("microseconds", "fires"), [(2.0, False), (9.9, False), (10.1, True)])
def test_a_synchronisation_that_returns_at_once_is_no_wait(microseconds: float, fires: bool) -> None:
    # Under DDP: cudaEventSynchronize a step, each of an event that has passed already.
    calls = host_call("cudaEventSynchronize", phase="backward", calls=90, ms=90 * microseconds / 1000)
    assert (with_calls(calls) is not None) == fires


@pytest.mark.parametrize(
    "call",
    [
        HostCallStats(name="cudaDeviceSynchronize", phase="outside", range="", calls=1, total_s=0.01),
        host_call("cudaMemcpyAsync: Memcpy HtoD (Pinned -> Device)", phase="forward"),
        host_call("cudaMalloc", phase="forward"),
    ],
    ids=["the profiler's own", "a copy nobody waits for", "memory"],
)
def test_what_makes_nobody_wait_is_not_told(call: HostCallStats) -> None:
    assert with_calls(call) is None


def test_the_profilers_own_synchronisation_is_none_of_a_single_steps() -> None:
    own_call = HostCallStats(name="cudaDeviceSynchronize", phase="outside", range="", calls=1, total_s=0.01)
    seen = profile(ALL, waiting_ms={"forward": 2.0}, host_calls=(own_call,), num_steps=1)
    assert host_copies_and_syncs(case(foreign(seen))) is None
    in_the_step = dataclasses.replace(seen, host_calls=(dataclasses.replace(own_call, phase="forward"),))
    assert host_copies_and_syncs(case(foreign(in_the_step))) is not None


def test_a_synchronisation_that_leaves_no_gap_is_not_told() -> None:
    assert with_calls(*READ_BACK, waiting=0.01) is None


def test_once_in_two_steps_is_not_in_every_step() -> None:
    rare = HostCallStats(name="cudaStreamSynchronize", phase="forward", range="", calls=1, total_s=0.01)
    assert with_calls(rare) is None


def test_the_gradient_scaler_of_fp16_is_named_and_bf16_proposed() -> None:
    seen = profile(ALL, waiting_ms={"forward": 2.0}, host_calls=READ_BACK)
    found = sure(host_copies_and_syncs(case(own({"precision": "fp16"}, seen, timing(14.0)))))
    assert found.fields == {"precision": "bf16"}
    assert "scaler" in found.note
