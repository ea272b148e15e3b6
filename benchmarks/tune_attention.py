"""Finds the fastest tiles of flash_triton on this machine's GPU, and writes its rows of the tiles table.

    python -m benchmarks.tune_attention > candidates.csv               (from the root of the checkout)
    python -m benchmarks.tune_attention --dim 32,64,128 --dtype fp32 > candidates.csv

It changes src/steplab/ops/attention/triton_tiles.toml, or the copy in `--table`: it replaces this GPU's rows for the
tuned kernels, boxes and bits. It prints a row per candidate and sequence length. bf16's tiles also serve fp16.
`--portable` also tries portable kernels on a Hopper GPU.

A separate process compiles each candidate and compares it with float64 (tile_trials), so a hang or a broken device
costs no other. Compiling uses all cores. Triton caches compiled kernels on disk for the process that then times a
kernel's candidates alternately, alone on the GPU.
"""

import argparse
import csv
import dataclasses
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import geometric_mean, median
from typing import Literal, TypeVar, get_args

import torch
from benchmarks.tile_trials import CheckTask, TimeTask, check, time_candidates

from steplab.ops.attention.implementations import implementation
from steplab.ops.attention.triton_tuning import Kernel, Tiles, hopper_kernels_on, read_table
from steplab.specs.attention import AttentionSpec

TABLE = Path(__file__).parents[1] / "src" / "steplab" / "ops" / "attention" / "triton_tiles.toml"
KERNELS: tuple[Kernel, ...] = ("forward", "backward_kv", "backward_q")
"""forward: the forward pass. backward_kv: the backward sweep for dK and dV. backward_q: the sweep for dQ."""
Dtype = Literal["bf16", "fp32"]
LENGTHS: dict[Dtype, tuple[int, int]] = {"bf16": (1024, 8192), "fp32": (1024, 4096)}
"""Tokens of the short and long sequences to time."""
TOKENS_OF_ALL: dict[Dtype, int] = {"bf16": 65_536, "fp32": 8_192}
"""Tokens per batch; fewer for fp32, which lacks tensor cores and takes about 100 times as long."""
HEADS = 4
"""Heads per sequence; like most models' (12, 20, 25), not a multiple of 16, for which the kernel would be
specialised.
"""
WIDEST = implementation("flash_triton").widest or 0
CHECKED = AttentionSpec(batch=4, heads=4, queries=720)
"""Shape of the check: not a whole number of tiles, but a multiple of 16, like the timed shapes."""
SHORT_UP_TO = 2048
"""Longest sequence in tokens for the short choice, if choices differ: about the geometric mean of the timed lengths."""
TOLERATED = 1.02
"""Largest slowdown, at both lengths, of a single choice for all lengths."""
_MOST_PROCESSES = 16
"""Most processes at once; each has a GPU context of half a gigabyte."""
_LIMIT_S = 120.0
"""Seconds for a check or timing on one shape, after which it counts as hanging."""
_PRODUCTS = {"forward": 2, "backward_kv": 4, "backward_q": 3}
"""Products of a kernel, each a multiply-add per score and column."""
Task = TypeVar("Task")
Result = TypeVar("Result")
Key = TypeVar("Key")
Row = Callable[..., Tiles]
"""Makes a row of the table from what distinguishes candidates."""


@dataclass(frozen=True, slots=True)
class Lost:
    why: str


@dataclass(frozen=True, slots=True)
class Trial:
    tiles: Tiles
    shape: AttentionSpec
    device_s: tuple[float, ...]
    """Seconds per repeat of this kernel, alternating with other candidates, cold cache."""

    @property
    def time_s(self) -> float:
        return median(self.device_s)

    @property
    def flops(self) -> float:
        """FLOPs executed, without masked scores in whole tiles."""
        shape = self.shape
        flops = 2.0 * shape.batch * shape.heads * shape.queries * shape.num_keys * shape.dim
        return _PRODUCTS[self.tiles.kernel] * (flops / 2 if shape.causal else flops)


# --- candidates -------------------------------------------------------------------------------------------------------


def box_of(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


def timed_shapes(head_dim: int, dtype: Dtype = "bf16") -> tuple[AttentionSpec, ...]:
    """Shapes to time: short and long sequences, with and without a causal mask."""
    return tuple(
        AttentionSpec(
            batch=TOKENS_OF_ALL[dtype] // tokens, heads=HEADS, queries=tokens, dim=head_dim, causal=causal, dtype=dtype
        )
        for tokens in LENGTHS[dtype]
        for causal in (True, False)
    )


def candidates(gpu: str, box: int, *, bits: int = 16, hopper: bool, portable: bool) -> tuple[Tiles, ...]:
    """Candidates for a tile width, as rows for a GPU.

    `hopper`: the GPU runs Hopper kernels, which take only 16-bit numbers. `portable`: try portable kernels even then. A
    candidate may exceed the GPU's shared memory.
    """
    row = partial(Tiles, gpu=gpu, bits=bits, box=box)
    if bits == 32:
        return tuple(_of_32_bits(row, box))
    # Up to 128 columns the Hopper backward kernel has one size, set by its registers.
    served = ({"forward"} if box >= WIDEST else set(KERNELS)) if hopper else set()
    others = (tiles for tiles in _portable(row, box) if portable or tiles.kernel not in served)
    return (*(_of_hopper(row, box) if hopper else ()), *others)


def _of_hopper(row: Row, box: int) -> Iterator[Tiles]:
    for queries in (128, 192) if box <= 64 else (128,):  # three warp groups have registers only for narrow sums
        for stages in (2, 3, 4):
            for keys in (64, 128):
                yield row(kernel="forward", variant="hopper", queries=queries, keys=keys, stages=stages)


_FORWARD = ((64, 64, 2, 4), (64, 64, 3, 4), (128, 64, 2, 4), (128, 64, 3, 4), (64, 128, 2, 4), (128, 128, 2, 8))
_BACKWARD = tuple(
    (queries, keys, stages, warps)
    for queries, keys, warps in ((64, 64, 4), (128, 64, 8), (64, 128, 8))
    for stages in (1, 2, 3)
)
_WIDE_FORWARD = ((64, 32, 2, 4), (64, 64, 2, 8), (128, 32, 2, 8))
_WIDE_BACKWARD = ((32, 32, 1, 4), (32, 64, 1, 8), (64, 32, 1, 8), (64, 64, 1, 8))
"""Queries, keys, stages and warps of each candidate."""


def _portable(row: Row, box: int) -> Iterator[Tiles]:
    wide = box >= WIDEST
    for kernel in KERNELS:
        sizes = (_WIDE_FORWARD if wide else _FORWARD) if kernel == "forward" else _WIDE_BACKWARD if wide else _BACKWARD
        for queries, keys, stages, warps in sizes:
            yield row(kernel=kernel, variant="portable", queries=queries, keys=keys, stages=stages, warps=warps)


_FORWARD_32 = (
    *((16, 16, 4), (32, 32, 4), (32, 64, 4), (64, 16, 4), (64, 32, 4)),
    *((32, 32, 8), (64, 32, 8), (64, 64, 8), (128, 32, 8), (128, 64, 8)),
)
_BACKWARD_32 = (
    *((16, 16, 4), (16, 32, 4), (32, 16, 4), (32, 32, 4)),
    *((16, 16, 8), (32, 32, 8), (32, 64, 8), (64, 32, 8), (64, 64, 16)),
)
_SIZES_32: dict[Kernel, tuple[tuple[int, int, int], ...]] = {
    "forward": _FORWARD_32,
    "backward_kv": (*_BACKWARD_32, (16, 64, 4), (16, 64, 8)),
    "backward_q": (*_BACKWARD_32, (64, 16, 4), (64, 16, 8)),
}
_MOST_OF_A_THREAD = {"forward": 2048, "backward_kv": 512, "backward_q": 512}
"""Most multiply-adds per thread for one product of tiles. Without tensor cores each is an instruction; beyond,
compiling takes tens of seconds and sums spill to memory.
"""


def _of_32_bits(row: Row, box: int) -> Iterator[Tiles]:
    for kernel in KERNELS:
        for queries, keys, warps in _SIZES_32[kernel]:
            if queries * keys * box <= _MOST_OF_A_THREAD[kernel] * 32 * warps:
                yield row(kernel=kernel, variant="portable", queries=queries, keys=keys, stages=1, warps=warps)


# --- trials -----------------------------------------------------------------------------------------------------------


def in_processes(
    work: Callable[[Task], Result], groups: Sequence[Sequence[Task]], *, at_once: int, limit_s: float = _LIMIT_S
) -> list[list[Result] | Lost]:
    """Results of `work`, a top-level function, for the tasks of each group, in a process per group.

    A group is lost if it exceeds `limit_s` per task (with imports), a task raises, or the process dies.
    """
    outcomes = []
    with ThreadPoolExecutor(at_once) as threads:
        for outcome in threads.map(lambda group: _in_a_process(work, group, limit_s * len(group)), groups):
            outcomes.append(outcome)
            print(f"{work.__name__}: {len(outcomes)} of {len(groups)}", file=sys.stderr)
    return outcomes


def _in_a_process(work: Callable[[Task], Result], group: Sequence[Task], limit_s: float) -> list[Result] | Lost:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, work, group))
    process.start()
    theirs.close()
    with ours:
        try:
            found: list[Result] | Lost = (
                ours.recv() if ours.poll(limit_s) else Lost(f"did not end within {limit_s:g} s")
            )
        except EOFError:
            process.join()
            found = Lost(f"its process ended with exit code {process.exitcode}")
    process.kill()
    process.join()
    return found


def _answer(connection: Connection, work: Callable[[Task], Result], group: Sequence[Task]) -> None:
    os.dup2(2, 1)  # the output is the table alone, whatever a compiler prints
    try:
        connection.send([work(task) for task in group])
    except Exception as error:
        connection.send(Lost(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"))


def tried(
    offered: Sequence[Tiles], head_dims: Sequence[int], dtype: Dtype, device: str
) -> tuple[list[Trial], dict[Tiles, str]]:
    """Timings of candidates that are right on every shape, and reasons for dropping the others."""
    checks = [
        [
            CheckTask(
                device=device, tiles=tiles, shape=dataclasses.replace(CHECKED, dim=dim, causal=causal, dtype=dtype)
            )
            for dim, causal in product(head_dims, (True, False))
            if box_of(dim) == tiles.box
        ]
        for tiles in offered
    ]
    at_once = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    dropped: dict[Tiles, str] = {}
    for check_group, outcome in zip(checks, in_processes(check, checks, at_once=at_once), strict=True):
        if fault := _fault(check_group, outcome):
            dropped[check_group[0].tiles] = fault
    times = [
        [
            TimeTask(device=device, candidates=right, shape=shape)
            for dim in head_dims
            if box_of(dim) == box
            for shape in timed_shapes(dim, dtype)
        ]
        for box in dict.fromkeys(map(box_of, head_dims))
        for kernel in KERNELS
        if (right := tuple(t for t in offered if (t.kernel, t.box) == (kernel, box) and t not in dropped))
    ]
    trials, lost = _timed(times)
    # If one of several broke the device or hung, timing each alone shows which.
    alone = [
        [dataclasses.replace(task, candidates=(tiles,)) for task in group]
        for group, _ in lost
        for tiles in group[0].candidates
    ]
    more, lost = _timed(alone)
    return trials + more, dropped | {group[0].candidates[0]: why for group, why in lost}


def _fault(group: Sequence[CheckTask], outcome: list[str] | Lost) -> str:
    if isinstance(outcome, Lost):
        return outcome.why
    for task, wrong in zip(group, outcome, strict=True):
        if wrong:
            return f"head dimension {task.shape.dim}, {'causal' if task.shape.causal else 'not causal'}: {wrong}"
    return ""


def _timed(groups: Sequence[Sequence[TimeTask]]) -> tuple[list[Trial], list[tuple[Sequence[TimeTask], str]]]:
    trials: list[Trial] = []
    lost: list[tuple[Sequence[TimeTask], str]] = []
    for group, outcome in zip(groups, in_processes(time_candidates, groups, at_once=1), strict=True):
        if isinstance(outcome, Lost):
            lost.append((group, outcome.why))
            continue
        for task, samples in zip(group, outcome, strict=True):
            trials += map(Trial, task.candidates, [task.shape] * len(samples), samples)
    return trials, lost


# --- the choice -------------------------------------------------------------------------------------------------------


def _grouped(trials: Iterable[Trial], key: Callable[[Trial], Key]) -> dict[Key, list[Trial]]:
    found: dict[Key, list[Trial]] = {}
    for trial in trials:
        found.setdefault(key(trial), []).append(trial)
    return found


def chosen_of(trials: Iterable[Trial]) -> list[Tiles]:
    """Rows for the GPU: one per kernel and tile width, two if short sequences need other tiles."""
    of_kernels = _grouped(trials, lambda trial: (trial.tiles.kernel, trial.tiles.box))
    return [row for of_kernel in of_kernels.values() for row in _choice(of_kernel)]


def _choice(trials: Iterable[Trial]) -> Iterator[Tiles]:
    of_lengths = _grouped(trials, lambda trial: trial.shape.queries)
    short, long = (slowdowns(of_lengths[tokens]) for tokens in sorted(of_lengths))
    fastest = [min(found, key=lambda tiles: found[tiles]) for found in (short, long)]
    limits = [TOLERATED * found[best] for found, best in zip((short, long), fastest, strict=True)]
    good = [tiles for tiles in long if short[tiles] <= limits[0] and long[tiles] <= limits[1]]
    if good:
        yield min(good, key=lambda tiles: short[tiles] * long[tiles])
    else:
        yield dataclasses.replace(fastest[0], tokens=SHORT_UP_TO)
        yield fastest[1]


def slowdowns(trials: Iterable[Trial]) -> dict[Tiles, float]:
    """Each candidate's time over the fastest's, as a geometric mean over shapes."""
    of_shapes = _grouped(trials, lambda trial: trial.shape).values()
    ratios: dict[Tiles, list[float]] = {}
    for of_shape in of_shapes:
        best_s = min(trial.time_s for trial in of_shape)
        for trial in of_shape:
            ratios.setdefault(trial.tiles, []).append(trial.time_s / best_s)
    return {tiles: geometric_mean(found) for tiles, found in ratios.items()}


def result_rows(
    trials: Sequence[Trial], dropped: Mapping[Tiles, str], chosen: Sequence[Tiles]
) -> Iterator[dict[str, object]]:
    """A row per candidate and length, fastest of each kernel and box first, then dropped candidates.

    Times and rates are geometric means over head dimensions, with and without the causal mask.
    """
    for (_, _, tokens), group in _grouped(trials, lambda t: (t.tiles.box, t.tiles.kernel, t.shape.queries)).items():
        for tiles, slowdown in sorted(slowdowns(group).items(), key=lambda item: item[1]):
            own = [trial for trial in group if trial.tiles == tiles]
            yield _of_what(tiles) | {
                "tokens": tokens,
                "candidate": _label(tiles),
                "time_s": geometric_mean(trial.time_s for trial in own),
                "flops_per_s": geometric_mean(trial.flops / trial.time_s for trial in own),
                "slowdown": slowdown,
                "result": "chosen" if _is_chosen(tiles, tokens, chosen) else "",
            }
    for tiles, why in dropped.items():
        yield _of_what(tiles) | {"candidate": _label(tiles), "result": why}


def _of_what(tiles: Tiles) -> dict[str, object]:
    return {"kernel": tiles.kernel, "bits": tiles.bits, "box": tiles.box}


def _label(tiles: Tiles) -> str:
    stages = f"{tiles.stages} stage{'s' if tiles.stages > 1 else ''}"
    warps = f", {tiles.warps} warps" if tiles.variant == "portable" else ""
    return f"{tiles.variant} {tiles.queries}×{tiles.keys}, {stages}{warps}"


def _is_chosen(tiles: Tiles, tokens: int, chosen: Iterable[Tiles]) -> bool:
    same = [row for row in chosen if _of_what(row) == _of_what(tiles) and (row.tokens is None or tokens <= row.tokens)]
    serving = min(same, key=lambda row: row.tokens or math.inf)
    return dataclasses.replace(serving, tokens=None) == tiles


# --- the table --------------------------------------------------------------------------------------------------------


def table_with(new: Sequence[Tiles], before: str) -> str:
    """The table; new rows replace rows of the same GPU, kernel, bits and tile width."""
    tuned = [(row.gpu, _of_what(row)) for row in new]
    kept = [row for row in read_table(before) if (row.gpu, _of_what(row)) not in tuned]
    head = before.partition("[[tiles]]")[0]
    return head + "\n".join(_row_text(row) for row in [*kept, *new])


def _row_text(row: Tiles) -> str:
    fields = [(field.name, getattr(row, field.name), field.default) for field in dataclasses.fields(row)]
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value, usual in fields if value != usual]
    return "\n".join(["[[tiles]]", *lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dim", default="64,80,128", help=f"head dimensions, up to {WIDEST}; 80 and 128 share tiles")
    parser.add_argument("--dtype", default="bf16", choices=get_args(Dtype), help="fp32: the rows of 32-bit numbers")
    parser.add_argument("--portable", action="store_true", help="also try the portable kernels on a Hopper GPU")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--table", type=Path, default=TABLE)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("flash_triton's kernels need CUDA; run this on a machine with a GPU")
    head_dims = tuple(dict.fromkeys(map(int, asked.dim.split(","))))
    if not all(1 <= head_dim <= WIDEST for head_dim in head_dims):
        parser.error(f"head dimensions of flash_triton are from 1 to {WIDEST}")
    gpu = torch.cuda.get_device_name(asked.device)
    hopper = hopper_kernels_on(torch.device(asked.device))
    bits = 32 if asked.dtype == "fp32" else 16
    boxes = dict.fromkeys(map(box_of, head_dims))
    offered = [
        tiles for box in boxes for tiles in candidates(gpu, box, bits=bits, hopper=hopper, portable=asked.portable)
    ]
    before = asked.table.read_text(encoding="utf-8")
    trials, dropped = tried(offered, head_dims, asked.dtype, asked.device)
    chosen = chosen_of(trials)
    columns = ("kernel", "bits", "box", "tokens", "candidate", "time_s", "flops_per_s", "slowdown", "result")
    writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(result_rows(trials, dropped, chosen))
    asked.table.write_text(table_with(chosen, before), encoding="utf-8")


if __name__ == "__main__":
    main()
