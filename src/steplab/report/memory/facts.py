"""The main facts about the memory profiles of a page: the parts of the largest peak, and the effect of choices."""

from collections.abc import Iterator, Sequence

from steplab import units
from steplab.records.rows import Scalar
from steplab.report.kit.document import Fact
from steplab.report.memory.categories import category_word
from steplab.report.memory.figures import parts
from steplab.report.memory.pairs import BASELINES, counterpart, profile_of, with_owners
from steplab.report.run.cells import RunCell, label, said

_TOLD = 3  # categories named


def memory_facts(cells: Sequence[RunCell], fields: Sequence[str]) -> list[Fact]:
    """Facts about the cells whose memory was watched; empty without any."""
    known = with_owners(cells)
    changes = [_changes(known, field, baseline, fields) for field, baseline in BASELINES]
    return [*_largest(known, fields), *(fact for found in changes for fact in found)]


def _largest(known: Sequence[RunCell], fields: Sequence[str]) -> Iterator[Fact]:
    cell = max(known, key=lambda cell: profile_of(cell).peak_bytes, default=None)
    found = sorted(parts(profile_of(cell)), key=lambda part: -part.num_bytes) if cell else []
    if not cell or not found:
        return
    profile = profile_of(cell)
    where = f", in {profile.peak_phase}" if profile.peak_phase else ""
    others = ", ".join(
        f"{category_word(p.category)} {units.format_percent(p.share)}" for p in found[1 : 1 + _TOLD] if p.share >= 0.01
    )
    yield Fact(
        wide=True,
        figure=units.format_percent(found[0].share),
        text=f"of the highest peak watched is {category_word(found[0].category)}: {label(cell, fields)} "
        f"({units.format_bytes(profile.peak_bytes)}{where}{f'; then {others}' if others else ''}).",
    )


def _changes(known: Sequence[RunCell], field: str, baseline: str, fields: Sequence[str]) -> Iterator[Fact]:
    """By how much each value of a field changes the peak, compared with the baseline's, of cells alike in all else."""
    others = [name for name in fields if name != field]
    for value in dict.fromkeys(cell.values[field] for cell in known):
        pairs = sorted(_pairs(known, field, baseline, value), key=lambda pair: pair[0])
        if not pairs:
            continue
        choice = f"{said(field, value)} instead of {said(field, baseline)}"
        (low, lowest), (high, highest) = pairs[0], pairs[-1]
        least, most = units.format_change(low), units.format_change(high)
        text = f"peak memory, {choice}"
        if len(pairs) == 1:
            text += f", at {label(lowest, others)}."
        else:
            text += f", over {len(pairs)} pairs of otherwise equal runs: {least} at {label(lowest, others)}, "
            text += f"{most} at {label(highest, others)}."
            raised = sum(change > 0 for change, _ in pairs)
            text += f" It raises the peak in {raised}." if 0 < raised < len(pairs) else ""
        yield Fact(figure=" to ".join(dict.fromkeys((least, most))), text=text, wide=True)


def _pairs(known: Sequence[RunCell], field: str, baseline: str, value: Scalar) -> Iterator[tuple[float, RunCell]]:
    """The relative change of the peak, and the cell it is of."""
    for cell in known:
        other = counterpart(cell, known, field, baseline) if cell.values[field] == value else None
        before = profile_of(other).peak_bytes if other else 0
        if before:
            yield profile_of(cell).peak_bytes / before - 1, cell
