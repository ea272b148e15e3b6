from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import geometric_mean, median, quantiles

from steplab import units
from steplab.comparison.samples import compare_samples
from steplab.records.attention import (
    BOTH,
    ERRORS,
    MEMORY,
    PASS_RATES,
    PASS_TIMES,
    TENSORS,
    AttentionAccount,
    AttentionCell,
)
from steplab.records.comparison import Ratio
from steplab.records.figure import Figure, values
from steplab.records.rows import Row, Scalar
from steplab.report.kit.document import RESULT, Column, Section, Table, row_of
from steplab.report.kit.grouping import told_once
from steplab.report.kit.quantities import LABEL, NUMBER, TIME, TIMES
from steplab.specs.attention import PASSES, AttentionSpec

PASS_WORDS = {"forward": "forward", "backward": "backward", "both": "forward + backward"}
_BY_INTEREST = ("both", "forward", "backward")
SCATTERED = 0.2
"""Interquartile range, relative to the median, above which a median is marked.
Kernels repeat within a few per cent; a larger scatter means waits for Python or another process on the GPU.
"""
_PEERS = ("sdpa_flash", "sdpa", "plain")


def default_peer(cells: Sequence[AttentionCell]) -> str | None:
    columns = {cell.spec.column for cell in cells}
    return next((name for name in _PEERS if name in columns), None) if len(columns) > 1 else None


def peers_of(cells: Sequence[AttentionCell], peer: str | None) -> dict[AttentionSpec, AttentionCell]:
    return {cell.spec.shape: cell for cell in cells if cell.spec.column == peer}


def speed(cell: AttentionCell, peers: Mapping[AttentionSpec, AttentionCell], name: str) -> float | None:
    peer = peers.get(cell.spec.shape)
    own_s, peer_s = cell.median_s(name), peer.median_s(name) if peer else None
    return peer_s / own_s if own_s and peer_s else None


def time_ratio(cell: AttentionCell, peer: AttentionCell, name: str) -> Ratio:
    """Ratio of the cell's time to the peer's; repeats that alternated are paired."""
    a, b = peer.samples(name), cell.samples(name)
    if peer.spec.column in cell.interleaved and len(a) == len(b):
        return compare_samples([[sample] for sample in a], [[sample] for sample in b], in_turns=True)
    return compare_samples([a], [b], in_turns=False)


def attention_rows(cells: Sequence[AttentionCell], peer: str | None = None) -> list[Row]:
    figures = (*PASS_TIMES, *speeds(cells, peer), *PASS_RATES, *MEMORY, *ERRORS)
    return [
        {
            "shape": cell.spec.sizes_label,
            **row_of(cell.spec, "batch", "heads", "kv_heads", "queries", "keys", "dim"),
            "causal": "yes" if cell.spec.causal else "no",
            **row_of(cell.spec, "dtype", "implementation", "compile", "column"),
            "status": cell.status,
            "repeats": max((len(cell.samples(name)) for name in PASSES), default=0) or None,
            "against": peer,
            **values(figures, cell),
            "checked_heads": cell.checked_heads,
            "failure": failure_words(cell),
        }
        for cell in cells
    ]


def speeds(cells: Sequence[AttentionCell], peer: str | None) -> tuple[Figure[AttentionCell], ...]:
    peers = peers_of(cells, peer)

    def of_pass(name: str) -> Figure[AttentionCell]:
        return Figure(
            key=f"{name}_speed",
            header=f"{name} vs {peer}" if peer else None,
            unit="times",
            rank=1,
            find=lambda cell: speed(cell, peers, name),
        )

    return tuple(map(of_pass, PASSES))


def failure_words(cell: AttentionCell) -> str | None:
    failure = cell.failure
    if failure and failure.kind == "out_of_memory" and failure.requested_bytes:
        return f"{units.format_bytes(failure.requested_bytes)} more for {failure.phase}"
    return failure.message if failure else None


def telling_pass(cells: Sequence[AttentionCell]) -> str | None:
    return next((name for name in _BY_INTEREST if any(cell.samples(name) for cell in cells)), None)


def scatters(cell: AttentionCell, name: str) -> bool:
    """True if four or more samples have an interquartile range above SCATTERED of the median."""
    samples = cell.samples(name)
    if len(samples) < 4:
        return False
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return (high - low) / median(samples) > SCATTERED


def shape_label(shape: AttentionSpec, others: Sequence[AttentionSpec]) -> str:
    words = [shape.sizes_label]
    if len({other.causal for other in others}) > 1:
        words += ["causal"] * shape.causal
    if len({other.dtype for other in others}) > 1:
        words.append(shape.dtype)
    return " ".join(words)


def notes_of(cells: Iterable[AttentionCell]) -> list[str]:
    """List each distinct note once, with the first cell that has it and the number of further ones."""
    found = told_once((f"{cell.spec.label} {cell.spec.column}", note) for cell in cells for note in cell.notes)
    return [
        f"{note} ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''})" for note, names in found.items()
    ]


_SHAPE = (
    Column(
        key="shape",
        header="B×H×S×D",
        shared="{} (batch, heads, sequence, dimension)",
        wraps_from=14,
        note="B×H×S×D: batch, heads, sequence, dimension.",
    ),
    Column(key="mask", shared="{}"),
    Column(key="dtype", header="type", shared="{}"),
)


def _shape_row(shape: AttentionSpec, cells: Sequence[AttentionCell]) -> dict[str, Scalar]:
    shapes = [cell.spec.shape for cell in cells]
    return {
        "shape": shape_label(shape, shapes),
        "mask": ("causal" if shape.causal else "not causal") if len({s.causal for s in shapes}) == 1 else None,
        "dtype": shape.dtype if len({s.dtype for s in shapes}) == 1 else None,
    }


def speed_table(cells: Sequence[AttentionCell], peer: str | None, name: str) -> Table | None:
    """Tabulate median times, one row per shape, one column per implementation and one of its speed; `~` marks scattered
    samples.

    A failed cell shows the kind of its failure.
    """
    columns = list(dict.fromkeys(cell.spec.column for cell in cells))
    if len(columns) < 2 or not any(cell.samples(name) for cell in cells):
        return None
    peers = peers_of(cells, peer)
    rows: dict[object, dict[str, Scalar]] = {}
    for cell in cells:
        seconds, is_peer = cell.median_s(name), cell is peers.get(cell.spec.shape)
        told = cell.failure.kind.replace("_", " ") if seconds is None and cell.failure else seconds
        row = rows.setdefault(cell.spec.shape, _shape_row(cell.spec.shape, cells))
        row[cell.spec.column] = f"~{units.format_time(seconds)}" if seconds and scatters(cell, name) else told
        row[f"{cell.spec.column} ratio"] = None if is_peer else speed(cell, peers, name)
    caption = f"Median time of {PASS_WORDS[name]}."
    if len(cells) < len(columns) * len(rows):
        caption += " –: not in this benchmark, or no speed to compare."
    if any(scatters(cell, name) for cell in cells):
        caption += f" ~ marks a median whose interquartile range exceeds {SCATTERED:.0%} of it."
    note = f"Speed: relative to {peer}."
    by_implementation = [
        column
        for each in columns
        for column in (
            Column(key=each, header=each, quantity=TIME),
            Column(key=f"{each} ratio", header="speed", quantity=TIMES, rank=1, note=note),
        )
    ]
    return Table(name="shapes", columns=(*_SHAPE, *by_implementation), rows=tuple(rows.values()), caption=caption)


def mean_speeds(cells: Sequence[AttentionCell], peer: str | None) -> Table | None:
    peers = peers_of(cells, peer)
    rows: list[Row] = []
    for column in dict.fromkeys(cell.spec.column for cell in cells if cell.spec.column != peer):
        own = [cell for cell in cells if cell.spec.column == column]
        found = {name: [s for cell in own if (s := speed(cell, peers, name)) is not None] for name in PASSES}
        if any(found.values()):
            row: Row = {"implementation": column, "shapes": max(map(len, found.values()))}
            for name, speeds in found.items():
                row |= {name: geometric_mean(speeds), f"{name}_min": min(speeds)} if speeds else {}
            rows.append(row)
    if not peer or not rows:
        return None
    return Table(
        name="mean_speeds",
        columns=(
            Column(key="implementation"),
            Column(key="shapes", quantity=LABEL, rank=2),
            *(
                column
                for name in PASSES
                for column in (
                    Column(key=name, header=name, quantity=TIMES, bar=True, note=BOTH if name == "both" else ""),
                    Column(key=f"{name}_min", header=f"{name}, min", quantity=TIMES, rank=1),
                )
            ),
        ),
        rows=tuple(rows),
        caption=f"Speed relative to {peer} over the shapes that both kernels ran: geometric mean, and least (min).",
    )


_HEAD = (*_SHAPE, Column(key="column", header="implementation", shared="{}"))


def cell_tables(cells: Sequence[AttentionCell], peer: str | None) -> Iterator[Section]:
    rows = [
        row | _shape_row(cell.spec.shape, cells)  # the sizes that distinguish the shapes
        for row, cell in zip(attention_rows(cells, peer), cells, strict=True)
    ]

    def table(
        name: str, figures: Sequence[Figure[AttentionCell]], shown: Sequence[Row], caption: str, *last: Column
    ) -> Table:
        return Table(name=name, columns=(*_HEAD, *Column.of(figures), *last), rows=tuple(shown), caption=caption)

    caption = (
        "Median times; implementations alternate. On a GPU caches are cold, and the device is kept "
        "busy until the host has launched the pass."
    )
    yield Section.of(
        "Time and rate", table("times", (*PASS_TIMES, *speeds(cells, peer), *PASS_RATES), rows, caption, RESULT)
    )
    measured = [row for row in rows if row["saved_bytes"] is not None or row["forward_peak_bytes"] is not None]
    if measured:
        known = [row for row in rows if row in measured or row["status"] == "out_of_memory"]
        yield Section.of(
            "Memory beyond the inputs",
            table("memory", MEMORY, known, "Bytes beyond the inputs and the output's gradient.", RESULT),
        )
    checked = [row for row in rows if any(row[f"{tensor}_error"] is not None for tensor in TENSORS)]
    caption = "Multiples of the error of plain attention in the same type."
    yield Section.of("Error against float64", table("errors", ERRORS, checked, caption))


def account_table(account: AttentionAccount) -> Table:
    rows: list[Row] = [
        {
            "tensor": term.what,
            "formula": term.formula,
            "shape": "×".join(map(str, term.shape)),
            "element_bytes": term.element_bytes,
            "num_bytes": term.num_bytes,
            "size_bytes": term.num_bytes,
            "saved": "yes" if term.kept else None,
        }
        for term in account.terms
    ]
    rows.append({"tensor": "sum", "num_bytes": account.total_bytes, "size_bytes": account.total_bytes})
    return Table(
        name="tensors",
        columns=(
            Column(key="tensor"),
            Column(key="formula", header="bytes in symbols"),
            Column(key="shape", rank=1),
            Column(key="element_bytes", header="e", quantity=LABEL, rank=2),
            Column(key="num_bytes", header="bytes", quantity=NUMBER, rank=3),
            Column(key="size_bytes", header="size"),
            Column(key="saved", header="saved for backward", rank=1),
        ),
        rows=tuple(rows),
    )
