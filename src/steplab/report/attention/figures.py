"""Figures of a benchmark of attention, and its cells as rows."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median, quantiles

from steplab import units
from steplab.comparison.samples import compare_samples
from steplab.records.attention import ERRORS, MEMORY, PASS_RATES, PASS_TIMES, AttentionCell
from steplab.records.comparison import Ratio
from steplab.records.figure import Figure, values
from steplab.records.rows import Row
from steplab.report.kit.document import row_of
from steplab.report.kit.grouping import told_once
from steplab.specs.attention import PASSES, AttentionSpec

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


def peers_of(cells: Sequence[AttentionCell], peer: str | None) -> dict[AttentionSpec, AttentionCell]:
    """The peer's cell for each shape."""
    return {cell.spec.shape: cell for cell in cells if cell.spec.column == peer}


def speed(cell: AttentionCell, peers: Mapping[AttentionSpec, AttentionCell], name: str) -> float | None:
    """Speed relative to the peer on the same shape: the peer's median time over the cell's."""
    peer = peers.get(cell.spec.shape)
    own_s, peer_s = cell.median_s(name), peer.median_s(name) if peer else None
    return peer_s / own_s if own_s and peer_s else None


def time_ratio(cell: AttentionCell, peer: AttentionCell, name: str) -> Ratio:
    """The time of a pass over the peer's; repeats that took turns are compared pair by pair."""
    a, b = peer.samples(name), cell.samples(name)
    if peer.spec.column in cell.interleaved and len(a) == len(b):
        return compare_samples([[sample] for sample in a], [[sample] for sample in b], in_turns=True)
    return compare_samples([a], [b], in_turns=False)


def attention_rows(cells: Sequence[AttentionCell], peer: str | None = None) -> list[Row]:
    """One row per cell: its spec, medians, rates, memory and errors; with `peer`, speeds relative to it."""
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
    """The speed of each pass relative to the peer's; tables show it only with a peer."""
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
