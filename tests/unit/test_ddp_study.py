import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tests.conversations import Converse, say, task_of
from tests.ddp_records import make_ddp_cell, make_study
from tests.unit.test_loop import FakeDevice
from torch import Tensor, nn

from steplab.errors import UserError
from steplab.lab.ddp import ddp_cells, ddp_step, ddp_study
from steplab.measurement import clock, runner
from steplab.measurement.clock import Phase, run_turns
from steplab.measurement.ddp import session as ddp_session
from steplab.measurement.ddp.session import state_memory
from steplab.measurement.machine.device import open_device
from steplab.measurement.processes.conversation import Listener
from steplab.measurement.processes.launch import measure_cells
from steplab.measurement.processes.wire import Request
from steplab.measurement.runner import Runner
from steplab.records.ddp import DdpCell, StateMemory
from steplab.records.failure import Failure
from steplab.specs.ddp import DdpOptions, DdpStudy, Variant, asked_variants, variants_of
from steplab.specs.resolve import resolve_step
from steplab.units import GIB

# --- what is asked ----------------------------------------------------------------------------------------


def labels(study: DdpStudy) -> list[str]:
    return [contender.label for contender in study.contenders]


def test_each_with_buckets_stands_once_a_size_and_the_baseline_first() -> None:
    study = make_study(("bucketed", "naive", "torch_ddp:25", "sharded", "bucketed:10"))
    buckets = ["bucketed 1 MB", "bucketed 10 MB", "bucketed 100 MB", "bucketed 1000 MB"]
    assert labels(study) == ["no communication", *buckets, "naive", "torch DDP 25 MB", "sharded 25 MB"]


def test_a_transport_is_a_choice_of_what_is_bucketed_alone() -> None:
    found = variants_of(("bucketed", "torch_ddp", "sharded:5"), (10.0,), ("collectives", "peer_copy"))
    assert [contender.label for contender in found] == [
        "bucketed 10 MB",
        "bucketed 10 MB, peer_copy",
        "torch DDP 10 MB",
        "sharded 5 MB",
        "sharded 5 MB, peer_copy",
    ]
    assert [contender.family for contender in found[:3]] == ["bucketed", "bucketed, peer_copy", "torch DDP"]


def test_an_update_is_a_choice_of_what_is_sent_in_the_backward_pass() -> None:
    found = variants_of(("bucketed", "flat", "sharded:5", "overlap"), (10.0,), updates=("after", "overlapped"))
    assert [contender.label for contender in found] == [
        "bucketed 10 MB",
        "bucketed 10 MB, update overlapped",
        "flat",
        "sharded 5 MB",
        "overlap",
        "overlap, update overlapped",
    ]


def test_a_cpu_gets_small_steps_and_small_buckets() -> None:
    step, processes = ddp_step({"steps": "3"}, None, None)
    assert (step.device, step.context, step.batch, step.steps, processes) == ("cpu", 64, 2, 3, 2)
    assert "bucketed 0.1 MB" in labels(ddp_study({}))
    on_gpus, count = ddp_step({"model": "xl"}, 4, None)
    assert (on_gpus.device, on_gpus.context, count) == ("cuda", 128, 4)
    assert "torch DDP 1000 MB" in labels(ddp_study({"model": "xl", "gpus": 4}))


@pytest.mark.parametrize(
    ("fields", "changes", "said"),
    [
        ({}, {"processes": 1}, "processes must be at least 2, not 1"),
        ({"compile": "default"}, {}, "compile 'default' is not supported here, .* choose one of off, block"),
        ({"pass": "forward"}, {}, "use --pass train"),
        ({"precision": "fp16"}, {}, "use --precision bf16"),
        ({"cuda_graph": "step"}, {}, "use --cuda-graph off"),
        ({"layout": "dp=2"}, {}, "leave --layout out"),
    ],
)
def test_a_study_that_makes_no_sense_is_refused(fields: dict[str, str], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        DdpStudy(step=resolve_step(fields), contenders=(), **changes)


def sized(*sizes_mb: str) -> tuple[Variant, ...]:
    return asked_variants(DdpOptions(bucket_sizes=sizes_mb), small=True)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: variants_of(("magic",), (1.0,)), "variant 'magic' is not known; choose some of none, naive"),
        (lambda: variants_of(("naive:3",), (1.0,)), "naive has no choice of bucket_size_mb"),
        (lambda: variants_of(("bucketed:big",), (1.0,)), "must be a number of MB, not 'big'"),
        (lambda: sized("1", "0"), "a bucket size must be a positive number of MB, not 0"),
        (lambda: sized("inf"), "a bucket size must be a positive number of MB, not inf"),
        (lambda: Variant(kind="flat", transport="peer_copy"), "flat has no choice of transport"),
        (lambda: Variant(kind="flat", update="after"), "flat has no choice of update; .*: overlap, bucketed"),
        (lambda: Variant(kind="overlap", update="early"), "choose some of after, overlapped"),
        (lambda: ddp_step({}, 2, 2), "not both"),
    ],
)
def test_a_contender_that_makes_no_sense_is_refused(wrong: Callable[[], object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        wrong()


# --- what happens to the ranks ----------------------------------------------------------------------------

STUDY = make_study(("flat", "overlap", "bucketed:25"))
OUT_OF_MEMORY = Failure(
    kind="out_of_memory", message="rank 1 on node: asked for 8 GiB", phase="overlap: warmup", rank=1
)


class Ranks:
    def __init__(self, failures: dict[int, Failure]) -> None:
        self.failures = failures
        self.asked: list[list[int]] = []

    def __call__(self, request: Request, listener: Listener, timeout_s: float | None) -> Failure | None:
        self.asked.append(task_of(request).numbers)
        assert request.processes == 2
        assert request.device == "cuda"
        for number in task_of(request).numbers:
            if failure := self.failures.get(number):
                return failure
            say(listener, "at", [number])
            say(listener, "cell", [number, make_ddp_cell(STUDY.contenders[number])])
        say(listener, "result")
        return None


def measured(ranks: Converse) -> dict[int, DdpCell]:
    found: dict[int, DdpCell] = {}
    measure_cells(ddp_cells(STUDY, None), on_cell=found.__setitem__, converse=ranks)
    return found


def test_a_study_is_measured_by_one_set_of_ranks() -> None:
    ranks = Ranks({})
    assert [cell.status for cell in measured(ranks).values()] == ["ok"] * 4
    assert ranks.asked == [[0, 1, 2, 3]]


def test_after_a_contender_that_its_ranks_do_not_survive_new_ones_go_on() -> None:
    ranks = Ranks({2: OUT_OF_MEMORY})
    found = measured(ranks)
    assert {number: cell.status for number, cell in found.items()} == {0: "ok", 1: "ok", 2: "out_of_memory", 3: "ok"}
    assert found[2].failure == OUT_OF_MEMORY
    assert ranks.asked == [[0, 1, 2, 3], [3]]


def test_the_blame_is_the_failing_rank_s_own_word_on_where_it_was() -> None:
    late = Failure(kind="error", message="rank 1: no", phase="bucketed 25 MB: build", rank=1)
    ranks = Ranks({2: late})
    ranks.failures = {2: late}

    def once(request: Request, listener: Listener, timeout_s: float | None) -> Failure | None:
        failure = ranks(request, listener, timeout_s)
        ranks.failures = {}
        return failure

    found = measured(once)
    assert {number: cell.status for number, cell in found.items()} == {0: "ok", 1: "ok", 2: "ok", 3: "error"}


def told(*launches: tuple[int, Failure | None]) -> tuple[dict[int, str], list[list[int]]]:
    asked: list[list[int]] = []

    def ranks(request: Request, listener: Listener, timeout_s: float | None) -> Failure | None:
        count, failure = launches[len(asked)]
        asked.append(task_of(request).numbers)
        say(listener, "at", [0])
        for place, number in enumerate(task_of(request).numbers):
            if place <= count:
                say(listener, "at", [number])
            if place < count:
                say(listener, "cell", [number, make_ddp_cell(STUDY.contenders[number])])
        return failure

    found = measured(ranks)
    messages = {n: cell.failure.message if cell.failure else "ok" for n, cell in found.items()}
    return messages, asked


@pytest.mark.parametrize("phase", ["no communication: build", "starting"])
def test_new_ranks_that_get_to_no_contender_fail_for_all_that_are_left(phase: str) -> None:
    lost = Failure(kind="crashed", message="rank 1 died", phase=phase, rank=1)
    overlap = dataclasses.replace(lost, phase="flat: warmup")
    found, asked = told((1, overlap), (-1, lost))
    assert found == {0: "ok", 1: "rank 1 died"} | dict.fromkeys((2, 3), "rank 1 died")
    assert asked == [[0, 1, 2, 3], [2, 3]]


def test_the_baseline_that_is_timed_around_a_contender_fails_as_that_contender() -> None:
    lost = Failure(kind="crashed", message="rank 1 died", phase="no communication: build", rank=1)
    found, asked = told((2, lost), (1, None))
    assert found == {0: "ok", 1: "ok", 2: "rank 1 died", 3: "ok"}
    assert asked == [[0, 1, 2, 3], [3]]


def test_what_a_contender_does_once_it_has_ended_is_no_failure_of_the_next() -> None:
    lost = Failure(kind="crashed", message="rank 1 died", phase="flat: communication alone", rank=1)
    found, asked = told((2, lost), (2, None))
    assert found == dict.fromkeys(range(4), "ok")
    assert asked == [[0, 1, 2, 3], [2, 3]]


def test_what_fails_once_all_have_ended_costs_no_contender() -> None:
    def late(request: Request, listener: Listener, timeout_s: float | None) -> Failure:
        Ranks({})(request, listener, timeout_s)
        return Failure(kind="crashed", message="rank 1 died", rank=1)

    found = measured(late)
    assert [cell.status for cell in found.values()] == ["ok"] * 4


def test_without_its_baseline_a_study_has_nothing_to_compare() -> None:
    ranks = Ranks({0: Failure(kind="crashed", message="rank 0 died", phase="starting")})
    found = measured(ranks)
    assert [found[number].failure for number in range(4)] == [ranks.failures[0]] * 4
    assert len(ranks.asked) == 1


def test_under_torchrun_nobody_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    ranks = Ranks({2: OUT_OF_MEMORY})
    found = measured(ranks)
    assert [found[number].status for number in range(4)] == ["ok", "ok", "out_of_memory", "out_of_memory"]
    assert found[3].failure is not None
    assert found[3].failure.message.startswith("not measured; the processes failed earlier in overlap: ")
    assert len(ranks.asked) == 1


def test_ranks_that_say_nothing_are_not_asked_for_ever() -> None:
    def silent(request: Request, listener: Listener, timeout_s: float | None) -> None:
        say(listener, "result")

    found = measured(silent)
    assert [cell.failure and cell.failure.message for cell in found.values()] == ["the processes gave no result"] * 4


class Others:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def host_gather(self, value: object) -> list[object]:
        if value is None:
            self.device.events.append("barrier")
        return [value]

    def all_reduce(self, tensor: Tensor, *, average: bool) -> Any:
        self.device.events.append("meet")
        return SimpleNamespace(wait=lambda: None)


def world_of(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: device.host_s))
    if device.asynchronous and clock.LONGEST_HOLD_S == 0.5:
        monkeypatch.setattr(clock, "LONGEST_HOLD_S", 1000)  # the device's seconds are whole ones
    return SimpleNamespace(device=device, collectives=Others(device))


def phases_of(device: FakeDevice, name: str, launch_s: float, work_s: float) -> list[Phase]:
    return [device.phase(f"{name} {phase}", [(launch_s, work_s)] * 20) for phase in ("forward", "backward")]


def test_a_slow_host_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    world = world_of(device, monkeypatch)
    quick, slow = phases_of(device, "quick", 1, 5), phases_of(device, "slow", 9, 6)
    turns = run_turns([quick, slow], device, world.collectives, 4, 2, lambda step: None)
    found = [samples for samples, _ in turns]
    assert [[samples.device_s for samples in phases] for phases in found] == [
        [(5,) * 4, (5,) * 4, (10,) * 4],
        [(6,) * 4, (6,) * 4, (12,) * 4],
    ]
    assert all(min(samples.lead_s or (0.0,)) > 0 for phases in found for samples in phases)
    assert [held_s for _, held_s in turns] == [1.5 * 2, 1.5 * 18]  # of Python's time per step


def test_a_step_in_which_python_stalled_is_made_again_after_a_longer_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    world = world_of(device, monkeypatch)
    stalls = device.phase("stalls", [(1, 0), (1, 0), (90, 0), (1, 0), (1, 0), (1, 0), (1, 0)])
    phases = [device.phase("works", [(1, 5)] * 9), stalls]
    ((samples, held_s),) = run_turns([phases], device, world.collectives, 4, 4, lambda step: None)
    assert samples[2].device_s == (5, 5, 5, 5)  # and not 91
    assert held_s == 1.5 * 91
    assert device.events.count("works") == 1 + 4 + 1


def test_what_other_ranks_say_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    world = world_of(device, monkeypatch)
    late = iter([True, False, False])

    def host_gather(mine: object) -> list[object]:
        return [mine, next(late) if isinstance(mine, bool) else 40.0]

    world.collectives.host_gather = host_gather
    ((samples, held_s),) = run_turns(
        [[device.phase("whole", [(1.0, 5)] * 9)]], device, world.collectives, 2, 2, lambda step: None
    )
    assert len(samples[0].best_s) == 2
    assert held_s == 60
    assert device.events.count("whole") == 1 + 2  # it was held for as long as the other rank needs already


def test_no_hold_is_longer_than_has_a_use(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    monkeypatch.setattr(clock, "LONGEST_HOLD_S", 4)

    def waits() -> None:
        device.host_s += 10
        device.synchronize()

    world = world_of(device, monkeypatch)
    ((_, held_s),) = run_turns([[Phase(name="whole", run=waits)]], device, world.collectives, 3, 3, lambda step: None)
    assert held_s == 4


def test_a_turn_begins_with_a_step_that_is_not_counted_and_each_step_with_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeDevice()
    found = run_turns(
        [phases_of(device, "a", 1, 5), phases_of(device, "b", 1, 5)],
        device,
        world_of(device, monkeypatch).collectives,
        2,
        1,
        lambda step: None,
    )
    assert [len(phases[0].best_s) for phases, _ in found] == [2, 2]
    begun = device.events.index("barrier")  # before, each is held once and the ranks meet: the first time takes long
    of_order = ("barrier", "hold", "meet", "a forward", "b forward")
    told = [event for event in device.events[begun:] if event in of_order]
    turn_of = {name: ["barrier", f"{name} forward", "hold", "meet", f"{name} forward"] for name in "ab"}
    assert told == turn_of["a"] + turn_of["b"] + turn_of["b"] + turn_of["a"]


def test_where_the_host_is_the_device_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(asynchronous=False)
    collectives = world_of(device, monkeypatch).collectives
    run_turns([phases_of(device, "a", 1, 5)], device, collectives, 2, 2, lambda step: None)
    assert not {"hold", "meet"} & set(device.events)


BASELINE = 20 * GIB


def left_behind(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[tuple[str, ...], int | None]:
    looks, clock = iter([*counts, *[counts[-1]] * 100]), iter(range(1000))
    held = [BASELINE]

    def free(self: Runner) -> int:
        held[0] = next(looks)
        return held[0]

    monkeypatch.setattr(Runner, "free", free)
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None))
    monkeypatch.setattr(runner, "allocated_bytes", lambda device: held[0])
    session: Any = object.__new__(ddp_session._Session)
    session.runner = object.__new__(Runner)
    session.runner.device, session.runner.idle_bytes = None, BASELINE
    return session._left_behind(), session.runner.idle_bytes


def test_what_is_let_go_of_a_little_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert left_behind([BASELINE + 7 * GIB, BASELINE + 5 * GIB, BASELINE], monkeypatch) == ((), BASELINE)


def test_what_stays_is_told_of_and_counts_as_held_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    (note,), held = left_behind([BASELINE + 7 * GIB], monkeypatch)
    assert note == "memory: 7.00 GiB were not freed after the variant was measured"
    assert held == BASELINE + 7 * GIB


OTHERS, OWN, SHARED = 5000, 40, 1000


def test_what_is_shared_is_other_until_gradients_lie_in_it() -> None:
    module = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(module.parameters())
    shared = torch.zeros(SHARED, dtype=torch.uint8)

    def held() -> StateMemory:
        counted = OTHERS + OWN + 4 * 16
        with mock.patch.object(ddp_session, "allocated_bytes", return_value=counted):
            return state_memory(
                "now", module, optimizer, open_device("cpu"), before_bytes=OTHERS, uncounted_bytes=SHARED
            )

    before = held()
    module.weight.grad = shared[:64].view(torch.float32).view(4, 4)
    after = held()
    assert [memory.allocated_bytes for memory in (before, after)] == [OWN + 64 + SHARED] * 2
    assert (before.gradients_bytes, before.other_bytes) == (0, OWN + SHARED)
    assert (after.gradients_bytes, after.other_bytes) == (SHARED, OWN)
