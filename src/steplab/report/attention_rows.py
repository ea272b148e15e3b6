"""A benchmark of attention as rows, and as the tables people read: time and speed, memory, errors."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from steplab import units
from steplab.records.attention import AttentionCell
from steplab.records.rows import Row, Scalar
from steplab.report.columns import Column, figure_column
from steplab.report.titled_table import TitledTable
from steplab.specs.attention import PASSES, AttentionSpec

TENSORS = {"output": "output", "queries": "dQ", "keys": "dK", "values": "dV"}
"""What errors are of, and what it is called beside a figure."""
_PEERS = ("sdpa_flash", "sdpa", "plain")


def default_peer(cells: Sequence[AttentionCell]) -> str | None:
    """Whom the others are compared with where nobody is named: the first of sdpa_flash, sdpa and plain there is."""
    columns = {cell.spec.column for cell in cells}
    return next((name for name in _PEERS if name in columns), None) if len(columns) > 1 else None


def median_s(cell: AttentionCell, name: str) -> float | None:
    """Median time of a pass; None where it was not timed."""
    samples = cell.samples(name)
    return median(samples) if samples else None


def flops_per_s(cell: AttentionCell, name: str) -> float | None:
    """FLOPs of a pass, by the convention of the record, over its median time."""
    seconds, flops = median_s(cell, name), cell.flops.get(name)
    return flops / seconds if seconds and flops else None


def peers_of(cells: Sequence[AttentionCell], peer: str | None) -> dict[AttentionSpec, AttentionCell]:
    """The peer's cell for each shape."""
    return {cell.spec.shape: cell for cell in cells if cell.spec.column == peer}


def speed(cell: AttentionCell, peers: Mapping[AttentionSpec, AttentionCell], name: str) -> float | None:
    """How many times as fast as the peer on the same shape: the peer's median over the cell's."""
    peer = peers.get(cell.spec.shape)
    own_s, peer_s = median_s(cell, name), median_s(peer, name) if peer else None
    return peer_s / own_s if own_s and peer_s else None


def attention_rows(cells: Sequence[AttentionCell], peer: str | None = None) -> list[Row]:
    """A row a cell: what was asked, medians, rates, memory, errors; with `peer`, speeds against it."""
    peers = peers_of(cells, peer)
    return [_row(cell, peer, peers) for cell in cells]


def _row(cell: AttentionCell, peer: str | None, peers: Mapping[AttentionSpec, AttentionCell]) -> Row:
    spec, memory = cell.spec, cell.memory
    row: Row = {
        "shape": spec.sizes_label,
        **{name: getattr(spec, name) for name in ("batch", "heads", "kv_heads", "queries", "keys", "dim")},
        "causal": "yes" if spec.causal else "no",
        "dtype": spec.dtype,
        "implementation": spec.implementation,
        "compile": spec.compile,
        "column": spec.column,
        "status": cell.status,
        "repeats": max((len(cell.samples(name)) for name in PASSES), default=0) or None,
    }
    row |= {f"{name}_s": median_s(cell, name) for name in PASSES}
    row |= {f"{name}_flops_per_s": flops_per_s(cell, name) for name in PASSES}
    row |= {"against": peer} | {f"{name}_speed": speed(cell, peers, name) for name in PASSES}
    row |= {
        "first_call_s": cell.first_call_s,
        "saved_bytes": memory.saved_bytes if memory else None,
        "forward_peak_bytes": memory.forward_peak_bytes if memory else None,
        "both_peak_bytes": memory.both_peak_bytes if memory else None,
        "checked_heads": cell.checked_heads,
    }
    errors = {error.tensor: error for error in cell.errors}
    for tensor in TENSORS:
        error = errors.get(tensor)
        row |= {
            f"{tensor}_error": error.relative if error else None,
            f"{tensor}_plain_error": error.plain_relative if error else None,
            f"{tensor}_error_ratio": _over(error.relative, error.plain_relative) if error else None,
            f"{tensor}_max_abs": error.max_abs if error else None,
            f"{tensor}_plain_max_abs": error.plain_max_abs if error else None,
        }
    row["failure"] = failure_words(cell)
    return row


def failure_words(cell: AttentionCell) -> str | None:
    """Why a cell failed, short: of memory, what was asked for and in which pass."""
    failure = cell.failure
    if failure and failure.kind == "out_of_memory" and failure.requested_bytes:
        return f"{units.format_bytes(failure.requested_bytes)} more for {failure.phase}"
    return failure.message if failure else None


def _over(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


def _times(value: Scalar) -> str:
    return f"{value:.2f}×" if isinstance(value, (int, float)) else str(value)


def _time(value: Scalar) -> str:
    return units.format_time(value) if isinstance(value, (int, float)) else str(value)


def _rate(value: Scalar) -> str:
    return units.format_rate(value, "FLOP/s") if isinstance(value, (int, float)) else str(value)


def _size(value: Scalar) -> str:
    return units.format_bytes(value) if isinstance(value, (int, float)) else str(value)


def _error(value: Scalar) -> str:
    return f"{value:.1e}" if isinstance(value, (int, float)) else str(value)


_CAUSAL = {"yes": "causal", "no": "not causal"}
_HEAD = (
    Column(key="shape", header="B×H×S×D", caption="{} (batch, heads, sequence, dimension)"),
    Column(key="causal", header="causal", show=lambda value: _CAUSAL[str(value)]),
    Column(key="dtype", header="type"),
    Column(key="column", header="implementation"),
)
_RESULT = Column(key="failure", header="result", shared=False, wraps_from=12)
ERROR_COLUMNS = (
    *_HEAD,
    *(figure_column(f"{tensor}_error_ratio", name, _times, 0) for tensor, name in TENSORS.items()),
    *(figure_column(f"{tensor}_error", f"{name} relative", _error, 1) for tensor, name in TENSORS.items()),
    *(figure_column(f"{tensor}_max_abs", f"{name} largest", _error, 2) for tensor, name in TENSORS.items()),
)
MEMORY_COLUMNS = (
    *_HEAD,
    figure_column("saved_bytes", "kept", _size, 0),
    figure_column("forward_peak_bytes", "peak, forward", _size, 1),
    figure_column("both_peak_bytes", "peak, both", _size, 0),
    _RESULT,
)


def time_columns(peer: str | None) -> tuple[Column, ...]:
    """Times, rates, and speeds against the peer."""
    words = {"forward": "forward", "backward": "backward", "both": "both"}
    return (
        *_HEAD,
        *(figure_column(f"{name}_s", word, _time, 0) for name, word in words.items()),
        *(figure_column(f"{name}_speed", f"{word} vs {peer}", _times, 1) for name, word in words.items() if peer),
        *(figure_column(f"{name}_flops_per_s", f"{word} rate", _rate, 2) for name, word in words.items()),
        figure_column("first_call_s", "first call", _time, 3),
        _RESULT,
    )


def attention_tables(cells: Sequence[AttentionCell], peer: str | None) -> list[TitledTable]:
    """Time, memory and errors of the cells; those about which nothing is known are left out."""
    rows = attention_rows(cells, peer)
    checked = [row for row in rows if any(row[f"{tensor}_error"] is not None for tensor in TENSORS)]
    kept = [row for row in rows if row["saved_bytes"] is not None or row["forward_peak_bytes"] is not None]
    tables = [
        TitledTable(
            title="Time and rate",
            columns=time_columns(peer),
            rows=rows,
            caption="Medians, implementations in turns; a GPU's caches are cold, and it is kept busy until Python has "
            "started the pass. FLOPs are 4 B H Sq Sk D forward, half "
            "if causal, and 2.5 times as many backward, whatever is executed.",
        )
    ]
    if kept:
        tables.append(
            TitledTable(
                title="Memory beyond the inputs",
                columns=MEMORY_COLUMNS,
                rows=[row for row in rows if row in kept or row["status"] == "out_of_memory"],
                caption="Kept: from the end of forward until backward, the output among it, beside the inputs. Peak: "
                "most at once, the output and the gradients among it.",
            )
        )
    if checked:
        tables.append(
            TitledTable(
                title="Error against float64",
                columns=ERROR_COLUMNS,
                rows=checked,
                caption="As a multiple of plain attention's error in the same type. Relative: norm of the difference "
                "over the norm of the result. Largest: difference of an element.",
            )
        )
    return tables


def notes_of(cells: Iterable[AttentionCell]) -> list[str]:
    """What is to be said of the cells, each text once, with the shapes and implementations it is told of."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        for note in cell.notes:
            found.setdefault(note, []).append(f"{cell.spec.label} {cell.spec.column}")
    return [
        f"{note} ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''})" for note, names in found.items()
    ]
