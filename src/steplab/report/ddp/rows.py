"""The variants of a data-parallel study as rows."""

from steplab.records.ddp import MOMENTS, DdpCell, DdpRun
from steplab.records.profile import PHASES
from steplab.records.rows import Row
from steplab.report.ddp import figures
from steplab.report.kit.document import row_of


def ddp_rows(run: DdpRun) -> list[Row]:
    """One row per variant; the step without communication has the medians over its turns with all variants."""
    best_s = figures.best_ddp_s(run.cells)
    return [_row(cell, run, best_s) for cell in run.cells]


def _row(cell: DdpCell, run: DdpRun, best_ddp_s: float | None) -> Row:
    is_baseline = cell.contender.kind == "none" and cell.failure is None
    step_s = figures.usual_baseline_s(run) if is_baseline else figures.step_s(cell)
    exposed_s, range_s, traced = figures.exposed_s(cell), figures.exposed_range_s(cell), cell.traced
    knows_tokens = run.facts is None or run.facts.knows_tokens
    row: Row = {
        "contender": cell.contender.label,
        "kind": cell.contender.kind,
        "bucket_mb": cell.contender.bucket_size_mb,
        **row_of(cell.contender, "transport", "update"),
        "status": cell.status,
        "turns": cell.turns or None,
        "num_ranks": len(cell.ranks) or None,
        "steps": len(cell.ranks[0].samples("step")) if cell.ranks else None,
        "num_calls": cell.num_calls,
        "wire_bytes": cell.wire_bytes,
        "sent_bytes": sum(messages.total_bytes for messages in cell.messages) or None,
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
        "tokens_per_s": run.study.tokens / step_s if step_s and knows_tokens else None,
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
        parts = row_of(memory, "parameters_bytes", "gradients_bytes", "optimizer_bytes", "other_bytes")
        row[f"{moment}_bytes"] = memory.known_bytes + (memory.other_bytes or 0) if memory else None
        row |= {f"{moment}_{name}": size for name, size in parts.items()}
        row[f"{moment}_formula_bytes"] = expected.known_bytes if expected else None
    row["failure"] = cell.failure.message if cell.failure else None
    return row
