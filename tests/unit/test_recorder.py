import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.rendering import run_text
from tests.sure import sure

from steplab.errors import SteplabError, UserError
from steplab.lab.recording import recorder
from steplab.measurement.recorder import Recorder
from steplab.records.rows import run_row
from steplab.records.run import Run
from steplab.records.timing import PhaseSamples, find_phase
from steplab.store.database import Store


class Clock:
    def __init__(self) -> None:
        self.ns = 10**12

    def spend(self, milliseconds: int) -> None:
        self.ns += milliseconds * 10**6


Record = Callable[..., AbstractContextManager[Recorder]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    time = SimpleNamespace(perf_counter_ns=lambda: made.ns, perf_counter=lambda: made.ns / 10**9)
    monkeypatch.setattr("steplab.measurement.machine.device.time", time)
    return made


@pytest.fixture
def record(tmp_path: Path) -> Record:
    def start(name: str = "mine", **options: Any) -> AbstractContextManager[Recorder]:
        return recorder(name, device="cpu", store=tmp_path / "store.db", **options)

    return start


@pytest.fixture
def stored(tmp_path: Path) -> Callable[[], list[Run]]:
    def read() -> list[Run]:
        with Store.open(tmp_path / "store.db", write=False) as store:
            return [run for run in store.iterate(kind="run") if isinstance(run, Run)]

    return read


Stored = Callable[[], list[Run]]


def samples(phases: tuple[PhaseSamples, ...], name: str) -> tuple[float, ...]:
    found = sure(find_phase(phases, name))
    return found.best_s


def test_steps_are_timed_and_those_of_the_warm_up_kept_apart(clock: Clock, record: Record, stored: Stored) -> None:
    with record(warmup=2, tokens_per_step=4096) as rec:
        for milliseconds in (90, 30, 11, 13, 17):
            with rec.step():
                clock.spend(milliseconds)
            clock.spend(1000)  # between the steps: not of any
    run = stored()[0]
    assert rec.run == run
    assert run.timing is not None
    assert samples(run.timing.warmup, "step") == (0.09, 0.03)
    assert samples(run.timing.back_to_back, "step") == (0.011, 0.013, 0.017)
    row = run_row(run)
    assert row["step_time_s"] == statistics.median([0.011, 0.013, 0.017])
    assert row["tokens_per_s"] == 4096 / 0.013
    assert (run.name, run.spec, run.failure, run.status) == ("mine", None, None, "ok")
    assert sure(run.environment).device.kind == "cpu"


def test_a_phase_that_occurs_several_times_in_a_step_is_summed(clock: Clock, record: Record, stored: Stored) -> None:
    with record(warmup=0) as rec:
        for first, second in ((2, 3), (4, 8)):
            with rec.step():
                with rec.phase("forward"):
                    clock.spend(first)
                with rec.phase("load batch"):
                    clock.spend(100)
                with rec.phase("forward"):
                    clock.spend(second)
    timing = sure(stored()[0].timing)
    assert samples(timing.back_to_back, "forward") == (0.002 + 0.003, 0.004 + 0.008)
    assert samples(timing.back_to_back, "load batch") == (0.1, 0.1)
    assert samples(timing.back_to_back, "step") == (0.105, 0.112)


def test_a_phase_of_a_taken_name_ends_no_training(clock: Clock, record: Record, stored: Stored) -> None:
    with record(warmup=0) as rec, rec.step(), rec.phase("step"):
        clock.spend(1)
    timing = sure(stored()[0].timing)
    assert samples(timing.back_to_back, "step (phase)") == (0.001,)


def test_phases_may_lie_within_one_another(clock: Clock, record: Record, stored: Stored) -> None:
    with record(warmup=0) as rec, rec.step(), rec.phase("outer"):
        clock.spend(1)
        with rec.phase("inner"):
            clock.spend(2)
    timing = sure(stored()[0].timing)
    assert samples(timing.back_to_back, "outer") == (0.003,)
    assert samples(timing.back_to_back, "inner") == (0.002,)


def test_a_phase_that_not_every_step_has_has_as_many_samples_as_it_occurred(
    clock: Clock, record: Record, stored: Stored
) -> None:
    with record(warmup=0) as rec:
        for iteration in range(3):
            with rec.step():
                clock.spend(1)
                if iteration == 1:
                    with rec.phase("evaluate"):
                        clock.spend(5)
    timing = sure(stored()[0].timing)
    assert samples(timing.back_to_back, "evaluate") == (0.005,)
    assert len(samples(timing.back_to_back, "step")) == 3


# --- loops that end badly ---------------------------------------------------------------------------------


@pytest.mark.parametrize("raised", [ValueError, MemoryError, KeyboardInterrupt, SystemExit])
def test_a_loop_that_raises_is_stored_with_what_it_had_measured(
    clock: Clock, record: Record, stored: Stored, raised: type[BaseException]
) -> None:
    error = raised("diverged")

    def loop() -> None:
        with record(warmup=1) as rec:
            for iteration in range(5):
                with rec.step():
                    clock.spend(10)
                    if iteration == 3:
                        raise error

    with pytest.raises(raised) as caught:
        loop()
    assert caught.value is error
    run = stored()[0]
    assert run.failure is not None
    assert run.failure.kind == "error"
    assert raised.__name__ in run.failure.message
    assert "diverged" in run.failure.message
    assert run.timing is not None
    assert samples(run.timing.warmup, "step") == (0.01,)
    assert samples(run.timing.back_to_back, "step") == (0.01, 0.01)


def test_the_message_of_a_failure_is_one_line(clock: Clock, record: Record, stored: Stored) -> None:
    with pytest.raises(RuntimeError), record():
        raise RuntimeError("first\nsecond\nthird")
    failure = sure(stored()[0].failure)
    (line,) = failure.message.splitlines()
    assert line.startswith("RuntimeError: first (test_recorder.py:")


def test_a_step_that_raises_is_not_counted_and_the_loop_may_go_on(clock: Clock, record: Record, stored: Stored) -> None:
    with record(warmup=0) as rec:
        for milliseconds in (10, 20, 30):
            try:
                with rec.step():
                    clock.spend(milliseconds)
                    if milliseconds == 20:
                        raise ValueError("a bad batch")
            except ValueError:
                continue
    run = stored()[0]
    assert run.failure is None
    assert samples(sure(run.timing).back_to_back, "step") == (0.01, 0.03)


# --- misuse -----------------------------------------------------------------------------------------------


def nested_steps(rec: Recorder) -> Iterator[None]:
    with rec.step(), rec.step():
        yield


def phase_outside(rec: Recorder) -> Iterator[None]:
    with rec.phase("forward"):
        yield


@pytest.mark.parametrize(("misuse", "said"), [(nested_steps, "inside another step"), (phase_outside, "outside a step")])
def test_steps_and_phases_out_of_place_are_refused_with_the_fix(
    record: Record, misuse: Callable[[Recorder], Iterator[None]], said: str
) -> None:
    with pytest.raises(UserError, match=said), record() as rec:
        next(misuse(rec))


def test_a_refused_step_leaves_the_recorder_usable(clock: Clock, record: Record, stored: Stored) -> None:
    with record(warmup=0) as rec:
        with pytest.raises(UserError), rec.step(), rec.step():
            pass
        with rec.step():
            clock.spend(5)
    timing = sure(stored()[0].timing)
    assert samples(timing.back_to_back, "step") == (0.005,)


@pytest.mark.parametrize(("steps", "warmup"), [(0, 5), (3, 5), (5, 5)])
def test_a_loop_no_longer_than_its_warm_up_is_noted_and_has_no_step_time(
    clock: Clock, record: Record, stored: Stored, steps: int, warmup: int
) -> None:
    with warnings.catch_warnings(record=True) as told, record(warmup=warmup) as rec:
        for _ in range(steps):
            with rec.step():
                clock.spend(1)
    run = stored()[0]
    note = next(note for note in run.notes if note.startswith("step time"))
    (warned,) = told
    assert str(warned.message).endswith(note)
    assert warned.filename == __file__
    assert ("warm-up" if steps else "rec.step()") in note
    assert f"{steps} steps" in note
    assert steps >= warmup or f"{warmup} of them" not in note  # of three steps, five cannot be anything
    assert run_row(run)["step_time_s"] is None
    assert run_row(run)["tokens_per_s"] is None


def test_a_loop_longer_than_its_warm_up_needs_no_such_note(clock: Clock, record: Record, stored: Stored) -> None:
    with record(warmup=0) as rec, rec.step():
        clock.spend(1)
    assert not [note for note in stored()[0].notes if note.startswith("step time")]


def test_what_cannot_be_known_is_noted(record: Record, stored: Stored) -> None:
    with record():
        pass
    notes = stored()[0].notes
    assert any(note.startswith("MFU") for note in notes)
    assert any(note.startswith("peak device memory") for note in notes)


def test_a_loop_that_tells_its_flops_has_an_mfu(clock: Clock, record: Record, stored: Stored) -> None:
    with record(warmup=0, flops_per_step=3e9, precision="bf16") as rec, rec.step():
        clock.spend(10)
    (mfu,) = stored()[0].utilizations
    assert (mfu.flops, mfu.dtype) == (3e9, "bf16")
    assert not any("give the recorder flops_per_step" in note for note in stored()[0].notes)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"flops_per_step": 3e9}, "needs precision"),
        ({"flops_per_step": 0, "precision": "bf16"}, r"from 1 to below 1e\+30, not 0"),
        ({"flops_per_step": float("nan"), "precision": "bf16"}, r"from 1 to below 1e\+30, not nan"),
        ({"precision": "bfloat16"}, "precision 'bfloat16' is not known; choose one of fp32"),
    ],
)
def test_flops_that_make_no_mfu_are_refused(options: dict[str, object], told: str, record: Record) -> None:
    with pytest.raises(UserError, match=told), record(**options):
        pass


def test_a_negative_warm_up_is_refused(record: Record) -> None:
    with pytest.raises(UserError, match=r"warmup must be a whole number from 0 to below .*, not -1"), record(warmup=-1):
        pass


def test_a_store_that_cannot_be_written_is_refused_before_the_loop_begins(tmp_path: Path) -> None:
    (tmp_path / "folder.db").mkdir()
    began = False
    with pytest.raises(SteplabError), recorder("mine", device="cpu", store=tmp_path / "folder.db"):
        began = True
    assert not began


@pytest.mark.parametrize("device", [torch.device("cpu", 0), torch.device("cpu"), "cpu"])
def test_a_device_of_torch_is_taken(tmp_path: Path, device: torch.device | str) -> None:
    with recorder("mine", device=device, store=tmp_path / "s.db") as rec, rec.step():
        pass
    assert rec.run is not None
    assert sure(rec.run.environment).device.kind == "cpu"


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="device cuda:99"), recorder("mine", device="cuda:99", store=tmp_path / "s.db"):
        pass


# --- a part of the loop -----------------------------------------------------------------------------------


def test_the_time_between_steps_is_kept_apart_from_the_steps(clock: Clock, record: Record, stored: Stored) -> None:
    with record(warmup=1) as rec:
        for milliseconds in (1, 2, 3, 4):
            with rec.step():
                clock.spend(10)
            clock.spend(milliseconds)
    run = stored()[0]
    assert sure(run.timing).between_s == (0.002, 0.003)
    assert "between steps 2.50 ms, median from the end" in " ".join(run_text(run, width=100).split())


def test_recording_ends_after_the_steps_that_were_asked_for(clock: Clock, record: Record, stored: Stored) -> None:
    with record(warmup=1, steps=2) as rec:
        complete = []
        for milliseconds in (1, 2, 3, 4):
            with rec.step(), rec.phase("forward"):
                clock.spend(milliseconds)
            complete.append(rec.is_complete)
    assert complete == [False, False, True, True]
    timing = sure(stored()[0].timing)
    assert samples(timing.back_to_back, "step") == samples(timing.back_to_back, "forward") == (0.002, 0.003)


def train(rec: Recorder, clock: Clock, num_steps: int) -> list[bool]:
    layer = torch.nn.Linear(4, 4)
    complete = []
    for number in range(num_steps):
        with rec.step():
            clock.spend(10 + number)
            with rec.phase("forward"):
                loss = layer(torch.ones(2, 4)).sum()
            with rec.phase("backward"):
                loss.backward()
        complete.append(rec.is_complete)
    return complete


def test_the_steps_that_were_asked_for_are_profiled_and_not_timed(clock: Clock, record: Record, stored: Stored) -> None:
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(4, 4)})
    with record(warmup=1, steps=3, profile=range(3, 5), model=model) as rec:
        for number in range(7):
            with rec.step():
                clock.spend(10 + number)
                with rec.phase("forward"):
                    loss = model["head"](torch.ones(2, 4)).sum()
                with rec.phase("backward"):
                    loss.backward()
    run = stored()[0]
    assert run.timing is not None
    assert samples(run.timing.back_to_back, "step") == (0.011, 0.015, 0.016)  # step 2 runs under the profiler too
    assert run.timing.between_s == (0.0,)  # from step 5 to step 6: the others have no timed neighbour
    assert run.profile is not None
    assert run.profile.num_steps == 2
    products = [kernel for kernel in run.profile.kernels if kernel.name == "aten::addmm"]
    assert [(kernel.phase, kernel.range, kernel.calls) for kernel in products] == [("forward", "head", 2)]
    assert not [note for note in run.notes if note.startswith("profile")]


def test_a_profile_that_the_loop_does_not_reach_is_noted(clock: Clock, record: Record, stored: Stored) -> None:
    with record(warmup=0, profile=range(2, 9)) as rec:
        assert train(rec, clock, 4) == [False] * 4
    run = stored()[0]
    assert run.profile is None
    assert "profile: the loop ended after 4 steps, before the last to profile, 8" in run.notes
    assert len(samples(sure(run.timing).back_to_back, "step")) == 1


def test_a_profiler_that_cannot_start_costs_the_loop_nothing(
    clock: Clock, record: Record, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**options: object) -> None:
        raise RuntimeError("Profiler is already enabled on this thread")

    monkeypatch.setattr("steplab.measurement.recorder.profile.__enter__", refuse)
    with record(warmup=0, steps=2, profile=range(2, 3)) as rec:
        assert train(rec, clock, 5) == [False, False, False, True, True]  # at the same step as on other ranks
    run = stored()[0]
    assert run.profile is None
    assert [note for note in run.notes if note.startswith("profile: ")]
    assert run.failure is None


@pytest.mark.parametrize("steps", [range(3), range(5, 5), range(2, 8, 2)])
def test_steps_that_cannot_be_profiled_are_refused(record: Record, steps: range) -> None:
    with pytest.raises(UserError, match="consecutive steps after the first"), record(profile=steps):
        pass


def test_no_steps_at_all_are_refused(record: Record) -> None:
    with pytest.raises(UserError, match=r"steps must be a whole number from 1 to below .*, not 0"), record(steps=0):
        pass


def test_memory_that_was_refused_is_told_as_such(record: Record, stored: Stored) -> None:
    with pytest.raises(RuntimeError), record() as rec, rec.step():
        torch.empty(2**60)
    failure = sure(stored()[0].failure)
    assert (failure.kind, failure.requested_bytes) == ("out_of_memory", 2**62)


def test_ranks_without_a_process_group_are_refused(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"after torch\.distributed\.init_process_group"), record():
        pass
