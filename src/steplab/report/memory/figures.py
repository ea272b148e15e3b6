"""Figures of memory profiles, pairs of runs to compare, and the summary of several."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from steplab import units
from steplab.records.memory_profile import Allocation, MemoryProfile, SavedTensors
from steplab.records.prediction import CardFit, MemoryPrediction
from steplab.records.rows import Scalar
from steplab.records.run import Run
from steplab.report.kit.document import Fact
from steplab.report.memory.categories import category_word, in_order
from steplab.report.run.cells import FIELDS, HOW, RunCell, cells_of, label, said

LOW_PRECISION = ("bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    category: str
    """As in the record; 'peak' for the sum."""
    num_bytes: int
    share: float
    predicted_bytes: int | None = None
    """None without a prediction, and for a category outside it."""
    uncovered_bytes: int = 0
    """Part of num_bytes outside the prediction."""

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured of the covered bytes; None if one is zero or unknown."""
        measured = self.num_bytes - self.uncovered_bytes
        return self.predicted_bytes / measured - 1 if self.predicted_bytes and measured else None


def error_text(error: float, decimals: int = 2) -> str:
    """+1.25 %; 'exact' for no error, '±0.00 %' for a rounded one."""
    if not error:
        return "exact"
    text = f"{100 * error:+.{decimals}f} %"
    return text if any(digit in text for digit in "123456789") else f"±{text[1:]}"


def parts(profile: MemoryProfile, prediction: MemoryPrediction | None = None) -> list[Part]:
    """Categories at the peak, measured or predicted, in their order."""
    predicted = prediction.at_peak if prediction else {}
    return [
        Part(
            category=category,
            num_bytes=profile.at_peak.get(category, 0),
            share=profile.at_peak.get(category, 0) / (profile.peak_bytes or 1),
            predicted_bytes=predicted.get(category, 0) if prediction and _is_covered(profile, category) else None,
        )
        for category in in_order((*profile.at_peak, *predicted))
        if profile.at_peak.get(category) or (predicted.get(category) and _is_covered(profile, category))
    ]


def whole(profile: MemoryProfile, prediction: MemoryPrediction | None = None) -> Part:
    """The peak, and the prediction of its covered part."""
    return Part(
        category="peak",
        num_bytes=profile.peak_bytes,
        share=1.0,
        predicted_bytes=sum(size for name, size in prediction.at_peak.items() if _is_covered(profile, name))
        if prediction
        else None,
        uncovered_bytes=sum(size for name, size in profile.at_peak.items() if not _is_covered(profile, name)),
    )


def _is_covered(profile: MemoryProfile, category: str) -> bool:
    """Predictions are of CUDA devices: a CPU has no workspaces of CUDA's libraries, nor its allocator's rounding."""
    return profile.source != "cpu allocator" or category not in ("workspaces", "rounding")


def at_peak(profile: MemoryProfile, *categories: str) -> int:
    return sum(profile.at_peak.get(category, 0) for category in categories)


def has_owners(profile: MemoryProfile) -> bool:
    """False for an imported snapshot."""
    return not set(profile.at_peak) & {"before", "during"}


def allocated_bytes(allocations: Iterable[Allocation]) -> int:
    return sum(made.requested_bytes * made.count for made in allocations)


def all_saved_bytes(profile: MemoryProfile) -> int:
    """Bytes that autograd saved, including kinds beyond the record's limit."""
    return saved_bytes(profile.saved) + (profile.saved_left_out.num_bytes if profile.saved_left_out else 0)


def saved_bytes(saved: Iterable[SavedTensors]) -> int:
    return sum(tensors.stored_bytes for tensors in saved)


def peak_of(run: Run) -> int | None:
    """By the allocator over the timed steps, else over the watched step."""
    if run.peak:
        return run.peak.peak_allocated_bytes
    return run.memory_profile.peak_bytes if run.memory_profile else None


def capacity(run: Run) -> int | None:
    """None on a CPU, and if not recorded."""
    if run.memory and run.memory.total_bytes:
        return run.memory.total_bytes
    if run.environment and run.environment.device.kind == "cuda":
        return run.environment.device.memory_bytes
    return None


def smallest_card(prediction: MemoryPrediction) -> CardFit | None:
    """The known GPU with the least memory that fits a step; None: no GPU."""
    fitting = [card for card in prediction.cards if card.verdict == "fits"]
    return min(fitting, key=lambda card: card.usable_bytes, default=None)


BASELINES = (("precision", "fp32"), ("checkpointing", "none"))
"""Choices that affect memory, each with its baseline."""


def watched(cells: Sequence[RunCell]) -> list[RunCell]:
    return [cell for cell in cells if cell.run.memory_profile]


def with_owners(cells: Sequence[RunCell]) -> list[RunCell]:
    """Watched cells with categories by owner."""
    return [cell for cell in watched(cells) if has_owners(profile_of(cell))]


def profile_of(cell: RunCell) -> MemoryProfile:
    assert cell.run.memory_profile is not None
    return cell.run.memory_profile


def among(run: Run, others: Iterable[Run]) -> tuple[RunCell, list[RunCell]]:
    """The run's cell, and all cells."""
    every = cells_of(list({other.id: other for other in (*others, run)}.values()))
    return next(cell for cell in every if cell.id == run.id), every


def counterpart(cell: RunCell, cells: Sequence[RunCell], field: str, value: Scalar) -> RunCell | None:
    """The newest watched cell that differs only by having `value` in `field`."""
    wanted = _but_for(cell, field)
    found = [other for other in watched(cells) if other.values[field] == value and _but_for(other, field) == wanted]
    return max(found, key=lambda other: other.run.created_utc, default=None) if cell.values[field] != value else None


def alike_but_for(cells: Sequence[RunCell], field: str) -> list[list[RunCell]]:
    """Groups of cells that differ only in `field`, with at least two values; one cell per value.

    Cells without a value of the field, such as imported snapshots, belong to no group.
    """
    groups: dict[tuple[Scalar, ...], dict[Scalar, RunCell]] = {}
    for cell in cells:
        if cell.values[field] is not None:
            groups.setdefault(_but_for(cell, field), {})[cell.values[field]] = cell
    return [list(group.values()) for group in groups.values() if len(group) > 1]


def _but_for(cell: RunCell, field: str) -> tuple[Scalar, ...]:
    return tuple(cell.values[name] for name in FIELDS if name not in (field, *HOW))


_TOLD = 3  # categories named


def memory_facts(cells: Sequence[RunCell], fields: Sequence[str]) -> list[Fact]:
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
    for cell in known:
        other = counterpart(cell, known, field, baseline) if cell.values[field] == value else None
        before = profile_of(other).peak_bytes if other else 0
        if before:
            yield profile_of(cell).peak_bytes / before - 1, cell
