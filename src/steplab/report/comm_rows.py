"""A benchmark of collectives as rows, and as the tables people read: bandwidth by size, every cell, the profile."""

from collections.abc import Sequence
from statistics import median

from steplab import stats, units
from steplab.records.comm import CommCell, CommFit, CommRun
from steplab.records.rows import Row, Scalar
from steplab.report.columns import ABSENT, Column, figure_column, show_time
from steplab.report.grid import Grid
from steplab.report.titled_table import TitledTable
from steplab.specs.comm import COLLECTIVES

GB = 1e9


def comm_rows(cells: Sequence[CommCell]) -> list[Row]:
    """A row a cell: what was asked, times of the slowest rank, bandwidths, the ranks' spread, the check."""
    return [_row(cell) for cell in cells]


def _row(cell: CommCell) -> Row:
    spec, slowest = cell.spec, cell.slowest
    row: Row = {
        "collective": spec.collective,
        "backend": spec.backend,
        "device": spec.device,
        "way": spec.way,
        "world_size": spec.world_size,
        "dtype": spec.dtype,
        "size_bytes": spec.size_bytes,
        "message_bytes": cell.message_bytes,
        "wire_bytes": cell.wire_bytes,
        "status": cell.status,
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
    return row


def algorithm_bandwidth(cell: CommCell) -> float | None:
    """Bytes of the message a second; None for a failure."""
    return cell.message_bytes / cell.slowest.median_s if cell.slowest else None


def bus_bandwidth(cell: CommCell) -> float | None:
    """Bytes that each rank sends at the least, a second; None for a failure."""
    return cell.wire_bytes / cell.slowest.median_s if cell.slowest and cell.wire_bytes is not None else None


def rank_spread(cell: CommCell) -> float | None:
    """By how much the slowest rank's median exceeds the fastest's, as a share of that; None for a failure."""
    medians = [times.median_s for times in cell.ranks]
    return max(medians) / min(medians) - 1 if medians else None


def _size(value: Scalar) -> str:
    return units.format_message(value) if isinstance(value, (int, float)) else str(value)


def show_gb(value: Scalar) -> str:
    """Bytes a second as GB/s without the unit."""
    return units.three_digits(value / GB) if isinstance(value, (int, float)) else str(value)


def _share(value: Scalar) -> str:
    return units.format_percent(value) if isinstance(value, (int, float)) else str(value)


def _ranks(value: Scalar) -> str:
    return "all" if value is None else str(value)


_HEAD = (
    Column(key="collective", header="collective"),
    Column(key="way", header="backend"),
    Column(key="dtype", header="type"),
    Column(key="world_size", header="ranks", numeric=True, caption="{} ranks"),
)
CELL_COLUMNS = (
    *_HEAD,
    Column(key="size_bytes", header="size", show=_size, numeric=True, caption="{}"),
    figure_column("busbw_bytes_per_s", "busbw GB/s", show_gb, 0),
    figure_column("algbw_bytes_per_s", "algbw GB/s", show_gb, 2),
    figure_column("time_s", "median", show_time, 0),
    figure_column("min_s", "least", show_time, 1),
    figure_column("p95_s", "p95", show_time, 1),
    figure_column("alone_s", "alone", show_time, 3),
    figure_column("rank_spread", "spread", _share, 2),
    Column(key="failure", header="result", shared=False, wraps_from=12),
)
FIT_COLUMNS = (
    Column(key="collective", header="collective"),
    Column(key="way", header="backend"),
    Column(key="dtype", header="type"),
    Column(key="ranks", header="ranks", numeric=True, caption="{} ranks"),
    figure_column("alpha_s", "α", show_time, 0),
    figure_column("bandwidth_bytes_per_s", "1/β GB/s", show_gb, 0),
    figure_column("gamma_s_per_rank", "γ a rank", show_time, 0),
    figure_column("rms_relative", "residual", _share, 0),
    figure_column("worst_relative", "worst", _share, 1),
    figure_column("num_points", "points", str, 2),
)


def fit_rows(profile: Sequence[CommFit]) -> list[Row]:
    """A row a line of the profile."""
    return [
        {
            "collective": fit.collective,
            "way": fit.way,
            "dtype": fit.dtype,
            "world_size": fit.world_size,
            "ranks": _ranks(fit.world_size),
            "alpha_s": fit.alpha_s,
            "beta_s_per_byte": fit.beta_s_per_byte,
            "bandwidth_bytes_per_s": 1 / fit.beta_s_per_byte if fit.beta_s_per_byte else None,
            "gamma_s_per_rank": fit.gamma_s_per_rank,
            "rms_relative": fit.rms_relative,
            "worst_relative": fit.worst_relative,
            "num_points": fit.num_points,
        }
        for fit in profile
    ]


def comm_tables(run: CommRun) -> list[TitledTable]:
    """Every cell, and the profile where there is one."""
    timeline = any(times.device_s for cell in run.cells for times in cell.ranks)
    if timeline:
        how = (
            "calls back to back, by events on the device, short ones in groups of calls_per_sample; alone: one call "
            "after a barrier, by the host's clock"
        )
        if any(times.device_s and times.num_waits is None for cell in run.cells for times in cell.ranks):
            how = (
                "calls back to back, with an event around each, and Python given no head start: short ones have part "
                "of both in their time, and so has α; alone: one call after a barrier, by the host's clock"
            )
    else:
        how = "calls one by one, each after a barrier, by the host's clock"
    tables = [
        TitledTable(
            title="Every cell",
            columns=tuple(column for column in CELL_COLUMNS if timeline or column.key != "alone_s"),
            rows=comm_rows(run.cells),
            caption=f"Times of the slowest rank, {how}. Spread: by how much the slowest rank's median exceeds the "
            "fastest's. Results were checked before they were timed.",
        )
    ]
    if run.profile:
        fitted = fit_rows(run.profile)
        residual = (
            " Residual: root mean square of the relative differences; worst: the largest of them, above zero where "
            "the fit is too long."
            if any(row["rms_relative"] is not None for row in fitted)
            else ""
        )
        tables.append(
            TitledTable(
                title="Communication profile",
                columns=FIT_COLUMNS,
                rows=fitted,
                caption="Time of a call = α + β · bytes on the wire (+ γ · ranks, fitted over all world sizes)."
                + residual,
            )
        )
    return tables


def bandwidth_grid(cells: Sequence[CommCell]) -> Grid | None:
    """Bus bandwidth: a row a collective, backend and world size, a column a size. None without any."""
    sizes = sorted({cell.spec.size_bytes for cell in cells})
    lines: dict[tuple[str, str, str, str], dict[int, CommCell]] = {}
    for cell in sorted(cells, key=lambda cell: COLLECTIVES.index(cell.spec.collective)):
        spec = cell.spec
        key = (spec.collective, spec.way, spec.dtype, str(spec.world_size))
        lines.setdefault(key, {})[spec.size_bytes] = cell
    if not any(bus_bandwidth(cell) for cell in cells):
        return None
    names = ("collective", "backend", "type", "ranks")
    shared = [len({key[place] for key in lines}) == 1 for place in range(len(names))]
    kept = [place for place in range(len(names)) if place == 0 or not shared[place]]
    only = next(iter(lines))
    told = [f"{only[place]} ranks" if place == 3 else only[place] for place in (1, 2, 3) if shared[place]]
    return Grid(
        headers=(*(names[place] for place in kept), *(units.format_message(size) for size in sizes)),
        rows=tuple(
            (*(key[place] for place in kept), *(_bandwidth(line.get(size)) for size in sizes))
            for key, line in lines.items()
        ),
        numeric=(*(place == 3 for place in kept), *(True for _ in sizes)),
        caption=" · ".join([*told, "GB/s (1e9), as nccl-tests counts it"]),
    )


def _bandwidth(cell: CommCell | None) -> str:
    if cell is None:
        return ABSENT
    if cell.failure:
        return cell.failure.kind.replace("_", " ")
    return show_gb(bus_bandwidth(cell))
