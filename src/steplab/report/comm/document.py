"""What a report says of a benchmark of collectives: bandwidth by size, pictures, every cell, the fitted profile."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from steplab import units
from steplab.records.comm import COMM_FIGURES, CommCell, CommFit, CommRun
from steplab.records.figure import values
from steplab.records.rows import Row, Scalar
from steplab.report.comm.charts import backends_side_by_side, bandwidth_over_size, time_over_ranks, time_over_size
from steplab.report.comm.verdict import comm_name, comm_verdict
from steplab.report.kit.document import RESULT, Block, Column, Section, Sentences, Table, later, row_of
from steplab.report.kit.grouping import grouped
from steplab.report.kit.quantities import GB_PER_S, LABEL, MESSAGE, PERCENT, TIME, quotient
from steplab.report.kit.text import dotted, made, why_failed
from steplab.report.report import Context, RecordReport
from steplab.specs.comm import COLLECTIVES

TERMS = (
    (
        "algbw, busbw",
        "Algorithm bandwidth is the message's bytes per second. Bus bandwidth, as nccl-tests defines it, is that times "
        "2(n−1)/n for an all-reduce, (n−1)/n for all-gather, reduce-scatter and all-to-all, and 1 for broadcast and "
        "send/receive: what each rank has to send at least, to be compared with the link's own bandwidth. GB is 1e9 "
        "bytes.",
    ),
    (
        "time of a call",
        "Median over its samples on the slowest rank. Back to back, on a GPU: the time between events around calls "
        "that nothing waits between; a sample of short calls is the mean of as many as take a millisecond. Alone: one "
        "call after a barrier, by the host's clock, which is all there is on a CPU. Spread: how much longer the "
        "slowest rank takes than the fastest.",
    ),
    (
        "α, β, γ",
        "The line fitted to the times of a collective: α for a call that moves nothing, β for each byte that a rank "
        "has to send, γ for each rank where several world sizes are fitted together (Hockney 1994). 1/β is the bus "
        "bandwidth that long messages approach. The fit minimises the squares of the relative differences; the "
        "residual is their root mean square.",
    ),
)
"""Terms of this section, and what they mean."""


def comm_cell_line(cell: CommCell) -> str:
    """The result of one cell, for a line of progress."""
    if cell.failure or cell.slowest is None:
        failed = why_failed(cell.failure) if cell.failure else "not measured"
        return f"{cell.spec.label}: {failed}"
    return f"{cell.spec.label}: {units.format_time(cell.slowest.median_s)}, {GB_PER_S.show(cell.bus_bandwidth)} GB/s"


def _page_heading(run: CommRun) -> str:
    libraries = [f"{name.upper()} {version}" for name, version in run.libraries.items()]
    return dotted(_processes(run) if run.ranks else None, *libraries, run.created_utc, f"benchmark {run.id}")


def _processes(run: CommRun) -> str:
    """'2 ranks: node1 cuda:0 NVIDIA H200, cuda:1 NVIDIA H200', by machine."""
    hosts = grouped(run.ranks, lambda rank: rank.host)
    machines = "; ".join(f"{host} {_counted_devices(rank.device for rank in own)}" for host, own in hosts.items())
    return f"{units.counted(len(run.ranks), 'rank')}: {machines}"


def _counted_devices(devices: Iterable[str]) -> str:
    """Each device once, with the number of times it occurs."""
    return ", ".join(device if count == 1 else f"{count} × {device}" for device, count in Counter(devices).items())


def _sections(run: CommRun) -> Iterator[Section]:
    if any(cell.bus_bandwidth for cell in run.cells):
        yield Section.of("Bus bandwidth", later(bandwidth_over_size, run.cells), bandwidth_table(run.cells))
    yield Section.of("Time over message size", later(time_over_size, run.cells, run.profile))
    yield Section.of("Time over ranks", later(time_over_ranks, run.cells))
    yield Section.of("Backends", later(backends_side_by_side, run.cells))
    yield Section.of("Every cell", _cells(run))
    yield Section.of("Communication profile", _profile(run.profile))
    yield Section.notes(run.notes)


_HEAD = (
    Column(key="collective"),
    Column(key="way", header="backend", shared="{}"),
    Column(key="dtype", header="type", shared="{}"),
    Column(key="world_size", header="ranks", quantity=LABEL, shared="{} rank{s}"),
)


def bandwidth_table(cells: Sequence[CommCell]) -> Table:
    """Bus bandwidth: one row per collective, backend and world size, one column per message size."""
    sizes = sorted({cell.spec.size_bytes for cell in cells})
    rows: dict[tuple[Scalar, ...], dict[str, Scalar]] = {}
    for cell in sorted(cells, key=lambda cell: COLLECTIVES.index(cell.spec.collective)):
        spec = cell.spec
        head: dict[str, Scalar] = {
            "collective": spec.collective,
            "way": spec.transport,
            "dtype": spec.dtype,
            "world_size": spec.world_size,
        }
        row = rows.setdefault(tuple(head.values()), head)
        row[str(cell.spec.size_bytes)] = cell.failure.kind.replace("_", " ") if cell.failure else cell.bus_bandwidth
    return Table(
        name="bus_bandwidth",
        columns=(
            *_HEAD,
            *(Column(key=str(size), header=units.format_message(size), quantity=GB_PER_S) for size in sizes),
        ),
        rows=tuple(rows.values()),
        caption="GB/s (1e9 bytes per second), as nccl-tests defines bus bandwidth.",
    )


_TIMED_ONE_BY_ONE = "Calls are timed one by one, each after a barrier, by the host's clock."
_TIMED_BACK_TO_BACK = (
    "Calls follow each other back to back and are timed by events on the device, short ones in groups of "
    "calls_per_sample. Alone is one call after a barrier, by the host's clock."
)
_TIMED_EACH = (
    "Calls follow each other back to back with an event around each: times of short messages, and α, include event "
    "and launch overhead. Alone is one call after a barrier, by the host's clock."
)


def comm_rows(cells: Sequence[CommCell]) -> list[Row]:
    """One row per cell: the spec, times of the slowest rank, bandwidths, the spread over ranks, the check."""
    return [
        {
            **row_of(cell.spec, "collective", "backend", "device"),
            "way": cell.spec.transport,
            **row_of(cell.spec, "world_size", "dtype", "size_bytes"),
            **row_of(cell, "message_bytes", "wire_bytes", "status"),
            **values(COMM_FIGURES, cell),
            "failure": cell.failure.message if cell.failure else None,
        }
        for cell in cells
    ]


def _cells(run: CommRun) -> Table:
    ranks = [times for cell in run.cells for times in cell.ranks]
    on_device = [times for times in ranks if times.device_s]
    how = _TIMED_BACK_TO_BACK if on_device else _TIMED_ONE_BY_ONE
    if any(times.num_waits is None for times in on_device):
        how = _TIMED_EACH
    columns = (
        *_HEAD,
        Column(key="size_bytes", header="size", quantity=MESSAGE, shared="{}"),
        *Column.of(COMM_FIGURES),
        RESULT,
    )
    return Table(
        name="cells",
        columns=tuple(column for column in columns if on_device or column.key != "alone_s"),
        rows=tuple(comm_rows(run.cells)),
        caption=f"Times of the slowest rank. {how} Spread is how much longer the slowest rank's median is than the "
        "fastest's. Results were checked before they were timed.",
        empty="nothing was measured",
    )


def _profile(profile: Sequence[CommFit]) -> Table:
    caption = "Time of a call = α + β · bytes on the wire (+ γ · ranks, where all world sizes are fitted together)."
    if any(fit.rms_relative is not None for fit in profile):
        caption += (
            " Residual is the root mean square of the relative differences, and worst the largest of them, above zero "
            "where the fit is too long."
        )
    return Table.of(
        "profile",
        profile,
        (
            *_HEAD[:3],
            Column(key="ranks", quantity=LABEL, shared="{} rank{s}", value=lambda fit: fit.world_size or "all"),
            Column(key="alpha_s", header="α"),
            Column(
                key="bandwidth_bytes_per_s",
                header="1/β GB/s",
                quantity=GB_PER_S,
                value=lambda fit: quotient(1, fit.beta_s_per_byte),
            ),
            Column(key="gamma_s_per_rank", header="γ per rank", quantity=TIME),
            Column(key="rms_relative", header="residual", quantity=PERCENT),
            Column(key="worst_relative", header="worst", quantity=PERCENT, rank=1),
            Column(key="num_points", header="points", quantity=LABEL, rank=2),
        ),
        caption,
    )


def _where(run: CommRun) -> list[tuple[str, str]]:
    ranks = [("ranks", _processes(run))] if run.ranks else []
    return [*ranks, *((name.upper() if name == "nccl" else name, version) for name, version in run.libraries.items())]


def _parts(runs: Sequence[CommRun], context: Context, section: Callable[[CommRun], Section]) -> Iterator[Block | None]:
    """The benchmarks in their order; last, where backends were measured in different ones, all together."""
    yield from map(section, runs)
    together = backends_side_by_side([cell for run in runs for cell in run.cells])
    if len(runs) > 1 and together and not any(backends_side_by_side(run.cells) for run in runs):
        ids = Sentences.of([dotted(*(f"benchmark {run.id}" for run in runs))], "note")
        yield Section.of("Backends side by side", ids, together)


REPORT = RecordReport(
    chapter="Communication",
    anchor="communication",
    title=lambda run: f"Collectives: {run.name}" if run.name else comm_name(run).capitalize(),
    subtitle=lambda run: dotted(made(run, "benchmark"), run.device_name),
    heading=_page_heading,
    called=comm_name,
    answer=comm_verdict,
    sections=_sections,
    rows=lambda run: comm_rows(run.cells),
    terms=TERMS,
    where=_where,
    parts=_parts,
)
