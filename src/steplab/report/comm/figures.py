"""Figures of a benchmark of collectives, and its cells as rows."""

from collections.abc import Sequence
from statistics import median

from steplab import stats
from steplab.records.comm import CommCell
from steplab.records.rows import Row
from steplab.report.kit.document import row_of


def comm_rows(cells: Sequence[CommCell]) -> list[Row]:
    """One row per cell: the spec, times of the slowest rank, bandwidths, the spread over ranks, the check."""
    return [_row(cell) for cell in cells]


def _row(cell: CommCell) -> Row:
    spec, slowest = cell.spec, cell.slowest
    return {
        **row_of(spec, "collective", "backend", "device"),
        "way": spec.transport,
        **row_of(spec, "world_size", "dtype", "size_bytes"),
        **row_of(cell, "message_bytes", "wire_bytes", "status"),
        "samples": len(slowest.best_s) if slowest else None,
        "calls_per_sample": slowest.calls_per_sample if slowest else None,
        "time_s": slowest.median_s if slowest else None,
        "min_s": min(slowest.best_s) if slowest else None,
        "p95_s": stats.percentile(slowest.best_s, 95) if slowest else None,
        "algbw_bytes_per_s": algorithm_bandwidth(cell),
        "busbw_bytes_per_s": bus_bandwidth(cell),
        "alone_s": max((median(times.alone_s) for times in cell.ranks if times.alone_s), default=None),
        "fastest_rank_s": min((times.median_s for times in cell.ranks), default=None),
        "rank_spread": rank_spread(cell),
        "checked_elements": cell.check.num_elements if cell.check else None,
        "wrong_elements": cell.check.num_wrong if cell.check else None,
        "failure": cell.failure.message if cell.failure else None,
    }


def algorithm_bandwidth(cell: CommCell) -> float | None:
    """Bytes of the message per second; None for a failure."""
    return cell.message_bytes / cell.slowest.median_s if cell.slowest else None


def bus_bandwidth(cell: CommCell) -> float | None:
    """Bytes per second that each rank has to send at least (nccl-tests); None for a failure."""
    return cell.wire_bytes / cell.slowest.median_s if cell.slowest and cell.wire_bytes is not None else None


def rank_spread(cell: CommCell) -> float | None:
    """Relative difference of the slowest rank's median from the fastest's; None for a failure."""
    medians = [times.median_s for times in cell.ranks]
    return max(medians) / min(medians) - 1 if medians else None
