"""The answer of a data-parallel study: what communication adds to a step, and how that compares with torch DDP."""

from collections.abc import Iterator

from steplab import units
from steplab.records.ddp import DdpCell, DdpRun
from steplab.report.ddp import figures
from steplab.report.kit.document import Verdict
from steplab.report.kit.text import interruption, why_failed

_STEADY = 1.05
"""Largest ratio between turns of the same step on an undisturbed machine."""
_MOSTLY = 0.5
"""Hidden share of communication below which most of it is exposed."""


def ddp_verdict(run: DdpRun) -> Verdict:
    """The variant with the shortest step against torch DDP, and how much of its communication is hidden."""
    return Verdict(sentences=tuple(_sentences(run)), cautions=tuple(_cautions(run)))


def _sentences(run: DdpRun) -> Iterator[str]:
    compared = [cell for cell in figures.timed(run) if figures.exposed_s(cell) is not None]
    winner, theirs = figures.best(compared), figures.best_ddp(compared)
    if winner is None:
        if first := figures.best(run.cells):
            took = units.format_time(figures.step_s(first) or 0.0)
            if len(figures.timed(run)) > 1:
                yield f"{first.contender.label} has the shortest step, {took}."
            else:
                yield f"Of the step one variant alone was measured: {first.contender.label}, {took}."
        return
    next_best = figures.best(c for c in compared if c.contender.kind not in ("torch_ddp", winner.contender.kind))
    verb = "has the shortest step and adds"
    if _saves(winner):
        yield _saved(winner)
        winner, verb = next_best or winner, "adds"
    told = _adds(winner, verb)
    if theirs and theirs is not winner:
        told += f", {_against(winner, theirs)} that torch DDP adds at its best bucket size, {_size(theirs)}"
    yield f"{told}."
    if theirs is winner and next_best:
        yield f"Of the other variants, {next_best.contender.label} adds least, {_added(next_best)}."
    yield from _hidden(winner)


def _saves(cell: DdpCell) -> bool:
    """Whether a step is surely shorter than one without communication, as where each rank updates fewer parameters."""
    ratio = figures.step_ratio(cell)
    return ratio is not None and ratio.decision == "lower"


def _saved(cell: DdpCell) -> str:
    without_s, shorter_s = figures.baseline_s(cell) or 0.0, -(figures.exposed_s(cell) or 0.0)
    why = ", because each rank updates only a part of the parameters" if cell.contender.kind == "sharded" else ""
    return (
        f"A step with {cell.contender.label} takes {units.format_time(without_s - shorter_s)}, "
        f"{units.format_time(shorter_s)} less than one without communication{why}."
    )


def _adds(cell: DdpCell, verb: str) -> str:
    without = units.format_time(figures.baseline_s(cell) or 0.0)
    return f"{cell.contender.label} {verb} {_added(cell)} of exposed communication to a step of {without}"


def _added(cell: DdpCell) -> str:
    """'5.10 ms (4.86 ms to 5.22 ms)'."""
    added_s, bounds = figures.exposed_s(cell) or 0.0, figures.exposed_range_s(cell)
    if added_s <= 0:
        return "nothing above the noise"
    between = f" ({units.format_time(bounds[0])} to {units.format_time(bounds[1])})" if bounds else ""
    return f"{units.format_time(added_s)}{between}"


def _against(winner: DdpCell, theirs: DdpCell) -> str:
    """'0.30 of the 17.1 ms (16.2 ms to 18.0 ms)', or that the bounds of the two overlap."""
    added_s, theirs_s = figures.exposed_s(winner) or 0.0, figures.exposed_s(theirs) or 0.0
    own, other = figures.exposed_range_s(winner), figures.exposed_range_s(theirs)
    if own and other and own[1] >= other[0]:
        return f"within the uncertainty of the {_added(theirs)}"
    if added_s <= 0 or theirs_s <= 0:
        return f"against the {_added(theirs)}"
    return f"{added_s / theirs_s:.2f} of the {_added(theirs)}"


def _size(cell: DdpCell) -> str:
    size = cell.contender.bucket_size_mb
    return "torch's own" if size is None else f"{size:g} MB"


def _hidden(cell: DdpCell) -> Iterator[str]:
    hidden, alone_s = figures.hidden(cell), figures.alone_s(cell)
    if hidden is None or alone_s is None:
        return
    alone = units.format_time(alone_s)
    if hidden < 0:
        yield (
            f"Nothing of it is hidden: the same messages take {alone} with nothing beside them, and in the step they "
            "slow the computation as well."
        )
    elif hidden < _MOSTLY:
        yield (
            f"Most of the communication is exposed: only {units.format_percent(hidden)} of the {alone} that the "
            "messages take alone is hidden behind computation."
        )
    else:
        yield (
            f"{units.format_percent(hidden)} of the {alone} that the messages take alone is hidden behind computation."
        )


def _cautions(run: DdpRun) -> Iterator[str]:
    yield from interruption(run, "variant")
    least, most = figures.baseline_range_s(run) or (0.0, 0.0)
    if most > _STEADY * least:
        yield (
            f"Warning: the step without communication took {units.format_time(least)} beside one variant and "
            f"{units.format_time(most)} beside another: it was disturbed, and so is the exposed communication."
        )
    if late := [cell.contender.label for cell in figures.timed(run) if figures.waits_for_host(cell)]:
        yield (
            f"Warning: nearly launch-bound (host lead under 1 % of the step): {', '.join(late)}. Exposed communication "
            "there includes the device's waits for the host."
        )
    for cell in run.cells:
        if cell.failure:
            yield f"{cell.contender.label} failed: {why_failed(cell.failure)}."
