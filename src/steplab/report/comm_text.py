"""A benchmark of collectives on a terminal, and in every format that holds tables."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from steplab import units
from steplab.records.comm import CommCell, CommRun
from steplab.report.attention_speeds import markdown
from steplab.report.blocks import INDENT, grid_table, section
from steplab.report.columns import reason
from steplab.report.comm_rows import bandwidth_grid, bus_bandwidth, comm_rows, comm_tables, show_gb
from steplab.report.environments import condition_pairs, environment_pairs
from steplab.report.formats import render_rows
from steplab.report.terminal import draw, plain, terminal_width
from steplab.report.titled_table import draw_table, headed, write_notes, write_table

if TYPE_CHECKING:
    from rich.console import RenderableType

_GLANCE = "Bus bandwidth"


def render_comm(run: CommRun, format: str = "table", *, width: int | None = None, color: bool = False) -> str:
    """One benchmark in a format of formats.FORMATS, without a newline at the end; width None: the terminal's."""
    if format in ("json", "csv"):
        return render_rows(comm_rows(run.cells), format)
    if format == "table":
        return _terminal(run, width or terminal_width(), color)
    glance = bandwidth_grid(run.cells) if format == "md" else None
    parts = [headed(_GLANCE, markdown(glance), format)] if glance else []
    for table in comm_tables(run):
        parts.append(write_table(table, format))
    return "\n\n".join([*parts, *write_notes(run.notes, format)])


def comm_cell_line(cell: CommCell) -> str:
    """What came of one cell, for a line of progress."""
    if cell.failure or cell.slowest is None:
        failed = reason(cell.failure.kind, cell.failure.message) if cell.failure else "not measured"
        return f"{cell.spec.label}: {failed}"
    return f"{cell.spec.label}: {units.format_time(cell.slowest.median_s)}, {show_gb(bus_bandwidth(cell))} GB/s"


def processes_of(run: CommRun) -> str:
    """'2 ranks: node1 cuda:0 NVIDIA H200, cuda:1 NVIDIA H200', by machine."""
    hosts: dict[str, list[str]] = {}
    for rank in run.ranks:
        hosts.setdefault(rank.host, []).append(rank.device)
    machines = "; ".join(f"{host} {_named(devices)}" for host, devices in hosts.items())
    return f"{units.counted(len(run.ranks), 'rank')}: {machines}"


def _named(devices: list[str]) -> str:
    """Each device once, with how often it is there."""
    counts = {device: devices.count(device) for device in devices}
    return ", ".join(device if count == 1 else f"{count} × {device}" for device, count in counts.items())


def machine_pairs(run: CommRun) -> list[tuple[str, str]]:
    """Environment, processes and libraries, name and value."""
    pairs = [*environment_pairs(run.environment), *condition_pairs([run.environment])] if run.environment else []
    pairs += [("processes", processes_of(run))] if run.ranks else []
    return pairs + [(name.upper() if name == "nccl" else name, version) for name, version in run.libraries.items()]


def _terminal(run: CommRun, width: int, color: bool) -> str:
    """Title, bus bandwidth at a glance, then every cell, the profile, environment and notes."""
    from rich.text import Text

    first = list(_title(run))
    if glance := bandwidth_grid(run.cells):
        first += section(_GLANCE, grid_table(glance, width - INDENT), Text(glance.caption, style="dim"))
    texts = [draw(*first, width=width, color=color)]
    for table in comm_tables(run):
        texts.append(draw_table(table, width, color))
    rest: list[RenderableType] = []
    if pairs := machine_pairs(run):
        rest += section("Environment", *(Text(plain(f"{name}: {value}")) for name, value in pairs))
    if run.notes:
        rest += section("Notes", *(Text(f"- {plain(note)}") for note in run.notes))
    return "\n\n".join(texts) + ("\n" + draw(*rest, width=width, color=color) if rest else "")


def _title(run: CommRun) -> "Iterator[RenderableType]":
    from rich.text import Text

    yield Text(plain(f"Collectives: {run.name or run.study.name}"), style="bold")
    made = [f"benchmark {run.id}", run.created_utc, f"steplab {run.steplab_version}", run.device_name or ""]
    yield Text(plain(" · ".join(part for part in made if part)), style="dim")
