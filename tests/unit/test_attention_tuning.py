import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from benchmarks import tile_trials, tune_attention
from benchmarks.tile_trials import CheckTask, TimeTask, check, time_candidates
from benchmarks.tune_attention import (
    KERNELS,
    LENGTHS,
    TABLE,
    Lost,
    Trial,
    box_of,
    candidates,
    chosen_of,
    in_processes,
    result_rows,
    slowdowns,
    table_with,
    timed_shapes,
    tried,
)
from tests.unit.worker_tasks import behave
from torch import Tensor

from steplab.measurement import clock
from steplab.measurement.machine.device import Device
from steplab.ops.attention import triton_tuning
from steplab.ops.attention.triton_tensors import columns
from steplab.ops.attention.triton_tuning import Kernel, Tiles, read_table
from steplab.specs.attention import AttentionSpec

SHORT, LONG = LENGTHS["bf16"]
H200 = "NVIDIA H200"
BEFORE = TABLE.read_text(encoding="utf-8")


def tile(kernel: Kernel = "forward", stages: int = 2, **changes: object) -> Tiles:
    given: dict[str, object] = {"variant": "hopper", "bits": 16, "box": 128, "queries": 128, "keys": 64} | changes
    return Tiles(kernel=kernel, gpu=H200, stages=stages, **given)  # type: ignore[arg-type]


# --- processes ----------------------------------------------------------------------------------------------------


@pytest.mark.release
def test_a_group_that_fails_costs_nothing_but_itself() -> None:
    groups = [["a", "b"], ["c", "raise"], ["die", "d"], ["e"]]
    both, raised, died, alone = in_processes(behave, groups, at_once=2)
    assert raised == Lost("ValueError: no such tile")
    assert died == Lost("its process ended with exit code 3")
    assert isinstance(both, list)
    assert isinstance(alone, list)
    assert [text.partition(" by ")[0] for text in both + alone] == ["a", "b", "e"]
    assert in_processes(behave, [["hang", "a"]], at_once=1, limit_s=0.05) == [Lost("did not end within 0.1 s")]


# --- candidates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [1, 16, 17, 64, 65, 80, 128, 129, 256])
def test_a_box_is_that_of_the_kernels(head_dim: int) -> None:
    assert box_of(head_dim) == columns(head_dim).box


@pytest.mark.parametrize("box", [16, 64, 128, 256])
@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize("bits", [16, 32])
def test_every_kernel_has_candidates_that_the_table_can_hold(box: int, hopper: bool, bits: int) -> None:
    found = candidates(H200, box, bits=bits, hopper=hopper, portable=False)
    assert len(set(found)) == len(found)
    in_one_sweep = hopper and bits == 16 and box < 256
    assert {candidate.kernel for candidate in found} == ({"forward"} if in_one_sweep else set(KERNELS))
    for candidate in found:
        assert candidate.kernel == "forward" or candidate.queries <= triton_tuning.WIDEST_TILE
        assert candidate.bits == bits
        assert (hopper and bits == 16) or candidate.variant == "portable"
    more = candidates(H200, box, bits=bits, hopper=hopper, portable=True)
    assert set(more) >= set(found)
    assert {c.kernel for c in more if c.variant == "portable"} == set(KERNELS)


def test_the_committed_tiles_of_32_bits_are_among_those_that_are_tried() -> None:
    rows = [row for row in read_table(BEFORE) if row.bits == 32]
    assert {row.box for row in rows} == {16, 32, 64, 128, 256}
    for row in rows:
        tried_there = candidates(row.gpu, row.box, bits=32, hopper=False, portable=False)
        assert dataclasses.replace(row, tokens=None) in tried_there


@pytest.mark.parametrize(
    ("box", "kernel", "queries", "keys", "warps"),
    [(128, "forward", 128, 64, 8), (128, "backward_kv", 32, 32, 4), (256, "forward", 64, 64, 8)]
    + [(256, kernel, 32, 32, 4) for kernel in ("backward_kv", "backward_q")],
)
def test_tiles_that_take_the_compiler_half_a_minute_are_not_tried(
    box: int, kernel: Kernel, queries: int, keys: int, warps: int
) -> None:
    """Triton 3.6 took 13 to 71 s for these, whose threads keep 5 to 17 KB in memory."""
    tried_there = candidates(H200, box, bits=32, hopper=True, portable=True)
    assert (kernel, queries, keys, warps) not in [(c.kernel, c.queries, c.keys, c.warps) for c in tried_there]


# --- one candidate ------------------------------------------------------------------------------------------------

SMALL = AttentionSpec(batch=1, heads=2, queries=40, dim=16, causal=True, dtype="fp32")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs on the CPU alone")


def small(kernel: Kernel) -> CheckTask:
    candidate = next(c for c in candidates(H200, 16, bits=32, hopper=True, portable=False) if c.kernel == kernel)
    return CheckTask(device="cpu", tiles=candidate, shape=SMALL)


@without_gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_that_is_right_passes(kernel: Kernel) -> None:
    assert check(small(kernel)) == ""


@without_gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_of_float32_are_tried_with_ieee_products(kernel: Kernel) -> None:
    """TF32 would be a thousand times as far from float64."""
    torch.set_float32_matmul_precision("high")
    try:
        assert check(small(kernel)) == ""
    finally:
        torch.set_float32_matmul_precision("highest")


@without_gpu
def test_tiles_that_the_kernel_does_not_take_are_named() -> None:
    task = small("forward")
    odd = dataclasses.replace(task, tiles=dataclasses.replace(task.tiles, queries=24))
    assert "power of 2" in check(odd)


Launcher = Callable[..., Callable[[], tuple[Tensor, ...]]]


def spoilt(launcher: Launcher, spoil: Callable[[int, int, Tensor], Tensor]) -> Launcher:
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
    kernel: Kernel, spoil: Callable[[int, int, Tensor], Tensor], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_trials, "launcher", spoilt(tile_trials.launcher, spoil))
    assert [part for part in said.split("|") if part in check(small(kernel))]


class FakeClock(Device):
    time_s = 0.0

    def mark(self) -> float:
        return self.time_s

    def seconds_between(self, start: float, end: float) -> float:
        return end - start


def test_candidates_take_turns_and_each_gets_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = FakeClock(torch.device("cpu")), list[int]()

    def launcher(tiles: Tiles, *rest: object) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            order.append(tiles.stages)
            clock.time_s += tiles.stages
            return ()

        return run

    monkeypatch.setattr(tile_trials, "open_device", lambda name: clock)
    monkeypatch.setattr(tile_trials, "launcher", launcher)
    three = tuple(tile(stages=stages) for stages in (2, 3, 4))
    times = time_candidates(TimeTask(device="cpu", candidates=three, shape=SMALL))
    rounds = len(times[0])
    assert times == [(float(stages),) * rounds for stages in (2, 3, 4)]
    turns = order[-3 * rounds :]
    assert [sorted(turns[i : i + 3]) for i in range(0, len(turns), 3)] == [[2, 3, 4]] * rounds
    assert {turns[i] for i in range(0, len(turns), 3)} == {2, 3, 4}  # who begins changes


def test_the_device_is_busy_until_python_has_started_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setattr(tile_trials, "open_device", lambda name: queue)
    monkeypatch.setattr(clock, "flush_buffer", lambda device: queue)
    monkeypatch.setattr(tile_trials, "launcher", lambda *given: run)
    (times,) = time_candidates(TimeTask(device="cpu", candidates=(tile(),), shape=SMALL))
    assert set(times) == {work_s}


# --- all of them --------------------------------------------------------------------------------------------------


def processes(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[CheckTask], str], hangs: Callable[[Tiles, AttentionSpec], bool]
) -> list[list[TimeTask]]:
    asked: list[list[TimeTask]] = []

    def answered(work: Callable[..., Any], groups: Sequence[Any], *, at_once: int) -> list[Any]:
        if work is check:
            return [[wrong(task) for task in group] for group in groups]
        assert at_once == 1
        asked.extend(groups)
        return [
            Lost("did not end")
            if any(hangs(tiles, task.shape) for task in group for tiles in task.candidates)
            else [[(float(tiles.stages),) * 3 for tiles in task.candidates] for task in group]
            for group in groups
        ]

    monkeypatch.setattr(tune_attention, "in_processes", answered)
    return asked


def test_candidates_that_fail_anywhere_are_dropped_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = [tile(kernel, stages) for kernel in KERNELS for stages in (2, 3, 4)]
    large, hanging = tile("forward", 4), tile("backward_q", 2)
    asked = processes(
        monkeypatch,
        lambda task: "out of shared memory" if task.tiles == large and task.shape.dim == 128 else "",
        lambda tiles, shape: tiles == hanging and shape.queries == LONG and not shape.causal,
    )
    trials, dropped = tried(offered, (80, 128), "bf16", "cuda:0")
    assert dropped == {large: "head dimension 128, causal: out of shared memory", hanging: "did not end"}
    left = [tiles for tiles in offered if tiles not in dropped]
    shapes = [shape for head_dim in (80, 128) for shape in timed_shapes(head_dim)]
    assert {(trial.tiles, trial.shape) for trial in trials} == {(c, s) for c in left for s in shapes}
    assert len(trials) == len(left) * len(shapes)
    # Those that hung are asked one by one.
    right = [[tiles for tiles in offered if tiles.kernel == kernel and tiles != large] for kernel in KERNELS]
    assert [list(group[0].candidates) for group in asked] == [*right, *([tiles] for tiles in right[2])]
    assert all([task.shape for task in group] == shapes for group in asked)
    (forward,) = {t.flops for t in trials if t.shape == shapes[0] and t.tiles.kernel == "forward"}
    assert shapes[0].causal
    assert forward == 4 * shapes[0].batch * shapes[0].heads * SHORT**2 * 80 / 2
    *timed, failed, hung = result_rows(trials, dropped, chosen_of(trials))
    assert len(timed) == len(left) * 2
    assert (failed["candidate"], failed["result"]) == ("hopper 128×64, 4 stages", dropped[large])
    assert (hung["kernel"], hung["result"]) == ("backward_q", "did not end")


def test_float32_is_checked_and_timed_as_such_and_in_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    processes(monkeypatch, lambda task: "" if task.shape.dtype == "fp32" else "of another type", lambda *which: False)
    offered = candidates(H200, 128, bits=32, hopper=True, portable=False)
    trials, dropped = tried(offered, (80, 128), "fp32", "cuda:0")
    assert dropped == {}
    assert {trial.tiles for trial in trials} == set(offered)
    assert {trial.shape.dtype for trial in trials} == {"fp32"}
    assert {trial.shape.queries for trial in trials} == set(LENGTHS["fp32"])
    # At a rate that spilling kernels reach, and with 12 calls of each, about a minute: 80 and 128 are the most work.
    assert 12 * sum(trial.flops for trial in trials) / 2e12 < 60


# --- what is chosen -----------------------------------------------------------------------------------------------

Times = dict[tuple[Kernel, int, int], tuple[float, float]]


def tuning(times: Times) -> list[Trial]:
    return [
        Trial(tile(kernel, stages), shape, (1e3, seconds, 0.0))
        for (kernel, stages, tokens), (full_s, causal_s) in times.items()
        for head_dim in (80, 128)
        for shape in timed_shapes(head_dim)
        if shape.queries == tokens
        for seconds in ((causal_s if shape.causal else full_s),)
    ]


def test_one_row_serves_where_one_candidate_is_the_fastest_or_near_it() -> None:
    found = tuning(
        {
            ("forward", 2, SHORT): (1.00, 0.50),
            ("forward", 3, SHORT): (1.01, 0.50),  # within 2 %
            ("forward", 2, LONG): (10.0, 6.00),
            ("forward", 3, LONG): (9.00, 5.00),
        }
    )
    assert chosen_of(found) == [tile("forward", 3)]


def test_short_sequences_get_a_row_of_their_own_where_it_pays() -> None:
    found = tuning(
        {
            ("backward_q", 2, SHORT): (1.00, 0.50),
            ("backward_q", 3, SHORT): (1.10, 0.60),
            ("backward_q", 2, LONG): (10.0, 6.00),
            ("backward_q", 3, LONG): (9.00, 5.00),
        }
    )
    assert chosen_of(found) == [tile("backward_q", 2, tokens=2048), tile("backward_q", 3)]


def test_the_fastest_is_so_over_all_shapes_and_not_in_seconds() -> None:
    found = tuning(
        {
            ("forward", 2, SHORT): (1.0, 0.5),
            ("forward", 3, SHORT): (1.0, 0.5),
            ("forward", 2, LONG): (100.0, 2.0),  # the sum is greater, the mean of the ratios smaller
            ("forward", 3, LONG): (90.0, 3.0),
        }
    )
    assert slowdowns([trial for trial in found if trial.shape.queries == LONG]) == {
        tile("forward", 2): pytest.approx(math.sqrt(100 / 90)),
        tile("forward", 3): pytest.approx(math.sqrt(3 / 2)),
    }
    assert chosen_of(found) == [tile("forward", 2)]


TWO_ROWS: Times = {
    ("forward", 2, SHORT): (1.0, 0.5),
    ("forward", 3, SHORT): (2.0, 1.0),
    ("forward", 2, LONG): (10.0, 5.0),
    ("forward", 3, LONG): (5.0, 2.5),
}


def test_rows_say_how_long_and_which_was_chosen() -> None:
    found = tuning(TWO_ROWS)
    rows = list(result_rows(found, {}, chosen_of(found)))
    assert [(row["tokens"], row["candidate"], row["slowdown"], row["result"]) for row in rows] == [
        (SHORT, "hopper 128×64, 2 stages", 1.0, "chosen"),
        (SHORT, "hopper 128×64, 3 stages", 2.0, ""),
        (LONG, "hopper 128×64, 3 stages", 1.0, "chosen"),
        (LONG, "hopper 128×64, 2 stages", 2.0, ""),
    ]
    assert rows[0]["time_s"] == pytest.approx(math.sqrt(0.5))
    # Two products of 2 B H S² D each, half of it with a mask, and twice the time without: at one rate for a dimension.
    rates = [4.0 * 65_536 * 4 * SHORT * head_dim for head_dim in (80, 128)]
    assert rows[0]["flops_per_s"] == pytest.approx(math.sqrt(rates[0] * rates[1]))


# --- the table ----------------------------------------------------------------------------------------------------


def test_what_is_written_is_what_the_kernels_read(monkeypatch: pytest.MonkeyPatch) -> None:
    text = table_with(chosen_of(tuning(TWO_ROWS)), BEFORE)
    mine = {"gpu": H200, "bits": 16, "box": 128, "kernel": "forward"}
    kept = [row for row in read_table(BEFORE) if any(getattr(row, name) != value for name, value in mine.items())]
    short, long = read_table(text)[len(kept) :]
    assert list(read_table(text)[: len(kept)]) == kept
    assert short == tile("forward", 2, tokens=2048)
    assert long == tile("forward", 3)

    monkeypatch.setattr(triton_tuning, "table", lambda: read_table(text))
    read: Any = triton_tuning._found.__wrapped__
    assert read("forward", H200, (9, 0), True, 16, 128, 2048) == short
    assert read("forward", H200, (9, 0), True, 16, 128, 2049) == long
    assert read("forward", "NVIDIA H100", (9, 0), True, 16, 128, 2048).gpu == "sm90"


def test_a_table_without_new_rows_is_the_committed_one() -> None:
    assert table_with([], BEFORE) == BEFORE


def test_names_and_fields_survive_toml() -> None:
    row = dataclasses.replace(tile(warps=8, tokens=2048), gpu='the "µ" \\ card')
    assert read_table(table_with([row], BEFORE))[-1] == row


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["tune_attention"])
    with pytest.raises(SystemExit):
        tune_attention.main()
    assert "flash_triton's kernels need CUDA" in capsys.readouterr().err
