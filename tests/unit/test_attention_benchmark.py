import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.conversations import say, task_of
from tests.runs import ENVIRONMENT
from tests.sure import sure
from torch import Tensor

from steplab.lab.attention import attention_cells
from steplab.measurement import clock, runner
from steplab.measurement.attention import session as attention_session
from steplab.measurement.attention.error import Inputs, Reference
from steplab.measurement.attention.session import measure_attention
from steplab.measurement.attention.variant import make_attention, make_inputs
from steplab.measurement.jobs import CellsTask
from steplab.measurement.machine.device import Device
from steplab.measurement.observer import Observer
from steplab.measurement.processes.conversation import Listener
from steplab.measurement.processes.launch import measure_cells
from steplab.measurement.processes.wire import Request
from steplab.ops.attention.plain import plain_attention
from steplab.records.attention import AttentionCell
from steplab.records.environment import Environment
from steplab.records.failure import Failure
from steplab.records.timing import PhaseSamples
from steplab.specs.attention import AttentionSpec, AttentionStudy

CPU = Device(torch.device("cpu"))
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."
AttentionFn = Callable[..., Tensor]


class FakeClock(Device):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.time_s = 0.0
        self.marks = 0

    def mark(self) -> float:
        self.marks += 1
        return self.time_s

    def seconds_between(self, start: float, end: float) -> float:
        return end - start


@dataclass
class Bench:
    device: FakeClock = field(default_factory=FakeClock)
    results: dict[int, AttentionCell] = field(default_factory=dict)
    under_way: list[list[int]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    functions: dict[str, AttentionFn] = field(default_factory=dict)

    def make(self, spec: AttentionSpec) -> AttentionFn:
        return self.functions.get(spec.implementation) or self.lasting(spec.implementation, 1.0)

    def lasting(self, name: str, seconds: float) -> AttentionFn:
        def function(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
            self.calls.append(name)
            self.device.time_s += seconds
            return plain_attention(q, k, v, causal=causal)

        return function

    def run(self, study: AttentionStudy, groups: list[list[int]] | None = None) -> bool:
        environments: list[Environment] = []
        observer = Observer(
            on_environment=environments.append,
            on_under_way=lambda cells: self.under_way.append(list(cells)),
            on_cell=lambda index, cell: self.results.__setitem__(index, cell),
        )
        task = CellsTask(study=study, groups=groups or [list(range(len(study.cells)))])
        measure_attention(task, observer, make=self.make)
        return len(environments) == 2


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    found = Bench()
    monkeypatch.setattr(attention_session, "open_device", lambda name: found.device)
    monkeypatch.setattr(runner, "read_environment", lambda device: ENVIRONMENT)
    return found


def study_of(*implementations: str, **changes: Any) -> AttentionStudy:
    cells = tuple(
        AttentionSpec(queries=8, dim=4, causal=True, dtype="fp32", implementation=name) for name in implementations
    )
    values: dict[str, Any] = {"warmup_s": 0.0, "least_repeats": 4, "most_repeats": 4} | changes
    return AttentionStudy(name="test", cells=cells, **values)


def refusing(message: str = OUT_OF_MEMORY, *, when: Callable[[int], bool] = lambda call: True) -> AttentionFn:
    calls = 0

    def function(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        nonlocal calls
        calls += 1
        if when(calls):
            raise torch.OutOfMemoryError(message)
        return plain_attention(q, k, v, causal=causal)

    return function


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- the session ------------------------------------------------------------------------------------------


def test_each_pass_is_timed_as_long_as_its_implementation_takes(bench: Bench) -> None:
    bench.functions = {"plain": bench.lasting("plain", 3.0), "sdpa": bench.lasting("sdpa", 2.0)}
    assert bench.run(study_of("plain", "sdpa"))
    for index, seconds in ((0, 3.0), (1, 2.0)):
        cell = bench.results[index]
        assert cell.failure is None
        assert cell.samples("forward") == (seconds,) * 4
        assert cell.samples("both") == (seconds,) * 4
        assert cell.samples("backward") == (0.0,) * 4  # the fake's gradients take no time, and forward is not counted
    assert bench.results[0].interleaved == ("sdpa",)


def test_implementations_take_turns_and_each_is_the_first_in_its_turn(bench: Bench) -> None:
    names = ("plain", "sdpa", "flex")
    assert bench.run(study_of(*names, passes=("forward",), errors=False))
    rounds = [bench.calls[-12:][start : start + 3] for start in range(0, 12, 3)]
    assert rounds == [
        ["plain", "sdpa", "flex"],
        ["sdpa", "flex", "plain"],
        ["flex", "plain", "sdpa"],
        ["plain", "sdpa", "flex"],
    ]
    assert bench.results[0].samples("both") == ()
    assert bench.results[0].memory is not None
    assert bench.results[0].memory.saved_bytes is None


class Queue(FakeClock):
    flush_s, work_s = 1e-4, 3e-4

    def __init__(self) -> None:
        super().__init__()
        self.host_s, self.flushes = 0.0, 0

    def start(self, host_s: float, work_s: float) -> None:
        self.host_s += host_s
        self.time_s = max(self.time_s, self.host_s) + work_s

    def zero_(self) -> None:
        self.flushes += 1
        self.start(0.0, self.flush_s)

    def synchronize(self) -> None:
        self.host_s = max(self.host_s, self.time_s)

    def has_passed(self, mark: float) -> bool:
        return mark <= self.host_s


@pytest.fixture
def queue(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Queue:
    device = bench.device = Queue()
    monkeypatch.setattr(clock, "flush_buffer", lambda device: device)
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: device.host_s))
    return device


@pytest.mark.parametrize(
    ("start_s", "num_flushes", "waited_s"), [(2e-5, 1, 0.0), (9e-4, 14, 0.0), (9e-3, 40, 9e-3 - 40 * Queue.flush_s)]
)
def test_the_device_is_busy_until_python_has_started_the_pass_or_the_cell_says_that_it_was_not(
    bench: Bench, queue: Queue, monkeypatch: pytest.MonkeyPatch, start_s: float, num_flushes: int, waited_s: float
) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        queue.start(start_s, queue.work_s)
        return plain_attention(q, k, v, causal=causal)

    bench.functions = {"plain": function}
    before: list[int] = []
    monkeypatch.setattr(queue, "reserve_marks", lambda number: before.append(queue.flushes))
    assert bench.run(study_of("plain", passes=("forward",), errors=False))
    cell = bench.results[0]
    first, *others = cell.samples("forward")
    assert first == pytest.approx(queue.work_s + waited_s)
    # The host did not wait for the repeat before: what the device still had to do of it is a head start as well.
    assert others == pytest.approx([queue.work_s + max(waited_s - queue.work_s, 0)] * 3)
    assert queue.flushes - before[0] == 4 * num_flushes
    waits = "forward: in 4 of 4 repeats the device may have waited for Python"
    assert any(note.startswith(waits) for note in cell.notes) == (waited_s > 0)


def test_a_repeat_that_the_device_may_have_waited_in_is_made_again_with_more_to_do_before_it(
    bench: Bench, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python starts passes five times as slowly during timing as during warm-up."""
    start_s = [1e-4]

    def function(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        queue.start(start_s[0], queue.work_s)
        return plain_attention(q, k, v, causal=causal)

    def slower(number: int) -> None:
        start_s[0] *= 5

    bench.functions = {"plain": function}
    monkeypatch.setattr(queue, "reserve_marks", slower)
    assert bench.run(study_of("plain", passes=("forward",), errors=False))
    cell = bench.results[0]
    assert cell.samples("forward") == pytest.approx([queue.work_s] * 4)
    assert cell.notes == ()


def test_out_of_memory_in_forward_is_a_cell_and_the_others_go_on(bench: Bench) -> None:
    bench.functions = {"plain": refusing()}
    assert bench.run(study_of("plain", "sdpa"))
    failure = sure(bench.results[0].failure)
    assert (failure.kind, failure.phase, failure.requested_bytes) == ("out_of_memory", "forward", 2 * 1024**3)
    assert bench.results[0].passes == ()
    assert bench.results[1].failure is None
    assert bench.results[1].interleaved == ()


def test_what_runs_out_of_memory_in_backward_keeps_its_forward(bench: Bench) -> None:
    bench.functions = {"plain": refusing(when=lambda call: call == 3)}  # two of forward alone, and then one of both
    assert bench.run(study_of("plain", "sdpa"))
    cell = bench.results[0]
    assert sure(cell.failure).phase == "backward"
    assert len(cell.samples("forward")) == 4
    assert cell.samples("backward") == cell.samples("both") == ()


def test_a_failure_while_timing_takes_one_out_of_the_turns(bench: Bench) -> None:
    bench.functions = {"plain": refusing(when=lambda call: call > 12)}
    assert bench.run(study_of("plain", "sdpa", passes=("forward",), least_repeats=20, most_repeats=20, errors=False))
    assert bench.results[0].failure is not None
    assert bench.results[0].failure.phase == "forward"
    assert bench.results[0].samples("forward") == ()
    assert len(bench.results[1].samples("forward")) == 20


@pytest.mark.parametrize("failing", [1, 3, 9], ids=["forward", "backward", "while timing"])
def test_a_failure_holds_no_memory_when_the_device_is_looked_at(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    held: list[Any] = []

    def function(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        scores = q @ k.transpose(-2, -1)
        held.append(weakref.ref(scores))
        if len(held) == failing:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return plain_attention(q, k, v, causal=causal)

    bench.functions = {"plain": function}
    alive = lambda device: 10 * 1024**3 * any(ref() is not None for ref in held)  # noqa: E731
    monkeypatch.setattr(runner, "allocated_bytes", alive)
    assert bench.run(study_of("plain", "sdpa"))
    assert bench.results[0].status == "out_of_memory"
    assert bench.results[1].status == "ok"


def test_memory_that_stays_after_a_failure_asks_for_a_new_process(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [0]

    def function(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        held[0] = 10 * 1024**3
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    bench.functions = {"plain": function}
    monkeypatch.setattr(runner, "allocated_bytes", lambda device: held[0])
    assert not bench.run(study_of("plain", "sdpa"))
    assert bench.results[0].status == "out_of_memory"
    assert 1 not in bench.results


@pytest.mark.parametrize("failing", [1, 14], ids=["at its first call", "while others take turns"])
def test_a_device_that_answers_no_more_ends_the_process_and_names_only_who_is_known(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    calls, dead = [0], [False]

    def function(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        calls[0] += 1
        if calls[0] == failing:
            dead[0] = True
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return plain_attention(q, k, v, causal=causal)

    def synchronize() -> None:
        if dead[0]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    bench.functions = {"plain": function}
    monkeypatch.setattr(bench.device, "synchronize", synchronize)
    study = study_of("plain", "sdpa", passes=("forward",), least_repeats=20, most_repeats=20)
    if failing == 1:
        assert not bench.run(study)
        assert bench.results[0].status == "crashed"
        assert 1 not in bench.results
    else:
        with pytest.raises(RuntimeError, match="the device no longer answers"):
            bench.run(study)
        assert bench.results == {}
        assert bench.under_way[-1] == [0, 1]


def test_a_kernel_that_does_not_exist_and_any_other_error_are_told_apart(bench: Bench) -> None:
    def no_kernel(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        raise RuntimeError("No available kernel. Aborting execution.")

    def wrong(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        raise ValueError("sizes do not match")

    bench.functions = {"sdpa_flash": no_kernel, "flex": wrong}
    assert bench.run(study_of("sdpa_flash", "flex"))
    first, second = (bench.results[index].failure for index in (0, 1))
    assert first is not None
    assert second is not None
    assert first.message == "no kernel for 1×1×8×4 causal fp32 on cpu"
    assert second.message.startswith("ValueError: sizes do not match (test_attention_benchmark.py:")


def test_the_process_says_which_cells_are_under_way(bench: Bench) -> None:
    assert bench.run(study_of("plain", "sdpa", passes=("forward",)))
    assert bench.under_way == [[0, 1], [0], [1], [0], [1], [0, 1]]


def test_what_is_kept_for_backward_is_counted_to_the_byte(bench: Bench) -> None:
    assert bench.run(study_of("plain"))
    memory = sure(bench.results[0].memory)
    softmax, mask, output = 4 * 8 * 8, 8 * 8, 4 * 8 * 4
    assert memory.saved_bytes == softmax + mask + output
    assert memory.both_peak_bytes is None  # a CPU's allocator keeps no high-water mark


# --- errors -----------------------------------------------------------------------------------------------


def by_hand(spec: AttentionSpec, inputs: Inputs) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().double().requires_grad_() for tensor in inputs.leaves]
    repeats = spec.heads // spec.num_kv_heads
    k, v = (tensor.repeat_interleave(repeats, dim=1) for tensor in leaves[1:])
    output = plain_attention(leaves[0], k, v, causal=spec.causal)
    return output.detach(), *torch.autograd.grad(output, leaves, inputs.do.double())


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(batch=2, heads=3, queries=33, dim=8, dtype="fp32"),
        AttentionSpec(batch=2, heads=4, kv_heads=2, queries=17, keys=40, dim=8, causal=True, dtype="bf16"),
        AttentionSpec(heads=2, kv_heads=1, queries=40, keys=17, dim=5, causal=True, dtype="fp16"),
    ],
    ids=lambda spec: spec.label,
)
def test_the_reference_is_torchs_own_in_float64(spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steplab.measurement.attention.error._PIECE_BYTES", 8 * spec.num_keys * 7)  # seven queries
    inputs = make_inputs(spec, CPU, 0)
    reference = Reference(spec, inputs)
    assert reference.checked_heads == spec.batch * spec.heads
    output, *gradients = by_hand(spec, inputs)
    for error in reference.errors(output, tuple(gradients)):
        assert error.max_abs is not None
        assert error.max_abs < 1e-12
        assert error.relative is not None
        assert error.relative < 1e-12


def test_errors_are_those_of_a_result_that_is_wrong_by_so_much() -> None:
    spec = AttentionSpec(batch=2, heads=2, queries=9, dim=4, dtype="fp32")
    inputs = make_inputs(spec, CPU, 0)
    reference = Reference(spec, inputs)
    output, *gradients = by_hand(spec, inputs)
    wrong = output.clone()
    wrong[1, 1, 3, 2] += 0.5
    error, *others = reference.errors(wrong, tuple(gradients))
    assert error.tensor == "output"
    assert error.max_abs == pytest.approx(0.5)
    assert error.relative == pytest.approx(0.5 / float(output.norm()))
    assert all(other.max_abs == pytest.approx(0, abs=1e-12) for other in others)
    wrong[0, 0, 0, 0] = math.nan
    assert reference.errors(wrong, tuple(gradients))[0].max_abs is None


def test_plain_attention_is_as_far_away_as_it_says_of_itself() -> None:
    spec = AttentionSpec(heads=2, queries=64, dim=16, causal=True, dtype="bf16")
    inputs = make_inputs(spec, CPU, 0)
    reference = Reference(spec, inputs)
    reference.look_at_plain(spec, inputs)
    output = make_attention(spec)(inputs.q, inputs.k, inputs.v, causal=True)
    gradients = torch.autograd.grad(output, inputs.leaves, inputs.do)
    for error in reference.errors(output, gradients):
        assert error.relative is not None
        assert error.relative == pytest.approx(error.plain_relative, rel=0.3)  # head by head is another order of sums
        assert 1e-4 < error.relative < 2e-2


def test_where_all_heads_would_take_too_long_some_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AttentionSpec(batch=3, heads=4, queries=16, dim=4, dtype="fp32")
    inputs = make_inputs(spec, CPU, 0)
    monkeypatch.setattr("steplab.measurement.attention.error._MOST_SCORES", {"cpu": 5 * 16 * 16})
    reference = Reference(spec, inputs)
    assert reference.checked_heads == 5
    output, *gradients = by_hand(spec, inputs)
    output[0, 0] += 1  # the first head and the last are always among them
    assert reference.errors(output, tuple(gradients))[0].max_abs == pytest.approx(1)
    monkeypatch.setattr("steplab.measurement.attention.error._MOST_SCORES", {"cpu": 16 * 16 - 1})
    assert Reference(spec, inputs).checked_heads == 0


def test_what_float64_holds_while_others_are_tried_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AttentionSpec(batch=3, heads=4, kv_heads=2, queries=16, dim=4, dtype="fp32")
    group_bytes = 8 * 4 * (2 * 2 * 16 + 2 * 16)  # output and its like of two heads, two of one head of keys
    monkeypatch.setattr("steplab.measurement.attention.error._MOST_BYTES", 3 * group_bytes)
    reference = Reference(spec, make_inputs(spec, CPU, 0))
    assert (reference.checked_heads, reference.num_bytes) == (3 * 2, 3 * group_bytes)


# --- the processes ----------------------------------------------------------------------------------------

Script = Callable[[Request, Listener], Failure | None]


@dataclass
class Children:
    scripts: list[Script]
    asked: list[list[list[int]]] = field(default_factory=list)
    results: dict[int, AttentionCell] = field(default_factory=dict)

    def converse(self, request: Request, listener: Listener, timeout_s: float | None) -> Failure | None:
        self.asked.append(task_of(request).groups)
        return self.scripts.pop(0)(request, listener)

    def measure(self, study: AttentionStudy) -> None:
        measure_cells(
            attention_cells(study),
            on_cell=lambda index, cell: self.results.__setitem__(index, cell),
            converse=self.converse,
        )
        assert self.scripts == []


def measured(spec: AttentionSpec) -> AttentionCell:
    return AttentionCell(spec=spec, passes=(PhaseSamples(phase="forward", device_s=(1e-3,)),))


def ends_well(request: Request, listener: Listener) -> None:
    task = task_of(request)
    for index in task.numbers:
        say(listener, "cell", [index, measured(task.study.cells[index])])
    say(listener, "result")
    assert listener.answered


CRASH = Failure(kind="crashed", message="the process was ended by SIGSEGV", signal="SIGSEGV")


def two_shapes() -> AttentionStudy:
    return AttentionStudy(
        name="test",
        cells=tuple(
            AttentionSpec(queries=n, implementation=name) for n in (8, 16) for name in ("plain", "sdpa", "flex")
        ),
    )


def test_the_cell_under_way_is_to_blame_for_a_crash_and_the_rest_goes_on() -> None:
    def dies(request: Request, listener: Listener) -> Failure:
        say(listener, "at", [1])
        return CRASH

    children = Children([dies, ends_well])
    children.measure(two_shapes())
    assert children.asked[1] == [[0, 2], [3, 4, 5]]
    assert children.results[1].failure == CRASH
    assert all(children.results[index].failure is None for index in (0, 2, 3, 4, 5))


def test_where_several_took_turns_each_is_asked_by_itself() -> None:
    def dies_in_turns(request: Request, listener: Listener) -> Failure:
        say(listener, "at", [3, 4, 5])
        return CRASH

    def dies_again(request: Request, listener: Listener) -> Failure:
        say(listener, "at", [3])
        say(listener, "cell", [3, measured(two_shapes().cells[3])])
        say(listener, "at", [4])
        return CRASH

    def first_shape(request: Request, listener: Listener) -> Failure:
        for index in (0, 1, 2):
            say(listener, "cell", [index, measured(two_shapes().cells[index])])
        return dies_in_turns(request, listener)

    children = Children([first_shape, dies_again, ends_well])
    children.measure(two_shapes())
    assert children.asked[1:] == [[[3], [4], [5]], [[5]]]
    assert [index for index in range(6) if children.results[index].failure] == [4]


def test_a_process_that_asks_for_another_gets_one() -> None:
    def gives_up(request: Request, listener: Listener) -> None:
        say(listener, "cell", [0, AttentionCell(spec=two_shapes().cells[0], failure=CRASH)])
        say(listener, "result")

    children = Children([gives_up, ends_well])
    children.measure(two_shapes())
    assert children.asked[1] == [[1, 2], [3, 4, 5]]
