"""Figures of a benchmark of attention, and its cells as rows."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median, quantiles

from steplab import units
from steplab.comparison.samples import compare_samples
from steplab.records.attention import AttentionCell
from steplab.records.comparison import Ratio
from steplab.records.rows import Row
from steplab.report.kit.document import row_of
from steplab.report.kit.grouping import told_once
from steplab.report.kit.quantities import quotient
from steplab.specs.attention import PASSES, AttentionSpec

TENSORS = {"output": "output", "queries": "dQ", "keys": "dK", "values": "dV"}
"""The tensors whose errors are measured, and their names beside a figure."""
PASS_WORDS = {"forward": "forward", "backward": "backward", "both": "forward + backward"}
"""The names of the passes in captions."""
_BY_INTEREST = ("both", "forward", "backward")
SCATTERED = 0.2
"""Interquartile range, relative to the median, above which a median is marked. Kernels repeat within a few per cent;
samples that scatter more include waits for the host, or another process used the device."""
_PEERS = ("sdpa_flash", "sdpa", "plain")


def default_peer(cells: Sequence[AttentionCell]) -> str | None:
    """The implementation that speeds are relative to by default: the first measured of sdpa_flash, sdpa and plain."""
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
    """Speed relative to the peer on the same shape: the peer's median time over the cell's."""
    peer = peers.get(cell.spec.shape)
    own_s, peer_s = median_s(cell, name), median_s(peer, name) if peer else None
    return peer_s / own_s if own_s and peer_s else None


def time_ratio(cell: AttentionCell, peer: AttentionCell, name: str) -> Ratio:
    """The time of a pass over the peer's; repeats that took turns are compared pair by pair."""
    a, b = peer.samples(name), cell.samples(name)
    if peer.spec.column in cell.interleaved and len(a) == len(b):
        return compare_samples([[sample] for sample in a], [[sample] for sample in b], in_turns=True)
    return compare_samples([a], [b], in_turns=False)


def attention_rows(cells: Sequence[AttentionCell], peer: str | None = None) -> list[Row]:
    """One row per cell: its spec, medians, rates, memory and errors; with `peer`, speeds relative to it."""
    peers = peers_of(cells, peer)
    return [_row(cell, peer, peers) for cell in cells]


def _row(cell: AttentionCell, peer: str | None, peers: Mapping[AttentionSpec, AttentionCell]) -> Row:
    spec = cell.spec
    row: Row = {
        "shape": spec.sizes_label,
        **row_of(spec, "batch", "heads", "kv_heads", "queries", "keys", "dim"),
        "causal": "yes" if spec.causal else "no",
        **row_of(spec, "dtype", "implementation", "compile", "column"),
        "status": cell.status,
        "repeats": max((len(cell.samples(name)) for name in PASSES), default=0) or None,
    }
    row |= {f"{name}_s": median_s(cell, name) for name in PASSES}
    row |= {f"{name}_flops_per_s": flops_per_s(cell, name) for name in PASSES}
    row |= {"against": peer} | {f"{name}_speed": speed(cell, peers, name) for name in PASSES}
    row |= {
        "first_call_s": cell.first_call_s,
        **row_of(cell.memory, "saved_bytes", "forward_peak_bytes", "both_peak_bytes"),
        "checked_heads": cell.checked_heads,
    }
    errors = {error.tensor: error for error in cell.errors}
    for tensor in TENSORS:
        error = errors.get(tensor)
        row |= {
            f"{tensor}_error": error.relative if error else None,
            f"{tensor}_plain_error": error.plain_relative if error else None,
            f"{tensor}_error_ratio": quotient(error.relative, error.plain_relative) if error else None,
            f"{tensor}_max_abs": error.max_abs if error else None,
            f"{tensor}_plain_max_abs": error.plain_max_abs if error else None,
        }
    row["failure"] = failure_words(cell)
    return row


def failure_words(cell: AttentionCell) -> str | None:
    """Why a cell failed, in short; for out of memory, the size of the failed allocation and the pass."""
    failure = cell.failure
    if failure and failure.kind == "out_of_memory" and failure.requested_bytes:
        return f"{units.format_bytes(failure.requested_bytes)} more for {failure.phase}"
    return failure.message if failure else None


def telling_pass(cells: Sequence[AttentionCell]) -> str | None:
    """The most informative timed pass, which is both together where it was timed; None where no pass was timed."""
    return next((name for name in _BY_INTEREST if any(cell.samples(name) for cell in cells)), None)


def scatter(cell: AttentionCell, name: str) -> float:
    """Interquartile range of a pass's samples, relative to their median; 0 with fewer than four samples."""
    samples = cell.samples(name)
    if len(samples) < 4:
        return 0.0
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return (high - low) / median(samples)


def shape_label(shape: AttentionSpec, others: Sequence[AttentionSpec]) -> str:
    """The sizes that distinguish a shape from the others."""
    words = [shape.sizes_label]
    if len({other.causal for other in others}) > 1:
        words += ["causal"] * shape.causal
    if len({other.dtype for other in others}) > 1:
        words.append(shape.dtype)
    return " ".join(words)


def notes_of(cells: Iterable[AttentionCell]) -> list[str]:
    """The notes of the cells, each text once, with the shapes and implementations that it concerns."""
    found = told_once((f"{cell.spec.label} {cell.spec.column}", note) for cell in cells for note in cell.notes)
    return [
        f"{note} ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''})" for note, names in found.items()
    ]
