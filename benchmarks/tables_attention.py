"""Tables of docs/attention.md and the H200's results, from committed benchmarks; the peaks below are typed in."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.tables import RESULTS, read, table

from steplab.records.attention import AttentionCell, AttentionRun
from steplab.report.attention.figures import PASS_WORDS, shape_label
from steplab.report.kit.document import Table
from steplab.specs.attention import PASSES, AttentionSpec

OURS = "flash_triton"
MATMUL_FLOPS_PER_S = 790e12
"""Rate of a bf16 matmul of 8192³ on an H200, random numbers."""
COPY_BYTES_PER_S = 4.3e12
"""Rate of a device copy, read and written."""
EXPONENTIALS_PER_CLOCK = 16 * 132
"""Per multiprocessor (CUDA C++ Programming Guide, throughput of native arithmetic instructions, 9.0) times 132."""
MOST = 0.75
"""Least share of a time for its bound."""
CLOCKS_HZ = (1.755e9, 1.98e9)
"""Clocks of an H200, under its power limit and at most."""
GRID = "attention_dims"
NARROW, WIDE = 64, 128
"""Head dimensions that are powers of two, around the others."""
Times = dict[AttentionSpec, dict[str, float]]


def attention() -> Iterator[Table]:
    """Times of the newest comparison with peers."""
    newest = _newest(read(RESULTS / "attention_h200_202611.jsonl.gz", AttentionRun))
    told = f"record {newest.id} of {newest.created_utc[:10]} {newest.created_utc[11:16]} UTC"
    told_of = {(cell.spec.shape, cell.spec.column): _time_of_both(cell) for cell in newest.cells}
    shapes, columns = (tuple(dict.fromkeys(names)) for names in zip(*told_of, strict=True))
    rows = (
        (shape_label(shape, shapes), *(told_of.get((shape, column)) or "–" for column in columns)) for shape in shapes
    )
    yield table(("B×H×S×D", *columns), rows, ("B×H×S×D",), f"bf16. Forward and backward, milliseconds; {told}.")


def attention_bounds() -> Iterator[str | Table]:
    """Bound of each cell, and the cost of other head dimensions."""
    runs = read(RESULTS / "attention_h200_202611.jsonl.gz", AttentionRun)
    yield "### Which cell of flash_triton is bound by what"
    yield bounds(_newest(runs).cells)
    yield "### Head dimensions and grouped heads"
    yield dims_table(runs)


def _newest(runs: Sequence[AttentionRun]) -> AttentionRun:
    return next(run for run in reversed(runs) if run.study.name == "peers")


def _time_of_both(cell: AttentionCell) -> str | None:
    seconds = cell.median_s("both")
    return milliseconds(seconds) if seconds else None


def dims_table(runs: Sequence[AttentionRun]) -> Table:
    """A row per shape and implementation: times, and their excess over FLOPs."""
    own = [run for run in runs if run.study.name == GRID]
    cells = [(run, cell) for run, family in _families(own) for cell in family]
    times: Times = {cell.spec: _times(cell) for _, cell in cells if cell.spec.compile == "off"}
    rows = [(spec.sizes_label, spec.implementation, *(_text(spec, name, times) for name in PASSES)) for spec in times]
    texts = ("B×H×S×D", "implementation")
    return table(
        (*texts, *(PASS_WORDS[name] for name in PASSES)),
        rows,
        texts,
        caption="bf16, causal; milliseconds, and by how much longer than FLOPs in proportion say: of a head dimension, "
        f"between the times of {NARROW} and of {WIDE}; of 32 query heads on fewer key heads (32/8), as of 32 on 32. "
        f"Records: {', '.join(dict.fromkeys(run.id for run, _ in cells))}.",
    )


def _families(runs: Sequence[AttentionRun]) -> Iterator[tuple[AttentionRun, list[AttentionCell]]]:
    """Cells to compare, from the newest record with all of them: days and GPUs do not mix."""
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
    found = {name: cell.median_s(name) for name in PASSES}
    return {name: seconds for name, seconds in found.items() if seconds}


def _text(spec: AttentionSpec, name: str, times: Times) -> str:
    measured, expected = times[spec].get(name), _expected(spec, name, times)
    if measured is None:
        return "–"
    return milliseconds(measured) + (f" ({measured / expected - 1:+.0%})" if expected else "")


def _expected(spec: AttentionSpec, name: str, times: Times) -> float | None:
    """Seconds expected from shapes measured with it; None without any, and for those shapes."""
    if spec.num_kv_heads < spec.heads:
        return times.get(replace(spec, kv_heads=spec.heads), {}).get(name)
    least, most = (times.get(replace(spec, dim=dim), {}).get(name) for dim in (NARROW, WIDE))
    if least is None or most is None or not NARROW < spec.dim < WIDE:
        return None
    return least + (most - least) * (spec.dim - NARROW) / (WIDE - NARROW)


WORK = {"forward": (2, 2), "backward": (5, 4)}
"""Products per pass of flash_triton on Hopper, 2 B H D p FLOPs each for p query-key pairs; and tensors of q's size,
with as many of k's. A pass takes an exponential a pair.
"""


def bounds(cells: Sequence[AttentionCell]) -> Table:
    """For each cell of flash_triton and pass: its time, and each unit's least time for the work."""
    rows = []
    for cell in cells:
        for name in WORK:
            seconds = cell.median_s(name)
            if cell.spec.implementation == OURS and seconds:
                rows.append(_bound_row(cell.spec, name, seconds))
    return table(
        ("B×H×S×D", "pass", "measured", "products", "exponentials", "bytes", "bound by", "products' share"),
        rows,
        ("B×H×S×D", "pass", "bound by"),
        caption=f"Milliseconds. Products (2 forward, 5 backward) at "
        f"{MATMUL_FLOPS_PER_S / 1e12:.0f} TFLOP/s; exponentials (1 a pair in each pass) at 16 a clock and "
        f"multiprocessor, {CLOCKS_HZ[1] / 1e9:.2f} to {CLOCKS_HZ[0] / 1e9:.3f} GHz; each tensor once at "
        f"{COPY_BYTES_PER_S / 1e12:.1f} TB/s; pairs as the mask leaves them. Bound by products: they alone need over "
        f"{100 * MOST:.0f} % of the measured time; by products and exponentials: these do, one after the other, at "
        f"{CLOCKS_HZ[1] / 1e9:.2f} GHz; by neither: not even so. Share: products over measured.",
    )


def _bound_row(spec: AttentionSpec, name: str, seconds: float) -> tuple[str, ...]:
    products, tensors = WORK[name]
    pairs = spec.batch * spec.heads * pairs_of_head(spec)
    products_s = products * 2 * spec.dim * pairs / MATMUL_FLOPS_PER_S
    slow_s, fast_s = (pairs / (EXPONENTIALS_PER_CLOCK * hz) for hz in CLOCKS_HZ)
    queries, keys = spec.heads * spec.queries, spec.num_kv_heads * spec.num_keys
    moved = 2 * spec.batch * spec.dim * tensors * (queries + keys) + 4 * spec.batch * queries
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
    """Pairs of a query and a visible key."""
    square = min(spec.queries, spec.num_keys)
    if not spec.causal:
        return spec.queries * spec.num_keys
    return square * (square + 1) // 2 + (spec.queries - square) * spec.num_keys


def milliseconds(seconds: float) -> str:
    """Three significant digits with trailing zeros."""
    return f"{1e3 * seconds:#.3g}".rstrip(".")
