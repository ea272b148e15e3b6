"""The tables of docs/attention.md, from the benchmarks of attention and the training steps that are committed.

Every figure is computed from the raw samples in the records; nothing is typed in but the ceilings below.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.page_tables import GOLDEN, RESULTS, read, table_of_texts

from steplab.records.attention import AttentionCell, AttentionRun
from steplab.records.run import Run
from steplab.records.timing import find_phase, waits_for_host
from steplab.report.attention.figures import PASS_WORDS, median_s
from steplab.report.attention.tables import by_shape, mean_speeds
from steplab.report.kit.document import Table
from steplab.report.kit.markup import markdown_table
from steplab.report.kit.quantities import LABEL
from steplab.specs.attention import PASSES, AttentionSpec

OURS = "flash_triton"
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
GRID = "attention_dims"
"""Name of the benchmark, after benchmarks/attention_dims.toml."""
NARROW, WIDE = 64, 128
"""Head dimensions that are powers of two, between which the others are."""
Times = dict[AttentionSpec, dict[str, float]]
STEPS = GOLDEN / "step_h200_202611.jsonl.gz"
"""Steps with plain attention and with torch's choice, measured on another day."""
_WANTED = {"precision": "bf16", "pass_name": "train", "batch": 4, "checkpointing": "none"}


def written() -> str:
    """The tables as they stand in the page."""
    records = RESULTS / "attention_h200_202611.jsonl.gz"
    runs = read(records, AttentionRun)
    long = {cell.spec: cell for run in runs if run.study.name == "long" for cell in run.cells}
    whole = steps(read(STEPS, Run), read(records, Run))
    return "\n\n".join([*for_docs(_needed(runs, "peers"), list(long.values()), runs), markdown_table(whole)])


def _needed(runs: Sequence[AttentionRun], grid: str) -> list[AttentionRun]:
    """The newest benchmark of a grid, then those before it that measured cells which none of the later ones did."""
    seen: set[AttentionSpec] = set()
    found = []
    for run in reversed([run for run in runs if run.study.name == grid]):
        own = {cell.spec for cell in run.cells if cell.failure is None}
        if own - seen:
            found.append(run)
        seen |= own
    return found


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


def dims_table(runs: Sequence[AttentionRun]) -> Table | None:
    """A row for each shape and implementation: its times, and by how much each is longer than its FLOPs say."""
    own = [run for run in runs if run.study.name == GRID]
    cells = [(run, cell) for run, family in _families(own) for cell in family]
    times: Times = {cell.spec: _times(cell) for _, cell in cells if cell.spec.compile == "off"}
    rows = [(spec.sizes_label, spec.implementation, *(_text(spec, name, times) for name in PASSES)) for spec in times]
    if not rows:
        return None
    return table_of_texts(
        "table",
        headers=("B×H×S×D", "implementation", *(PASS_WORDS[name] for name in PASSES)),
        rows=tuple(rows),
        numeric=(False, False, *(True for _ in PASSES)),
        caption="bf16, causal; milliseconds, and by how much longer than FLOPs in proportion say: of a head dimension, "
        f"between the times of {NARROW} and of {WIDE}; of 32 query heads on fewer key heads (32/8), as of 32 on 32. "
        f"Records: {', '.join(dict.fromkeys(run.id for run, _ in cells))}.",
    )


def _families(runs: Sequence[AttentionRun]) -> Iterator[tuple[AttentionRun, list[AttentionCell]]]:
    """Cells that are set beside each other, of the newest record that measured all of them: records of different days
    and GPUs do not compare."""
    families: dict[object, set[AttentionSpec]] = {}
    for run in runs:
        for cell in run.cells:
            families.setdefault(_family(cell.spec), set()).add(cell.spec)
    for family, specs in families.items():
        for run in reversed(runs):
            cells = [cell for cell in run.cells if _family(cell.spec) == family and _times(cell)]
            if {cell.spec for cell in cells} == specs:
                yield run, cells
                break


def _family(spec: AttentionSpec) -> object:
    return spec.batch, spec.heads, spec.queries, spec.dim > WIDE


def _times(cell: AttentionCell) -> dict[str, float]:
    found = {name: median_s(cell, name) for name in PASSES}
    return {name: seconds for name, seconds in found.items() if seconds}


def _text(spec: AttentionSpec, name: str, times: Times) -> str:
    measured, expected = times[spec].get(name), _expected(spec, name, times)
    if measured is None:
        return "–"
    return milliseconds(measured) + (f" ({measured / expected - 1:+.0%})" if expected else "")


def _expected(spec: AttentionSpec, name: str, times: Times) -> float | None:
    """Seconds, of shapes that were measured beside it; None where they were not, and for those shapes themselves."""
    if spec.num_kv_heads < spec.heads:
        return times.get(replace(spec, kv_heads=spec.heads), {}).get(name)
    least, most = (times.get(replace(spec, dim=dim), {}).get(name) for dim in (NARROW, WIDE))
    if least is None or most is None or not NARROW < spec.dim < WIDE:
        return None
    return least + (most - least) * (spec.dim - NARROW) / (WIDE - NARROW)


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


def steps(earlier: Sequence[Run], runs: Sequence[Run]) -> Table:
    """The step of each model by who computes its attention, replayed as CUDA graphs or not; of one measured twice, the
    later. Earlier ones are marked: they were not measured beside the others; and so are those that are the host's more
    than the device's."""
    found: dict[tuple[str, str], dict[str, Run]] = {}
    for run in (*earlier, *runs):
        spec = run.spec
        if spec is None or run.timing is None or spec.warmup < 3 or spec.context < 512:
            continue
        if all(getattr(spec, name) == value for name, value in _WANTED.items()):
            column = f"{spec.attention}, {'eager' if spec.compile == 'off' else 'compiled'}"
            launched = "" if spec.cuda_graph == "off" else ", CUDA graphs"
            found.setdefault((spec.model.name + launched, str(spec.context)), {})[column] = run
    compared = {key: own for key, own in found.items() if any(column.startswith(OURS) for column in own)}
    columns = list(dict.fromkeys(column for own in compared.values() for column in own))
    columns.sort(key=lambda column: ("compiled" in column, OURS in column, column))
    old = {run.id for run in earlier}

    def text(run: Run | None) -> str:
        return milliseconds(_step_s(run)) + "*" * (run.id in old) + "†" * waited(run) if run else "–"

    rows = [(*key, *(text(own.get(column)) for column in columns)) for key, own in compared.items()]
    ids = ", ".join(run.id for own in compared.values() for run in own.values())
    return table_of_texts(
        "table",
        headers=("model", "context", *columns),
        rows=tuple(rows),
        numeric=(False, True, *(True for _ in columns)),
        caption="Milliseconds of a training step, batch 4, bf16; –: not measured; *: in another session, from "
        f"{STEPS.relative_to(STEPS.parents[2])}; †: the device waited for Python, so that the time is the host's and "
        f"says little of attention; without †, Python was ahead or it is not recorded whether it was. Records: {ids}.",
    )


def waited(run: Run) -> bool:
    """Whether Python was hardly ahead of the device in its steps; where that is not recorded, it is not known to be."""
    return run.timing is not None and waits_for_host(run.timing.back_to_back)


def _step_s(run: Run) -> float:
    """The median of its steps."""
    assert run.timing is not None
    samples = find_phase(run.timing.back_to_back, "step")
    assert samples is not None
    return median(samples.best_s)


def milliseconds(seconds: float) -> str:
    """Three significant digits, trailing zeros among them."""
    return f"{1e3 * seconds:#.3g}".rstrip(".")
