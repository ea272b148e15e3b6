"""Tuning flash_triton: processes that fail, candidates that are wrong, what is chosen, and the table."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from tests.runs import ENVIRONMENT
from tests.unit.worker_tasks import behave
from torch import Tensor

from steplab.errors import Unsupported, UserError
from steplab.lab.tuning import packaged_table, rows_text, table_before, table_with, with_choice
from steplab.measurement.attention import trial as attention_trial
from steplab.measurement.attention import tuning as attention_tuning
from steplab.measurement.attention import workers as under_test
from steplab.measurement.attention.trial import CheckTask, TimeTask, check, time_candidates
from steplab.measurement.attention.tuning import OnStep, Workers, tried, tune_attention
from steplab.measurement.attention.workers import Lost, in_workers
from steplab.measurement.machine.device import HostClockDevice
from steplab.measurement.observer import Observer
from steplab.ops.attention import triton_tuning
from steplab.ops.attention.triton_tensors import columns
from steplab.ops.attention.triton_tuning import Tiles, read_table
from steplab.records.attention_tuning import AttentionTuning, ChosenTiles, TileTrial
from steplab.report.attention.tuning import tuning_document, tuning_json, tuning_rows
from steplab.report.kit.rendering import render
from steplab.specs.attention import AttentionSpec
from steplab.specs.attention_tuning import (
    KERNELS,
    TileCandidate,
    TunedKernel,
    TuningStudy,
    box_of,
    candidates,
    timed_shapes,
)

EMPTY = AttentionTuning(study=TuningStudy(head_dims=(80, 128)), gpu="NVIDIA H200", environment=ENVIRONMENT)
SHORT, LONG = EMPTY.study.lengths
EMPTY_32 = dataclasses.replace(EMPTY, study=TuningStudy(head_dims=(80, 128), dtype="fp32"))


def tile(kernel: TunedKernel = "forward", stages: int = 2, **changes: object) -> TileCandidate:
    given: dict[str, object] = {"variant": "hopper", "box": 128, "queries": 128, "keys": 64} | changes
    return TileCandidate(kernel=kernel, stages=stages, **given)  # type: ignore[arg-type]


# --- processes ----------------------------------------------------------------------------------------------------


def test_a_task_that_fails_costs_nothing_but_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps to the time limit when only the task that hangs is left, so that no other comes near it."""
    done: list[int] = []
    tasks = ["a", "raise", "die", "hang", "b", "c"]
    limit_s = 3600.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + limit_s * (len(done) == len(tasks) - 1))
    monkeypatch.setattr(under_test, "time", clock)
    results = in_workers(behave, tasks, num_workers=2, timeout_s=limit_s, on_done=done.append)
    assert results[1:4] == [
        Lost("ValueError: no such tile"),
        Lost("its process ended with exit code 3"),
        Lost("did not end within 3600 s"),
    ]
    whole = [str(results[number]) for number in (0, 4, 5)]
    assert [text.partition(" by ")[0] for text in whole] == ["a", "b", "c"]
    assert done == [1, 2, 3, 4, 5, 6]


# --- candidates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [1, 16, 17, 64, 65, 80, 128, 129, 256])
def test_a_box_is_that_of_the_kernels(head_dim: int) -> None:
    assert box_of(head_dim) == columns(head_dim).box


@pytest.mark.parametrize("box", [16, 64, 128, 256])
@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize("bits", [16, 32])
def test_every_kernel_has_candidates_that_the_table_can_hold(box: int, hopper: bool, bits: int) -> None:
    found = candidates(box, bits=bits, hopper=hopper, portable=False)
    assert len(set(found)) == len(found)
    in_one_sweep = hopper and bits == 16 and box < 256
    assert {candidate.kernel for candidate in found} == ({"forward"} if in_one_sweep else set(KERNELS))
    for candidate in found:
        tiles = Tiles(gpu="any", **candidate.row())
        assert tiles.kernel == "forward" or tiles.queries <= triton_tuning.WIDEST_TILE
        assert tiles.bits == bits
        assert (hopper and bits == 16) or tiles.variant == "portable"
    more = candidates(box, bits=bits, hopper=hopper, portable=True)
    assert set(more) >= set(found)
    assert {c.kernel for c in more if c.variant == "portable"} == set(KERNELS)


def test_the_committed_tiles_of_32_bits_are_among_those_that_are_tried() -> None:
    rows = [row for row in read_table(packaged_table().read_text(encoding="utf-8")) if row.bits == 32]
    assert {row.box for row in rows} == {16, 32, 64, 128, 256}
    for row in rows:
        tried_there = candidates(row.box, bits=32, hopper=False, portable=False)
        assert row in [Tiles(gpu=row.gpu, tokens=row.tokens, **c.row()) for c in tried_there]


@pytest.mark.parametrize(
    ("box", "kernel", "queries", "keys", "warps"),
    [(128, "forward", 128, 64, 8), (128, "backward_kv", 32, 32, 4), (256, "forward", 64, 64, 8)]
    + [(256, kernel, 32, 32, 4) for kernel in ("backward_kv", "backward_q")],
)
def test_tiles_that_take_the_compiler_half_a_minute_are_not_tried(
    box: int, kernel: TunedKernel, queries: int, keys: int, warps: int
) -> None:
    """Triton 3.6 took 13 to 71 s for these, whose threads keep 5 to 17 KB each in memory."""
    tried_there = [(c.kernel, c.queries, c.keys, c.warps) for c in candidates(box, bits=32, hopper=True, portable=True)]
    assert (kernel, queries, keys, warps) not in tried_there


@pytest.mark.parametrize(
    ("head_dims", "said"), [((), "no head dimension"), ((64, 257), "256 for flash_triton, not 257")]
)
def test_head_dimensions_that_there_are_no_kernels_for_are_refused(head_dims: tuple[int, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        TuningStudy(head_dims=head_dims)


def test_a_study_from_before_there_was_a_choice_is_of_bf16() -> None:
    old = msgspec.json.decode(b'{"head_dims":[64],"portable":false,"device":"auto"}', type=TuningStudy)
    assert old == TuningStudy(head_dims=(64,), dtype="bf16")


# --- one candidate ------------------------------------------------------------------------------------------------

SMALL = AttentionSpec(batch=1, heads=2, queries=40, dim=16, causal=True, dtype="fp32")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs on the CPU alone")


def small(kernel: TunedKernel) -> CheckTask:
    candidate = next(c for c in candidates(16, bits=32, hopper=True, portable=False) if c.kernel == kernel)
    return CheckTask(device="cpu", candidate=candidate, shape=SMALL)


@without_gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_that_is_right_passes(kernel: TunedKernel) -> None:
    assert check(small(kernel)) == ""


@without_gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_of_float32_are_tried_with_ieee_products(kernel: TunedKernel) -> None:
    """TF32 would be a thousand times as far from float64."""
    torch.set_float32_matmul_precision("high")
    try:
        assert check(small(kernel)) == ""
    finally:
        torch.set_float32_matmul_precision("highest")


@without_gpu
def test_tiles_that_the_kernel_does_not_take_are_named() -> None:
    task = small("forward")
    odd = dataclasses.replace(task, candidate=dataclasses.replace(task.candidate, queries=24))
    assert "power of 2" in check(odd)


Launcher = Callable[..., Callable[[], tuple[Tensor, ...]]]


def spoilt(launcher: Launcher, spoil: Callable[[int, int, Tensor], Tensor]) -> Launcher:
    """The launcher, what it gives changed by `spoil`, which is told the run and the result's number."""

    def spoilt_launcher(*given: object) -> Callable[[], tuple[Tensor, ...]]:
        run, runs = launcher(*given), iter(range(10))

        def spoilt_run() -> tuple[Tensor, ...]:
            number = next(runs)
            return tuple(spoil(number, index, result) for index, result in enumerate(run()))

        return spoilt_run

    return spoilt_launcher


@without_gpu
@pytest.mark.parametrize(
    ("kernel", "spoil", "said"),
    [
        ("forward", lambda run, index, x: x if index else x * (1 + 2e-6), "error of output"),
        ("forward", lambda run, index, x: x + 1e-4 if index else x, "log-sum-exp"),
        ("forward", lambda run, index, x: x * math.nan if index else x, "other bits"),
        ("backward_kv", lambda run, index, x: x * (1 + 2e-6) if index else x, "error of values"),
        ("backward_kv", lambda run, index, x: x if index else x * math.inf, "other bits|keys not finite"),
        ("backward_q", lambda run, index, x: x * (1 + 1e-6 * run), "other bits"),
    ],
)
def test_a_kernel_that_is_wrong_is_named(
    kernel: TunedKernel, spoil: Callable[[int, int, Tensor], Tensor], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_trial, "launcher", spoilt(attention_trial.launcher, spoil))
    assert [part for part in said.split("|") if part in check(small(kernel))]


class FakeClock(HostClockDevice):
    """A device whose time passes as kernels say."""

    time_s = 0.0

    def mark(self) -> float:  # type: ignore[override]
        return self.time_s

    def seconds_between(self, start: float, end: float) -> float:
        return end - start


def test_candidates_take_turns_and_each_gets_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = FakeClock(torch.device("cpu")), list[int]()

    def launcher(candidate: TileCandidate, *rest: object) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            order.append(candidate.stages)
            clock.time_s += candidate.stages
            return ()

        return run

    monkeypatch.setattr(attention_trial, "open_device", lambda name: clock)
    monkeypatch.setattr(attention_trial, "launcher", launcher)
    three = tuple(tile(stages=stages) for stages in (2, 3, 4))
    times = time_candidates(TimeTask(device="cpu", candidates=three, shape=SMALL))
    repeats = len(times[0])
    assert times == [(float(stages),) * repeats for stages in (2, 3, 4)]
    turns = order[-3 * repeats :]
    assert [sorted(turns[i : i + 3]) for i in range(0, len(turns), 3)] == [[2, 3, 4]] * repeats
    assert {turns[i] for i in range(0, len(turns), 3)} == {2, 3, 4}  # who begins changes


def test_the_device_is_busy_until_python_has_started_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes four times as long to start it as one write over the cache keeps the device busy."""
    work_s, start_s, flush_s = 3.0, 4.0, 1.0

    class Queue(FakeClock):
        host_s = 0.0

        def has_passed(self, mark: float) -> bool:
            return mark <= self.host_s

        def synchronize(self) -> None:
            self.host_s = max(self.host_s, self.time_s)

        def zero_(self) -> None:
            self.time_s = max(self.time_s, self.host_s) + flush_s

    queue = Queue(torch.device("cpu"))

    def run() -> tuple[Tensor, ...]:
        queue.host_s += start_s
        queue.time_s = max(queue.time_s, queue.host_s) + work_s
        return ()

    monkeypatch.setattr(attention_trial, "open_device", lambda name: queue)
    monkeypatch.setattr(attention_trial, "_flush", lambda name: queue)
    monkeypatch.setattr(attention_trial, "launcher", lambda *given: run)
    (times,) = time_candidates(TimeTask(device="cpu", candidates=(tile(),), shape=SMALL))
    assert set(times) == {work_s}


# --- all of them --------------------------------------------------------------------------------------------------


def workers(
    wrong: Callable[[CheckTask], str | Lost], hangs: Callable[[TileCandidate, AttentionSpec], bool]
) -> tuple[Workers, list[TimeTask]]:
    """Processes that there are none of, and what they were given to time: a second a stage."""
    asked: list[TimeTask] = []

    def checked(tasks: Sequence[CheckTask], on_step: OnStep) -> list[str | Lost]:
        return [wrong(task) for task in tasks]

    def timed(tasks: Sequence[TimeTask], on_step: OnStep) -> list[list[tuple[float, ...]] | Lost]:
        asked.extend(tasks)
        return [
            Lost("did not end")
            if any(hangs(candidate, task.shape) for candidate in task.candidates)
            else [(float(candidate.stages),) * 3 for candidate in task.candidates]
            for task in tasks
        ]

    return Workers(checked, timed), asked


def test_candidates_that_fail_anywhere_are_dropped_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = [tile(kernel, stages) for kernel in KERNELS for stages in (2, 3, 4)]
    monkeypatch.setattr(attention_tuning, "candidates", lambda box, **which: offered)
    large, hanging = tile("forward", 4), tile("backward_q", 2)
    inside, asked = workers(
        lambda task: "out of shared memory" if task.candidate == large and task.shape.dim == 128 else "",
        lambda candidate, shape: candidate == hanging and shape.queries == LONG and not shape.causal,
    )
    stages: list[tuple[str, int]] = []
    found = tried(
        EMPTY,
        "cuda:0",
        hopper=True,
        on_stage=lambda stage, count: stages.append((stage, count)),
        on_step=lambda step: None,
        workers=inside,
    )
    assert {dropped.candidate: dropped.why for dropped in found.dropped} == {
        large: "head dimension 128, causal: out of shared memory",
        hanging: "head dimension 80, not causal: did not end",
    }
    left = [candidate for candidate in offered if candidate not in (large, hanging)]
    shapes = [shape for head_dim in (80, 128) for shape in timed_shapes(head_dim)]
    assert {(trial.candidate, trial.shape) for trial in found.trials} == {(c, s) for c in left for s in shapes}
    assert len(found.trials) == len(left) * len(shapes)
    assert all(large not in task.candidates for task in asked)
    # Those that hung, two shapes of a kernel with three candidates, were asked one by one.
    assert stages == [
        ("compiling tiles and checking them", 2 * 2 * 9),
        ("timing tiles", 2 * 4 * 3),
        ("timing tiles one by one", 2 * 3),
    ]
    assert {task.shape.dtype for task in asked} == {"bf16"}
    (forward,) = {t.flops for t in found.trials if t.shape == shapes[0] and t.candidate.kernel == "forward"}
    assert shapes[0].causal
    assert forward == 4 * shapes[0].batch * shapes[0].heads * SHORT**2 * 80 / 2


def test_float32_is_checked_and_timed_as_such_and_in_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, _ = workers(lambda task: "" if task.shape.dtype == "fp32" else "of another type", lambda *which: False)
    ignored = {"on_stage": lambda stage, count: None, "on_step": lambda step: None, "workers": inside}
    found = tried(EMPTY_32, "cuda:0", hopper=True, **ignored)  # type: ignore[arg-type]
    assert found.dropped == ()
    assert {trial.candidate for trial in found.trials} == set(candidates(128, bits=32, hopper=True, portable=False))
    assert {trial.shape.dtype for trial in found.trials} == {"fp32"}
    assert {trial.shape.queries for trial in found.trials} == set(EMPTY_32.study.lengths)
    # At a rate that spilling kernels reach, and with 12 calls of each, about a minute: 80 and 128 are the most work.
    assert 12 * sum(trial.flops for trial in found.trials) / 2e12 < 60


def test_without_a_gpu_there_is_nothing_to_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unsupported, match="kernels need CUDA"):
        tune_attention(TuningStudy(), Observer())


# --- what is chosen -----------------------------------------------------------------------------------------------


def tuning(times: dict[tuple[TunedKernel, int, int], tuple[float, float]]) -> AttentionTuning:
    """By kernel, stages and length, the times without and with a mask; the same for both head dimensions."""
    trials = tuple(
        TileTrial(candidate=tile(kernel, stages), shape=shape, device_s=(1e3, seconds, 0.0), flops=1e12)
        for (kernel, stages, tokens), (full_s, causal_s) in times.items()
        for head_dim in (80, 128)
        for shape in timed_shapes(head_dim)
        if shape.queries == tokens
        for seconds in ((causal_s if shape.causal else full_s),)
    )
    return with_choice(dataclasses.replace(EMPTY, trials=trials))


def test_one_row_serves_where_one_candidate_is_the_fastest_or_near_it() -> None:
    found = tuning(
        {
            ("forward", 2, SHORT): (1.00, 0.50),
            ("forward", 3, SHORT): (1.01, 0.50),  # within 2 %
            ("forward", 2, LONG): (10.0, 6.00),
            ("forward", 3, LONG): (9.00, 5.00),
        }
    )
    assert found.chosen == (ChosenTiles(candidate=tile("forward", 3)),)


def test_short_sequences_get_a_row_of_their_own_where_it_pays() -> None:
    found = tuning(
        {
            ("backward_q", 2, SHORT): (1.00, 0.50),
            ("backward_q", 3, SHORT): (1.10, 0.60),
            ("backward_q", 2, LONG): (10.0, 6.00),
            ("backward_q", 3, LONG): (9.00, 5.00),
        }
    )
    assert found.chosen == (
        ChosenTiles(candidate=tile("backward_q", 2), tokens=2048),
        ChosenTiles(candidate=tile("backward_q", 3)),
    )


def test_the_fastest_is_so_over_all_shapes_and_not_in_seconds() -> None:
    found = tuning(
        {
            ("forward", 2, SHORT): (1.0, 0.5),
            ("forward", 3, SHORT): (1.0, 0.5),
            ("forward", 2, LONG): (100.0, 2.0),  # the sum is greater, the mean of the ratios smaller
            ("forward", 3, LONG): (90.0, 3.0),
        }
    )
    assert found.slowdowns("forward", 128, LONG) == {
        tile("forward", 2): pytest.approx(math.sqrt(100 / 90)),
        tile("forward", 3): pytest.approx(math.sqrt(3 / 2)),
    }
    assert found.chosen == (ChosenTiles(candidate=tile("forward", 2)),)


TWO_ROWS = {
    ("forward", 2, SHORT): (1.0, 0.5),
    ("forward", 3, SHORT): (2.0, 1.0),
    ("forward", 2, LONG): (10.0, 5.0),
    ("forward", 3, LONG): (5.0, 2.5),
}


def test_rows_say_how_long_and_which_was_chosen() -> None:
    found = tuning(TWO_ROWS)  # type: ignore[arg-type]
    rows = [(r["tokens"], r["candidate"], r["slowdown"], r["result"]) for r in tuning_rows(found)]
    assert rows == [
        (SHORT, "hopper 128×64, 2 stages", 1.0, "chosen"),
        (SHORT, "hopper 128×64, 3 stages", 2.0, None),
        (LONG, "hopper 128×64, 3 stages", 1.0, "chosen"),
        (LONG, "hopper 128×64, 2 stages", 2.0, None),
    ]
    assert tuning_rows(found)[0]["time_s"] == pytest.approx(math.sqrt(0.5))
    assert tuning_rows(found)[0]["flops_per_s"] == pytest.approx(1e12 / math.sqrt(0.5))
    assert "chosen" in render(tuning_document(found), width=100)
    assert json.loads(tuning_json(found))["trials"][0]["device_s"] == [1000.0, 0.5, 0.0]


# --- the table ----------------------------------------------------------------------------------------------------


def test_what_is_written_is_what_the_kernels_read(monkeypatch: pytest.MonkeyPatch) -> None:
    before = table_before(packaged_table())
    text = table_with(tuning(TWO_ROWS), before)  # type: ignore[arg-type]
    mine = {"gpu": "NVIDIA H200", "bits": 16, "box": 128, "kernel": "forward"}
    kept = [row for row in read_table(before) if any(getattr(row, name) != value for name, value in mine.items())]
    short, long = read_table(text)[len(kept) :]
    assert list(read_table(text)[: len(kept)]) == kept
    assert short == Tiles(**tile("forward", 2).row(), gpu="NVIDIA H200", tokens=2048)
    assert long == Tiles(**tile("forward", 3).row(), gpu="NVIDIA H200")

    monkeypatch.setattr(triton_tuning, "table", lambda: read_table(text))
    monkeypatch.setattr(triton_tuning, "hopper_kernels_run", lambda: True)
    read: Any = triton_tuning._found.__wrapped__
    assert read("forward", "NVIDIA H200", (9, 0), 16, 128, 2048) == short
    assert read("forward", "NVIDIA H200", (9, 0), 16, 128, 2049) == long
    assert read("forward", "NVIDIA H100", (9, 0), 16, 128, 2048).gpu == "sm90"


def test_rows_of_32_bits_are_written_beside_those_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
    before = table_before(packaged_table())
    shorts, longs = timed_shapes(128, "fp32")[:2], timed_shapes(128, "fp32")[2:]
    narrow, wide = candidates(128, bits=32, hopper=True, portable=False)[:2]
    times = [(narrow, shorts, 1.0), (narrow, longs, 3.0), (wide, shorts, 2.0), (wide, longs, 2.0)]
    trials = tuple(
        TileTrial(candidate=candidate, shape=shape, device_s=(seconds,), flops=1e9)
        for candidate, shapes, seconds in times
        for shape in shapes
    )
    found = with_choice(dataclasses.replace(EMPTY_32, trials=trials))
    assert found.chosen == (ChosenTiles(candidate=narrow, tokens=2048), ChosenTiles(candidate=wide))
    assert [(row["tokens"], row["bits"], row["result"]) for row in tuning_rows(found)] == [
        (shorts[0].queries, 32, "chosen"),
        (shorts[0].queries, 32, None),
        (longs[0].queries, 32, "chosen"),
        (longs[0].queries, 32, None),
    ]
    assert "32 bits" in render(tuning_document(found), width=100)

    text = table_with(found, before)
    mine = "NVIDIA H200", 32, 128, "forward"
    others = [row for row in read_table(before) if (row.gpu, row.bits, row.box, row.kernel) != mine]
    assert list(read_table(text)[:-2]) == others
    monkeypatch.setattr(triton_tuning, "table", lambda: read_table(text))
    read: Any = triton_tuning._found.__wrapped__
    assert read("forward", "NVIDIA H200", (9, 0), 32, 128, 2049) == Tiles(**wide.row(), gpu="NVIDIA H200")
    assert read("forward", "NVIDIA H200", (9, 0), 32, 128, 2048).tokens == 2048
    assert read("forward", "NVIDIA H200", (9, 0), 16, 128, 2048).bits == 16


def test_tuning_again_changes_a_row_and_nothing_else() -> None:
    once = table_with(tuning(TWO_ROWS), table_before(packaged_table()))  # type: ignore[arg-type]
    assert table_with(tuning(TWO_ROWS), once) == once  # type: ignore[arg-type]
    slower = {key: (1.0, 1.0) if key[1] == 3 else (2.0, 2.0) for key in TWO_ROWS}
    again = table_with(tuning(slower), once)  # type: ignore[arg-type]
    old, new = ({row for row in read_table(text) if row.gpu == "NVIDIA H200"} for text in (once, again))
    assert [row.stages for row in new if (row.kernel, row.bits, row.box) == ("forward", 16, 128)] == [3]
    assert set(read_table(once)) - old == set(read_table(again)) - new


def test_a_table_without_new_rows_keeps_its_rows_and_its_head() -> None:
    text = packaged_table().read_text(encoding="utf-8")
    written = table_with(EMPTY, text)
    assert read_table(written) == read_table(text)
    assert written.splitlines()[0] == text.splitlines()[0]


def test_names_and_fields_survive_toml() -> None:
    row = {**tile(warps=8).row(), "gpu": 'the "µ" \\ card', "tokens": 2048}
    assert read_table(rows_text([row])) == (Tiles(**row),)


def test_a_file_that_is_no_table_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "tiles.toml"
    assert read_table(table_before(path))  # there is none yet: the package's
    for text in ("[project]", "[[tiles]]\nkernel = ", 'tiles = ["forward"]', '[[tiles]]\nkernel = "forward"\n'):
        path.write_text(text)
        with pytest.raises(UserError, match="is not a table of tiles"):
            table_before(path)
