import math

from steplab import units
from steplab.records.ddp import COMMUNICATION_ROW, COMPUTE_ROW, DdpRun
from steplab.report.ddp import figures
from steplab.report.kit.document import Chart
from steplab.report.kit.grouping import grouped
from steplab.report.kit.timelines import steps_chart

_ROWS = {COMPUTE_ROW: "compute", COMMUNICATION_ROW: "messages"}


def timelines(run: DdpRun) -> Chart | None:
    """Draw one traced step per strategy on a common time axis; None without traces.

    Among variants that differ only in bucket size, the fastest is drawn.
    """
    drawable = (cell for cell in run.cells if cell.traced and cell.traced.timeline.kernel)
    families = grouped(drawable, lambda cell: cell.contender.family).values()
    fastest = (min(family, key=lambda cell: figures.step_s(cell) or math.inf) for family in families)
    traced = [(cell, cell.traced) for cell in fastest if cell.traced]
    if not traced:
        return None
    pictured = []
    for cell, steps in traced:
        rows = {COMPUTE_ROW: _ROWS[COMPUTE_ROW]} if cell.contender.kind == "none" else _ROWS
        told = []
        if step_s := figures.step_s(cell):
            told.append(f"{units.format_time(step_s)} without the profiler")
        if steps.communication_s:
            told.append(
                f"messages take {units.format_time(steps.communication_s)} per step, "
                f"{units.format_time(steps.exposed_s)} of it exposed"
            )
        pictured.append((cell.contender.label, steps.timeline, rows, "; ".join(told)))
    note = (
        "One traced step of rank 0 of each strategy, at its bucket size with the shortest step, on one axis of time. "
        "Each column is filled with its work, as high as its share of the time; empty is idle. A message under "
        "computation overlaps with it. A profiler slows the host, so a step is longer here."
    )
    return steps_chart(pictured, note)
