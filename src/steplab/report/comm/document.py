from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from steplab import units
from steplab.records.comm import COMM_FIGURES, CommCell, CommFit, CommRun
from steplab.records.figure import values
from steplab.records.rows import Row, Scalar
from steplab.report.comm.charts import bandwidth_over_size, time_over_size
from steplab.report.kit.document import RESULT, Column, Fact, Section, Table, Verdict, later, row_of
from steplab.report.kit.grouping import grouped
from steplab.report.kit.quantities import BYTES_PER_S, GB_PER_S, LABEL, MESSAGE, PERCENT, TIME, quotient
from steplab.report.kit.text import dotted, interruption, made, why_failed
from steplab.report.report import RecordReport, extremes
from steplab.specs.comm import COLLECTIVES
from steplab.stats import summarize

_APART = 0.1
_SAID = {"peer_copy": "steplab's peer_copy"}


def comm_name(run: CommRun) -> str:
    return run.name or f"collectives over {units.counted(run.study.num_processes, 'rank')}"


def comm_verdict(run: CommRun) -> Verdict:
    measured = [cell for cell in run.cells if cell.slowest]
    return Verdict(sentences=tuple(_sentences(run, measured)), cautions=tuple(_cautions(run, measured)))


def _sentences(run: CommRun, measured: Sequence[CommCell]) -> Iterator[str]:
    if not measured:
        return
    name = min((cell.spec.collective for cell in measured), key=COLLECTIVES.index)
    of_name = [cell for cell in measured if cell.spec.collective == name]
    ways = list(dict.fromkeys(cell.spec.transport for cell in of_name))
    ranks = max(cell.spec.world_size for cell in of_name)
    for way in ways[:2]:
        alike = [cell for cell in of_name if cell.spec.transport == way and cell.spec.world_size == ranks]
        if alike:
            yield _bandwidth(name, way, ranks, alike, run)
    if len(ways) == 1:
        yield from _scaling(name, of_name)
    if (told := _slowest(measured, ranks)) and len({cell.spec.collective for cell in measured}) > 1:
        yield told


def _bandwidth(name: str, way: str, ranks: int, cells: Sequence[CommCell], run: CommRun) -> str:
    longest, shortest = (pick(cells, key=lambda cell: cell.message_bytes) for pick in (max, min))
    told = f"{name} over {units.counted(ranks, 'rank')} ({_SAID.get(way, way)}) "
    if (bandwidth := longest.bus_bandwidth) and longest.wire_bytes and longest.slowest:
        times = summarize(longest.slowest.best_s)
        low, high = (GB_PER_S.show(longest.wire_bytes / time_s) for time_s in (times.high, times.low))
        between = f" ({'95 % interval ' * times.is_interval}{low} to {high})" if low != high else ""
        told += f"reaches {GB_PER_S.show(bandwidth)} GB/s of bus bandwidth{between} at "
        told += f"{units.format_message(longest.message_bytes)}"
    else:
        told += f"takes {_time(longest)} for {units.format_message(longest.message_bytes)}"
    if shortest is not longest:
        told += f" and takes {_time(shortest)} for {units.format_message(shortest.message_bytes)}"
    fit = next((f for f in run.profile if (f.collective, f.way, f.world_size) == (name, way, ranks)), None)
    if fit and fit.rms_relative is not None:
        residual = units.format_percent(fit.rms_relative)
        told += f"; the fitted latency is {units.format_time(fit.alpha_s)} (residual {residual})"
    return f"{told}."


def _time(cell: CommCell) -> str:
    assert cell.slowest is not None
    times = summarize(cell.slowest.best_s)
    between = f"{'95 % interval ' * times.is_interval}{units.format_time(times.low)} to {units.format_time(times.high)}"
    return f"{units.format_time(times.median)} ({between})"


def _scaling(name: str, cells: Sequence[CommCell]) -> Iterator[str]:
    sizes = [cell.spec.world_size for cell in cells]
    size_bytes = max(cell.spec.size_bytes for cell in cells)
    found = {cell.spec.world_size: cell.bus_bandwidth for cell in cells if cell.spec.size_bytes == size_bytes}
    few, many = found.get(min(sizes)), found.get(max(sizes))
    if few and many and min(sizes) < max(sizes):
        message = units.format_message(size_bytes)
        yield (
            f"From {min(sizes)} to {max(sizes)} ranks the bus bandwidth of {name} at {message} "
            f"goes from {GB_PER_S.show(few)} to {GB_PER_S.show(many)} GB/s ({many / few:.2f}×)."
        )


def _slowest(measured: Sequence[CommCell], ranks: int) -> str | None:
    size_bytes = max(cell.spec.size_bytes for cell in measured)
    found = [
        (bandwidth, cell)
        for cell in measured
        if cell.spec.size_bytes == size_bytes and cell.spec.world_size == ranks and (bandwidth := cell.bus_bandwidth)
    ]
    if len(found) < 2:
        return None
    bandwidth, cell = min(found, key=lambda pair: pair[0])
    return (
        f"{cell.spec.collective} ({cell.spec.transport}) has the least bus bandwidth at "
        f"{units.format_message(size_bytes)}, {GB_PER_S.show(bandwidth)} GB/s."
    )


def _cautions(run: CommRun, measured: Sequence[CommCell]) -> Iterator[str]:
    yield from interruption(run, "cell")
    failed = len(run.cells) - len(measured)
    if failed:
        yield f"{failed} of {units.counted(len(run.cells), 'cell')} failed; the table has the reasons."
    apart = [cell for cell in measured if (cell.rank_spread or 0.0) > _APART]
    if apart:
        yield (
            f"Warning: in {len(apart)} of {units.counted(len(measured), 'cell')} the slowest rank took more than "
            f"{units.format_limit(_APART)} longer than the fastest."
        )


TERMS = (
    (
        "algbw, busbw",
        "Algorithm bandwidth is the message's bytes per second. Bus bandwidth, as in nccl-tests, is this times each "
        "rank's least traffic over the message: 2(n−1)/n for an all-reduce, (n−1)/n for all-gather, reduce-scatter and "
        "all-to-all, 1 for broadcast and send/receive. Compare it with the link's bandwidth. GB is 1e9 bytes.",
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


def comm_cell_line(cell: CommCell) -> str:
    if cell.failure or cell.slowest is None:
        failed = why_failed(cell.failure) if cell.failure else "not measured"
        return f"{cell.spec.label}: {failed}"
    return f"{cell.spec.label}: {units.format_time(cell.slowest.median_s)}, {GB_PER_S.show(cell.bus_bandwidth)} GB/s"


def _processes(run: CommRun) -> str:
    hosts = grouped(run.ranks, lambda rank: rank.host)
    machines = "; ".join(f"{host} {_counted_devices(rank.device for rank in own)}" for host, own in hosts.items())
    return f"{units.counted(len(run.ranks), 'rank')}: {machines}"


def _counted_devices(devices: Iterable[str]) -> str:
    return ", ".join(device if count == 1 else f"{count} × {device}" for device, count in Counter(devices).items())


def _sections(run: CommRun) -> Iterator[Section]:
    if any(cell.bus_bandwidth for cell in run.cells):
        yield Section.of("Bus bandwidth", later(bandwidth_over_size, run.cells), bandwidth_table(run.cells))
    yield Section.of("Time over message size", later(time_over_size, run.cells, run.profile))
    yield Section.of("All measurements", _cells(run))
    yield Section.of("Communication profile", _profile(run.profile))
    yield Section.notes(run.notes)


_HEAD = (
    Column(key="collective"),
    Column(key="way", header="backend", shared="{}"),
    Column(key="dtype", header="type", shared="{}"),
    Column(key="world_size", header="ranks", quantity=LABEL, shared="{} rank{s}"),
)


def bandwidth_table(cells: Sequence[CommCell]) -> Table:
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


_ONE_BY_ONE = "one by one, each after a barrier, by the host's clock"
_BACK_TO_BACK = "back to back by events on the device, short ones several at a time"
_EACH = "back to back by an event around each: times of short messages, and α, include event and launch overhead"


def comm_rows(cells: Sequence[CommCell]) -> list[Row]:
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
    on_device = any(times.device_s for cell in run.cells for times in cell.ranks)
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
        caption=f"Times of the slowest rank. {_how_timed(run.cells)}Results were checked before they were timed.",
        empty="nothing was measured",
    )


def _how_timed(cells: Sequence[CommCell]) -> str:
    timed = grouped([cell for cell in cells if cell.slowest], _way_of_timing)
    ways = {how: units.listed(list(dict.fromkeys(cell.spec.transport for cell in own))) for how, own in timed.items()}
    return "".join(f"Calls{f' of {way}' if len(ways) > 1 else ''} are timed {how}. " for how, way in ways.items())


def _way_of_timing(cell: CommCell) -> str:
    on_device = [times for times in cell.ranks if times.device_s]
    if not on_device:
        return _ONE_BY_ONE
    return _EACH if any(times.num_waits is None for times in on_device) else _BACK_TO_BACK


def _profile(profile: Sequence[CommFit]) -> Table:
    caption = "Call time = latency α + β · bytes on the wire (+ γ · ranks, where all world sizes are fitted together)."
    if any(fit.rms_relative is not None for fit in profile):
        caption += (
            " Residual: the root mean square of the fit's relative errors. Worst: the largest of them, positive where "
            "the fit overestimates the time."
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


def _tiles(run: CommRun) -> Iterator[Fact]:
    def named(row: Row) -> str:
        return f"{row['collective']} of {MESSAGE.show(row['size_bytes'])} by {row['way']}, {row['world_size']} ranks"

    rows = [{**row, "of": named(row)} for row in comm_rows(run.cells)]
    largest = max((cell.spec.size_bytes for cell in run.cells), default=0)
    yield from extremes(
        [row for row in rows if row["size_bytes"] == largest],
        ("of",),
        ("busbw_bytes_per_s", max, BYTES_PER_S, "most bus bandwidth"),
        ("busbw_bytes_per_s", min, BYTES_PER_S, "least bus bandwidth"),
    )
    yield from extremes(
        rows, ("of",), ("time_s", min, TIME, "fastest call"), ("rank_spread", max, PERCENT, "largest spread over ranks")
    )


REPORT = RecordReport(
    chapter="Communication",
    anchor="communication",
    title=lambda run: f"Collectives: {run.name}" if run.name else comm_name(run).capitalize(),
    subtitle=lambda run: dotted(made(run, "benchmark"), run.device_name),
    called=comm_name,
    answer=comm_verdict,
    sections=_sections,
    tiles=_tiles,
    rows=lambda run: comm_rows(run.cells),
    terms=TERMS,
    where=_where,
)
