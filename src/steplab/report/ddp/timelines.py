import math

from steplab import units
from steplab.records.ddp import COMMUNICATION_ROW, COMPUTE_ROW, DdpCell, DdpRun
from steplab.records.profile import CATEGORIES
from steplab.report.ddp import figures
from steplab.report.kit.charts import category_legend
from steplab.report.kit.document import Chart, Picture
from steplab.report.kit.grouping import grouped
from steplab.report.kit.timelines import step_end_ns, step_picture

_ROWS = {COMPUTE_ROW: "compute", COMMUNICATION_ROW: "messages"}


def timelines(run: DdpRun) -> Chart | None:
    """Draw one traced step per strategy on a common time axis; None without traces.

    Among variants that differ only in bucket size, the fastest is drawn.
    """
    drawable = (cell for cell in run.cells if cell.traced and cell.traced.timeline.kernel)
    families = grouped(drawable, lambda cell: cell.contender.family).values()
    traced = [(cell, cell.traced) for cell in (min(family, key=_step_s) for family in families) if cell.traced]
    if not traced:
        return None
    until_ns = max(step_end_ns(steps.timeline) for _, steps in traced)
    pictures: list[Picture] = []
    for cell, steps in traced:
        rows = {COMPUTE_ROW: _ROWS[COMPUTE_ROW]} if cell.contender.kind == "none" else _ROWS
        told = ""
        if steps.communication_s:
            told = (
                f"messages take {units.format_time(steps.communication_s)} per step, "
                f"{units.format_time(steps.exposed_s)} of it exposed"
            )
        label = cell.contender.label
        pictures.append(step_picture(steps.timeline, rows, title=label, until_ns=until_ns, subtitle=told))
    seen = {category for _, steps in traced for category in steps.timeline.categories}
    note = (
        "One traced step of rank 0 of each strategy, at its bucket size with the shortest step, on one axis of time. "
        "Each column is filled with its work, as high as its share of the time; empty is idle. A message under "
        "computation overlaps with it. A profiler slows the host: the bars above have the unprofiled times."
    )
    return Chart(
        pictures=tuple(pictures), legend=category_legend([name for name in CATEGORIES if name in seen]), note=note
    )


def _step_s(cell: DdpCell) -> float:
    return figures.step_s(cell) or math.inf
