"""A machine and its measured ceilings, for the terminal."""

from typing import TYPE_CHECKING

from steplab.records.ceilings import Ceiling, Ceilings
from steplab.report.environments import environment_pairs
from steplab.report.kit.terminal import draw, terminal_width
from steplab.specs.hardware import find_hardware
from steplab.stats import summarize
from steplab.units import format_rate, format_time

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def render_ceilings(ceilings: Ceilings, *, width: int | None = None, color: bool = False) -> str:
    """The machine, its ceilings beside the data sheet's where there is one, and what could not be read."""
    device = ceilings.environment.device
    known = find_hardware(device.name) is not None
    verdict = (
        f"{device.name} is in the catalogue: MFU is measured against its data sheet"
        if known
        else f"{device.name} is in no catalogue: MFU is measured against the matmul ceilings below"
    )
    parts: list[RenderableType] = [
        f"{device.name}, record {ceilings.id}",
        "",
        *(f"  {name:<12}{value}" for name, value in environment_pairs(ceilings.environment)),
        "",
        _table(ceilings),
        "",
        verdict,
        *(f"not found out: {gap}" for gap in ceilings.environment.gaps),
    ]
    return draw(*parts, width=width or terminal_width(), color=color)


def _table(ceilings: Ceilings) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    hardware = find_hardware(ceilings.environment.device.name)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for header in ("ceiling", "best", "median time", "repeats", "data sheet"):
        table.add_column(header, justify="left" if header == "ceiling" else "right")

    def stated(ceiling: Ceiling) -> str:
        if hardware is None:
            return "–"
        if ceiling.name == "copy":
            return format_rate(hardware.memory_bandwidth_bytes_per_s, "B/s")
        peak = hardware.peak_flops(ceiling.dtype or "")
        return format_rate(peak.flops_per_s, "FLOP/s") if peak else "–"

    for ceiling in ceilings.ceilings:
        name = f"{ceiling.dtype} matmul" if ceiling.name == "matmul" else "copy (read + write)"
        table.add_row(
            name,
            format_rate(ceiling.best_per_s, ceiling.unit),
            format_time(summarize(ceiling.seconds).median),
            str(len(ceiling.seconds)),
            stated(ceiling),
        )
    return table
