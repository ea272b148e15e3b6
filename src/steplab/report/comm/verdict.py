"""The answer of a benchmark of collectives: bandwidth of long messages, time of short ones, and the effect of ranks."""

from collections.abc import Iterator, Sequence

from steplab import units
from steplab.records.comm import CommCell, CommRun
from steplab.report.kit.document import Verdict
from steplab.report.kit.quantities import GB_PER_S
from steplab.report.kit.text import interruption
from steplab.specs.comm import COLLECTIVES
from steplab.stats import summarize

_APART = 0.1
"""Spread over ranks above which one rank delays the others."""


def comm_name(run: CommRun) -> str:
    """What tells the benchmark from others: its name, or the number of its ranks."""
    return run.name or f"collectives over {units.counted(run.study.num_processes, 'rank')}"


def comm_verdict(run: CommRun) -> Verdict:
    """Bandwidth, latency and the effect of ranks, for the collective that gradients need most."""
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
    """The longest message's bandwidth with the interval of its time, and the shortest message's time."""
    longest, shortest = (pick(cells, key=lambda cell: cell.message_bytes) for pick in (max, min))
    told = f"{name} over {units.counted(ranks, 'rank')} ({way}) "
    if (bandwidth := longest.bus_bandwidth) and longest.wire_bytes and longest.slowest:
        times = summarize(longest.slowest.best_s)
        low, high = (GB_PER_S.show(longest.wire_bytes / time_s) for time_s in (times.high, times.low))
        between = f" ({low} to {high})" if low != high else ""
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
    return f"{units.format_time(times.median)} ({units.format_time(times.low)} to {units.format_time(times.high)})"


def _scaling(name: str, cells: Sequence[CommCell]) -> Iterator[str]:
    """How the bandwidth of the longest message changes from the fewest ranks to the most."""
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
    """The collective with the least bandwidth at the longest message."""
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
