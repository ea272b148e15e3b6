"""Computes the figures of memory profiles, and finds runs to compare."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from steplab.records.memory_profile import Allocation, MemoryProfile, SavedTensors
from steplab.records.prediction import CardFit, MemoryPrediction
from steplab.records.rows import Scalar
from steplab.records.run import Run
from steplab.report.memory.categories import in_order
from steplab.report.run.cells import FIELDS, HOW, RunCell, cells_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    category: str
    num_bytes: int
    share: float
    predicted_bytes: int | None = None
    """None without a prediction, or if predictions do not cover the category."""
    uncovered_bytes: int = 0

    @property
    def error(self) -> float | None:
        """predicted / measured - 1 over the covered bytes; None if either is zero or unknown."""
        measured = self.num_bytes - self.uncovered_bytes
        return self.predicted_bytes / measured - 1 if self.predicted_bytes and measured else None


def error_text(error: float, decimals: int = 2) -> str:
    """Example: '+1.25 %'; 'exact' for no error, '±0.00 %' for a tiny one."""
    if not error:
        return "exact"
    text = f"{100 * error:+.{decimals}f} %"
    return text if any(digit in text for digit in "123456789") else f"±{text[1:]}"


def parts(profile: MemoryProfile, prediction: MemoryPrediction | None = None) -> list[Part]:
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
    """True if predictions have this category. They are for CUDA; a CPU lacks library workspaces and rounding."""
    return profile.source != "cpu allocator" or category not in ("workspaces", "rounding")


def has_owners(profile: MemoryProfile) -> bool:
    return not set(profile.at_peak) & {"before", "during"}


def allocated_bytes(allocations: Iterable[Allocation]) -> int:
    return sum(made.requested_bytes * made.count for made in allocations)


def all_saved_bytes(profile: MemoryProfile) -> int:
    """Bytes that autograd saved for backward, including groups that the record only counts (`saved_left_out`)."""
    return saved_bytes(profile.saved) + (profile.saved_left_out.num_bytes if profile.saved_left_out else 0)


def saved_bytes(saved: Iterable[SavedTensors]) -> int:
    return sum(tensors.stored_bytes for tensors in saved)


def capacity(run: Run) -> int | None:
    """Bytes of device memory; None on a CPU, or if not recorded."""
    if run.memory and run.memory.total_bytes:
        return run.memory.total_bytes
    if run.environment and run.environment.device.kind == "cuda":
        return run.environment.device.memory_bytes
    return None


def smallest_card(prediction: MemoryPrediction) -> CardFit | None:
    fitting = [card for card in prediction.cards if card.verdict == "fits"]
    return min(fitting, key=lambda card: card.usable_bytes, default=None)


BASELINES = (("precision", "fp32"), ("checkpointing", "none"))
"""Settings that affect memory, each with its baseline value."""


def watched(cells: Sequence[RunCell]) -> list[RunCell]:
    return [cell for cell in cells if cell.run.memory_profile]


def with_owners(cells: Sequence[RunCell]) -> list[RunCell]:
    return [cell for cell in watched(cells) if has_owners(profile_of(cell))]


def profile_of(cell: RunCell) -> MemoryProfile:
    assert cell.run.memory_profile is not None
    return cell.run.memory_profile


def among(run: Run, others: Iterable[Run]) -> tuple[RunCell, list[RunCell]]:
    every = cells_of(list({other.id: other for other in (*others, run)}.values()))
    return next(cell for cell in every if cell.id == run.id), every


def counterpart(cell: RunCell, cells: Sequence[RunCell], field: str, value: Scalar) -> RunCell | None:
    """Newest run with a memory profile that differs from `cell` only in having `value` for `field`."""
    wanted = _but_for(cell, field)
    found = [other for other in watched(cells) if other.values[field] == value and _but_for(other, field) == wanted]
    return max(found, key=lambda other: other.run.created_utc, default=None) if cell.values[field] != value else None


def _but_for(cell: RunCell, field: str) -> tuple[Scalar, ...]:
    return tuple(cell.values[name] for name in FIELDS if name not in (field, *HOW))
