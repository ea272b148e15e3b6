"""The ranks of a run side by side: their time, their collectives, the critical path, and the timelines of all."""

from dataclasses import replace

from steplab import units
from steplab.records.profile import CATEGORIES
from steplab.records.traced_ranks import TracedRanks
from steplab.report.kit.charts import category_legend
from steplab.report.kit.document import Chart, Column, Section, Table, later
from steplab.report.kit.timelines import step_end_ns, step_picture

_MOST_MEETINGS = 20
_ROWS = {0: "compute", 1: "messages"}
"""Names of the rows of TracedRank.timeline."""


def ranks_section(seen: TracedRanks) -> Section:
    """All of it."""
    times = Table.of(
        "ranks",
        seen.ranks,
        (
            Column(key="rank"),
            *(Column(key=f"{name}_s", header=name) for name in ("compute", "exposed", "hidden", "idle", "step")),
            Column(key="num_last", header="last"),
            Column(key="late_s", header="late"),
        ),
        caption="Per step. exposed: communication beside no computation. last: collectives to which it came last; "
        "late: by how much, against the ranks in the middle.",
    )
    meetings = Table.of(
        "collectives",
        seen.meetings[:_MOST_MEETINGS],
        (
            Column(key="collective"),
            Column(key="number"),
            Column(key="group", wraps_from=20),
            Column(key="last_rank", header="last rank"),
            Column(key="late_s", header="late"),
            Column(key="transfer_s", header="transfer"),
            Column(key="exposed_s", header="exposed"),
            Column(key="size_bytes", header="size"),
            Column(key="bus_bytes_per_s", header="bus bandwidth"),
        ),
        caption="Medians over the steps. transfer: from the last rank's arrival.",
    )
    return Section.of("Ranks", _told(seen), times, meetings, later(_timelines, seen))


def _told(seen: TracedRanks) -> str:
    path = ", ".join(f"rank {part.rank} {part.what} {units.format_time(part.time_s)}" for part in seen.path[:12])
    clocks = (
        "no collective was found in two of them, so their clocks are taken as they are"
        if seen.clock_error_s is None
        else f"clocks aligned on {len(seen.meetings)} collectives of a step, to {units.format_time(seen.clock_error_s)}"
    )
    return (
        f"{len(seen.ranks)} ranks, {seen.num_steps} steps; {clocks}. The longest computation is "
        f"{units.format_percent(seen.imbalance)} above the mean. Critical path of the last step: {path}."
    )


def _timelines(seen: TracedRanks) -> Chart | None:
    drawn = [(rank, rank.timeline) for rank in seen.ranks if rank.timeline and rank.timeline.kernel]
    if not drawn:
        return None
    until_ns = max(step_end_ns(timeline) for _, timeline in drawn)
    names = {category for _, timeline in drawn for category in timeline.categories}
    pictures = tuple(
        replace(step_picture(timeline, _ROWS, title=f"rank {rank.rank}", until_ns=until_ns), subtitle="")
        for rank, timeline in drawn
    )
    note = "The last step of each rank, on one axis of time from its own beginning."
    return Chart(pictures=pictures, legend=category_legend([name for name in CATEGORIES if name in names]), note=note)
