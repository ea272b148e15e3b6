"""The committed tables of the benchmarks of attention, from their records.

    python -m benchmarks.attention_table RECORDS > benchmarks/results/attention_h200_202611.md
    python -m benchmarks.attention_table RECORDS --into docs/attention.md       (what stands between the marks in it)

RECORDS is what `steplab export` writes of the benchmarks that benchmarks/attention_study.py made and of training steps,
gzipped or not; those of STEPS are set beside the latter. Every figure is computed from the raw samples in the records;
nothing is typed in but the ceilings below.
"""

import argparse
import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TypeVar

from benchmarks.attention_dims import dims_table
from benchmarks.attention_sources import cells_of, disagreements, needed, sources
from benchmarks.attention_steps import OURS, STEPS, milliseconds, steps
from benchmarks.page_tables import table_of_texts, write_between_marks

from steplab import units
from steplab.plan.attention_memory import account_of_failure
from steplab.records.attention import AttentionCell, AttentionRun
from steplab.records.codec import decode
from steplab.records.run import Run
from steplab.report.attention.figures import PASS_WORDS, median_s
from steplab.report.attention.tables import account_table, by_shape, mean_speeds, speed_table
from steplab.report.kit.document import Table
from steplab.report.kit.markup import markdown_table
from steplab.report.kit.quantities import BYTES, LABEL
from steplab.specs.attention import PASSES, AttentionSpec

Kind = TypeVar("Kind", AttentionRun, Run)
PEER = "flex"
SET_BESIDE = "sdpa_cudnn", "flash_attn_4", "flex"
"""Whose speed is 1 in the tables of docs/attention.md: of each, in the newest benchmark that has it."""
MATMUL_FLOPS_PER_S = 790e12
"""What a bf16 matmul of 8192³ reaches on an H200, random numbers."""
COPY_BYTES_PER_S = 4.3e12
"""What a copy on the device reaches, read and written."""
EXPONENTIALS_PER_CLOCK = 16 * 132
"""Of a multiprocessor (CUDA C++ Programming Guide, throughput of native arithmetic instructions, 9.0) times 132."""
MOST = 0.75
"""Of a time, what binds it."""
CLOCKS_HZ = (1.755e9, 1.98e9)
"""What an H200 runs at, under its power limit and at most."""
LONGEST = 65_536
"""Positions, of the long grid; the piece `beyond` has more, in one type and dimension."""
_OF_PASSES = "forward / backward / both, milliseconds"

HEAD = """# Attention by itself, on one {device}

torch {env.torch}, Triton {env.triton}, cuDNN {env.cudnn}, driver {env.driver}. Made by `python -m
benchmarks.attention_study STORE`, written by `python -m benchmarks.attention_table`; how each figure is measured is
in docs/attention_study.md. B×H×S×D is batch, heads, sequence and head dimension; plain materialises the scores.
Records: {ids}.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a pass of flash_triton executes on a Hopper GPU."""

    products: int
    """That it executes, of 2 B H D p FLOPs each, p being the pairs of a query and a key that it sees."""
    exponentials: int
    """Executed, a pair."""
    tensors_q: int
    """As large as q that are read or written at least once; so many as large as k as well."""


WORK = {
    "forward": Work(products=2, exponentials=1, tensors_q=2),
    "backward": Work(products=5, exponentials=1, tensors_q=4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("records", type=Path, help="what `steplab export` wrote, gzipped or not")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="put the tables between the marks in this page")
    asked = parser.parse_args()
    runs = read(asked.records, AttentionRun)
    whole = list(_titled("Whole models", steps(read(STEPS, Run), read(asked.records, Run))))
    if asked.into:
        shown = for_docs(needed(runs, "peers"), cells_of(runs, "long"), runs)
        write_between_marks(asked.into, "attention_table.py", "\n\n".join([*shown, whole[-1]]))
    else:
        print("\n\n".join([*parts(runs), *whole]))


def read(path: Path, kind: type[Kind]) -> list[Kind]:
    """The records of a kind, the oldest first."""
    content = path.read_bytes()
    lines = (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()
    runs = [run for line in lines if isinstance(run := decode(line), kind)]
    return sorted(runs, key=lambda run: run.created_utc)


def parts(runs: Sequence[AttentionRun]) -> Iterator[str]:
    """The page, piece by piece."""
    env = next(run.environment for run in runs if run.environment)
    ids = ", ".join(f"{run.id} ({run.name or run.study.name}, {run.created_utc[:10]})" for run in runs)
    yield HEAD.format(env=env, device=env.device.name, ids=ids).strip()
    for run in needed(runs, "peers"):  # each by itself: what took turns in one process compares
        peers = _measured(run)
        yield f"## Against its peers, {_record(run)}"
        for name in PASSES:
            yield from _titled(PASS_WORDS[name].capitalize(), speed_table(peers, PEER, name))
        for peer in dict.fromkeys(cell.spec.column for cell in peers if cell.spec.column != OURS):
            yield from _titled(f"Speed over all shapes, {peer} being 1", mean_speeds(peers, peer))
        yield from _titled(f"Which cell of {OURS} is bound by what", bounds(peers))
        yield from _titled("Errors and first calls, the worst of all shapes", worst(peers))
        yield from _titled("Memory, peak of forward and backward beyond the inputs", memory(peers))
    yield from _titled("Head dimensions and grouped heads", dims_table(runs))
    for grid, title in (("study", "Batch 8, one head, fp32, not causal"), ("long", "Batch 1, one head, causal")):
        cells = _in_order(cells_of(runs, grid))
        if not cells:
            continue
        yield f"## {title}"
        yield from _titled(f"Which record the cells are of ({grid})", sources(runs, grid))
        yield from _titled(f"Measured twice, and not the same ({grid})", disagreements(runs, grid))
        for dtype in dict.fromkeys(cell.spec.dtype for cell in cells):
            own = [cell for cell in cells if cell.spec.dtype == dtype]
            for name in PASSES:
                yield from _titled(f"{PASS_WORDS[name].capitalize()}, {dtype}", speed_table(own, "plain", name))
            yield from _titled(f"Memory kept from forward until backward, {dtype}", memory(own, kept=True))
            yield from _titled(f"Memory, peak of forward and backward beyond the inputs, {dtype}", memory(own))
            yield from _titled(f"Errors and first calls, the worst of all shapes, {dtype}", worst(own))
        if env.device.memory_bytes and (account := account_of_failure(cells, env.device.memory_bytes, env.device.name)):
            text = f"{account.moment}; the device has {units.format_bytes(account.memory_bytes)}."
            said = f" It said: {account.measured.message}." if account.measured else ""
            yield f"### The smallest plain attention that ran out of memory: {account.spec.label}"
            yield markdown_table(replace(account_table(account), caption=f"Most at once: {text}{said}"))


def _record(run: AttentionRun) -> str:
    return f"record {run.id} of {run.created_utc[:10]} {run.created_utc[11:16]} UTC"


def _measured(run: AttentionRun) -> list[AttentionCell]:
    """Without implementations that failed in every shape, such as one of a package that is missing."""
    columns = {cell.spec.column for cell in run.cells if cell.failure is None}
    return [cell for cell in run.cells if cell.spec.column in columns]


def for_docs(
    peers: Sequence[AttentionRun], long: Sequence[AttentionCell], runs: Sequence[AttentionRun]
) -> Iterator[str]:
    """What docs/attention.md shows."""
    told = set()
    for run in peers:
        cells = _measured(run)
        yield markdown_table(by_shape(cells, _three_times, LABEL, f"{_OF_PASSES}; {_record(run)}."))
        for peer in SET_BESIDE:
            if peer not in told and (means := mean_speeds(cells, peer)):
                told.add(peer)
                yield markdown_table(means)
    if longest := [cell for cell in _in_order(long) if cell.spec.queries == LONGEST]:
        yield markdown_table(
            by_shape(longest, _three_times, LABEL, f"{_OF_PASSES}; the longest sequences of the long grid.")
        )
    for table in (dims_table(runs), *(bounds(run.cells) for run in peers[:1])):
        if table:
            yield markdown_table(table)


def _three_times(cell: AttentionCell) -> str | None:
    times = [median_s(cell, name) for name in PASSES]
    return " / ".join(milliseconds(seconds) for seconds in times if seconds) or None


def _in_order(cells: Sequence[AttentionCell]) -> list[AttentionCell]:
    """By type, head dimension and length: they come from records of some of each."""
    return sorted(cells, key=lambda cell: (cell.spec.dtype, cell.spec.dim, cell.spec.queries))


def bounds(cells: Sequence[AttentionCell]) -> Table | None:
    """Of each cell of flash_triton and pass: its time, and the least that each unit needs for the work by itself."""
    rows = []
    for cell in cells:
        for name, work in WORK.items():
            seconds = median_s(cell, name)
            if cell.spec.implementation == OURS and seconds:
                rows.append(_bound_row(cell.spec, name, work, seconds))
    if not rows:
        return None
    return table_of_texts(
        "table",
        headers=("B×H×S×D", "pass", "measured", "products", "exponentials", "bytes", "bound by", "products' share"),
        rows=tuple(rows),
        numeric=(False, False, True, True, True, True, False, True),
        caption=f"Milliseconds. Products (2 forward, 5 backward) at "
        f"{MATMUL_FLOPS_PER_S / 1e12:.0f} TFLOP/s; exponentials (1 a pair in each pass) at 16 a clock and "
        f"multiprocessor, {CLOCKS_HZ[1] / 1e9:.2f} to {CLOCKS_HZ[0] / 1e9:.3f} GHz; each tensor once at "
        f"{COPY_BYTES_PER_S / 1e12:.1f} TB/s; pairs as the mask leaves them. Bound by products: they alone need over "
        f"{100 * MOST:.0f} % of the measured time; by products and exponentials: these do, one after the other, at "
        f"{CLOCKS_HZ[1] / 1e9:.2f} GHz; by neither: not even so. Share: products over measured.",
    )


def _bound_row(spec: AttentionSpec, name: str, work: Work, seconds: float) -> tuple[str, ...]:
    pairs = spec.batch * spec.heads * pairs_of_head(spec)
    products_s = work.products * 2 * spec.dim * pairs / MATMUL_FLOPS_PER_S
    slow_s, fast_s = (work.exponentials * pairs / (EXPONENTIALS_PER_CLOCK * hz) for hz in CLOCKS_HZ)
    queries, keys = spec.heads * spec.queries, spec.num_kv_heads * spec.num_keys
    moved = 2 * spec.batch * spec.dim * work.tensors_q * (queries + keys) + 4 * spec.batch * queries
    bytes_s = moved / COPY_BYTES_PER_S
    if bytes_s > max(products_s, fast_s):
        bound = "bytes"
    elif products_s > MOST * seconds:
        bound = "products"
    else:
        bound = "products and exponentials" if products_s + fast_s > MOST * seconds else "neither"
    label = spec.sizes_label + (" causal" if spec.causal else "")
    exponentials = f"{milliseconds(fast_s)} to {milliseconds(slow_s)}"
    figures = milliseconds(seconds), milliseconds(products_s), exponentials, milliseconds(bytes_s)
    return label, name, *figures, bound, f"{100 * products_s / seconds:.0f} %"


def pairs_of_head(spec: AttentionSpec) -> int:
    """Pairs of a query and a key that it sees."""
    square = min(spec.queries, spec.num_keys)
    if not spec.causal:
        return spec.queries * spec.num_keys
    return square * (square + 1) // 2 + (spec.queries - square) * spec.num_keys


def worst(cells: Sequence[AttentionCell]) -> Table:
    """Largest errors over plain attention's, and the longest first call, of each implementation."""
    rows = []
    for column in dict.fromkeys(cell.spec.column for cell in cells):
        own = [cell for cell in cells if cell.spec.column == column]
        ratios = [
            max((_ratio(cell, tensor) for cell in own), default=0.0)
            for tensor in ("output", "queries", "keys", "values")
        ]
        calls = [cell.first_call_s for cell in own if cell.first_call_s is not None]
        texts = [f"{ratio:.2f}" if ratio else "–" for ratio in ratios]
        rows.append((column, *texts, *(units.format_time(f(calls)) if calls else "–" for f in (median, max))))
    return table_of_texts(
        "table",
        headers=("implementation", "output", "dQ", "dK", "dV", "first call, median", "longest"),
        rows=tuple(rows),
        numeric=(False, *(True for _ in range(6))),
        caption="Errors against float64 (norm of the difference), as multiples of plain attention's in the same type.",
    )


def _ratio(cell: AttentionCell, tensor: str) -> float:
    for error in cell.errors:
        if error.tensor == tensor and error.relative is not None and error.plain_relative:
            return error.relative / error.plain_relative
    return 0.0


def memory(cells: Sequence[AttentionCell], *, kept: bool = False) -> Table:
    """Bytes of each cell, shapes by implementations."""

    def value(cell: AttentionCell) -> int | None:
        found = (cell.memory.saved_bytes if kept else cell.memory.both_peak_bytes) if cell.memory else None
        return None if cell.failure else found

    told = "The output is included." if kept else "The output and the gradients are included."
    return by_shape(cells, value, BYTES, told)


def _titled(title: str, table: Table | None) -> Iterator[str]:
    if table:
        yield f"### {title}"
        yield markdown_table(table)


if __name__ == "__main__":
    main()
