"""A data-parallel study as rows, and as the tables people read: time, communication, memory."""

from steplab import units
from steplab.records.ddp import MOMENTS, DdpCell, DdpRun
from steplab.records.rows import Row, Scalar
from steplab.report import ddp_figures as figures
from steplab.report.columns import Column, figure_column, show_time
from steplab.report.shares import format_share
from steplab.report.titled_table import TitledTable

MOMENT_WORDS = {"initialised": "initialised", "before_step": "before the update", "after_step": "after the update"}
PHASES = {"forward": "forward", "backward": "backward", "gradient sync": "sync", "optimizer": "opt. step"}


def ddp_rows(run: DdpRun) -> list[Row]:
    """A row a contender; of the step without communication, as it was beside the others."""
    best_s = figures.best_ddp_s(run.cells)
    return [_row(cell, run, best_s) for cell in run.cells]


def _row(cell: DdpCell, run: DdpRun, best_ddp_s: float | None) -> Row:
    is_baseline = cell.contender.kind == "none" and cell.failure is None
    step_s = figures.usual_baseline_s(run) if is_baseline else figures.step_s(cell)
    exposed_s, range_s, traced = figures.exposed_s(cell), figures.exposed_range_s(cell), cell.traced
    row: Row = {
        "contender": cell.contender.label,
        "kind": cell.contender.kind,
        "bucket_mb": cell.contender.bucket_size_mb,
        "transport": cell.contender.transport,
        "status": cell.status,
        "turns": cell.turns or None,
        "num_ranks": len(cell.ranks) or None,
        "steps": len(cell.ranks[0].samples("step")) if cell.ranks else None,
        "num_calls": cell.num_calls,
        "sent_bytes": sum(messages.total_bytes for messages in cell.messages) or None,
        "wire_bytes": cell.wire_bytes,
        "step_s": step_s,
        "baseline_s": figures.baseline_s(cell),
        "exposed_s": exposed_s,
        "exposed_low_s": range_s[0] if range_s else None,
        "exposed_high_s": range_s[1] if range_s else None,
        "of_best_ddp": exposed_s / best_ddp_s if exposed_s is not None and best_ddp_s else None,
        "alone_s": figures.alone_s(cell),
        "hidden": figures.hidden(cell),
        "rank_spread": figures.usual_spread(run) if is_baseline else figures.spread_over_ranks(cell),
        "host_lead_s": figures.host_lead_s(cell),
        "tokens_per_s": run.study.tokens / step_s if step_s else None,
        "first_step_s": cell.first_step_s,
    }
    for name in PHASES:
        phase_s = figures.usual_baseline_s(run, name) if is_baseline else figures.phase_s(cell, name)
        row[f"{name.replace(' ', '_')}_s"] = phase_s
    row |= {
        "traced_step_s": traced.step_s if traced else None,
        "traced_communication_s": traced.communication_s if traced and traced.communication_s else None,
        "traced_exposed_s": traced.exposed_s if traced and traced.communication_s else None,
        "peak_bytes": figures.peak_bytes(cell),
    }
    for moment in MOMENTS:
        memory, expected = figures.memory_at(cell, moment), figures.expected_at(cell, moment)
        row |= {
            f"{moment}_bytes": memory.known_bytes + (memory.other_bytes or 0) if memory else None,
            f"{moment}_parameters_bytes": memory.parameters_bytes if memory else None,
            f"{moment}_gradients_bytes": memory.gradients_bytes if memory else None,
            f"{moment}_optimizer_bytes": memory.optimizer_bytes if memory else None,
            f"{moment}_other_bytes": memory.other_bytes if memory else None,
            f"{moment}_formula_bytes": expected.known_bytes if expected else None,
        }
    row["failure"] = cell.failure.message if cell.failure else None
    return row


def _size(value: Scalar) -> str:
    return units.format_bytes(value) if isinstance(value, (int, float)) else str(value)


def _share(value: Scalar) -> str:
    return format_share(value) if isinstance(value, (int, float)) else str(value)


def _times(value: Scalar) -> str:
    return f"{value:.2f}×" if isinstance(value, (int, float)) else str(value)


_HEAD = (Column(key="contender", header="contender", shared=False),)
_RESULT = Column(key="failure", header="result", shared=False, wraps_from=24)
TIME_COLUMNS = (
    *_HEAD,
    figure_column("step_s", "step", show_time, 0),
    figure_column("baseline_s", "without", show_time, 1),
    figure_column("exposed_s", "exposed", show_time, 0),
    figure_column("exposed_low_s", "at least", show_time, 1),
    figure_column("exposed_high_s", "at most", show_time, 1),
    figure_column("of_best_ddp", "of torch DDP's best", _times, 1),
    figure_column("alone_s", "alone", show_time, 1),
    figure_column("hidden", "hidden", _share, 2),
    figure_column("traced_exposed_s", "exposed in trace", show_time, 3),
    figure_column("num_calls", "calls", str, 2),
    figure_column("sent_bytes", "messages", _size, 4),
    figure_column("wire_bytes", "on the wire", _size, 4),
    *(figure_column(f"{name.replace(' ', '_')}_s", header, show_time, 5) for name, header in PHASES.items()),
    figure_column("host_lead_s", "host ahead", show_time, 3),
    figure_column("rank_spread", "spread over ranks", _share, 6),
    figure_column("first_step_s", "first step", show_time, 7),
    _RESULT,
)
MEMORY_COLUMNS = (
    *_HEAD,
    *(figure_column(f"{moment}_bytes", words, _size, 0) for moment, words in MOMENT_WORDS.items()),
    figure_column("after_step_parameters_bytes", "parameters", _size, 2),
    figure_column("after_step_gradients_bytes", "gradients", _size, 2),
    figure_column("after_step_optimizer_bytes", "optimizer state", _size, 1),
    figure_column("after_step_other_bytes", "other", _size, 3),
    figure_column("after_step_formula_bytes", "by formula", _size, 2),
    figure_column("peak_bytes", "peak of a step", _size, 1),
)


def ddp_tables(run: DdpRun) -> list[TitledTable]:
    """Time and communication; memory, where anybody looked."""
    rows = ddp_rows(run)
    hidden = (
        "Hidden: 1 - exposed / alone, where those bounds are less than half of alone apart; below zero, communication "
        "slows what it runs beside by more than is hidden. "
        if any(row["hidden"] is not None for row in rows)
        else ""
    )
    ahead = (
        " Host ahead: by how much Python was ahead of the device at the end of the phase where it was least, the time "
        "for which the device was held before the step included."
        if any(row["host_lead_s"] is not None for row in rows)
        else ""
    )
    tables = [
        TitledTable(
            title="Time and communication",
            columns=TIME_COLUMNS,
            rows=rows,
            caption="Medians of the slowest rank. Without: the same step without communication, in turns with it; in "
            "its own row the median of those. Exposed: the step less that, with bounds by the 95 % intervals of both. "
            "Torch DDP's best: its bucket size with the shortest step. "
            "Messages: their sizes added up; on the wire: each size times nccl-tests' factor. "
            f"Alone: its messages with nothing beside them. {hidden}In trace: time of messages with no computation "
            f"beside them, under a profiler.{ahead}",
        )
    ]
    held = [row for row in rows if row[f"{MOMENTS[-1]}_bytes"] is not None]
    if held:
        tables.append(
            TitledTable(
                title="Memory of a rank",
                columns=MEMORY_COLUMNS,
                rows=held,
                caption="Of the rank that holds most, at the first step, whose update makes the optimizer's state; the "
                "categories are those after it. Formula: parameters, gradients and optimizer state, of which ZeRO "
                "divides nothing, the optimizer's state (sharded) or all (FSDP2) by the number of ranks. The peak is "
                "the allocator's, without the memory that peer copies share.",
            )
        )
    return tables


def notes_of(run: DdpRun) -> list[str]:
    """What is to be said of the study and its contenders, each text once, with whom it is told of."""
    found: dict[str, list[str]] = {}
    for cell in run.cells:
        for note in cell.notes:
            found.setdefault(note, []).append(cell.contender.label)
    return [*run.notes, *(f"{note} ({', '.join(labels)})" for note, labels in found.items())]
