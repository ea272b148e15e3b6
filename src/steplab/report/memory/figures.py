"""Figures of a memory profile, computed from the record."""

from collections.abc import Iterable
from dataclasses import dataclass

from steplab.records.memory_profile import Allocation, MemoryProfile, SavedTensors
from steplab.records.prediction import CardFit, MemoryPrediction
from steplab.records.run import Run
from steplab.report.memory.categories import in_order

LOW_PRECISION = ("bfloat16", "float16")
"""The dtypes in which autocast computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One category of the peak."""

    category: str
    """Name of the category as in the record; 'peak' for the sum."""
    num_bytes: int
    """Bytes at the peak."""
    share: float
    """Share of the peak."""
    predicted_bytes: int | None = None
    """Predicted bytes; None without a prediction, and for a category that it does not cover."""
    uncovered_bytes: int = 0
    """The part of num_bytes that the prediction does not cover."""

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured of the covered bytes; None where one of them is zero or unknown."""
        measured = self.num_bytes - self.uncovered_bytes
        return self.predicted_bytes / measured - 1 if self.predicted_bytes and measured else None


def error_text(error: float, decimals: int = 2) -> str:
    """+1.25 %; 'exact' where nothing is off, and '±0.00 %' where what is off rounds away."""
    if not error:
        return "exact"
    text = f"{100 * error:+.{decimals}f} %"
    return text if any(digit in text for digit in "123456789") else f"±{text[1:]}"


def parts(profile: MemoryProfile, prediction: MemoryPrediction | None = None) -> list[Part]:
    """The categories with anything at the peak, measured or predicted, in their order."""
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
    """The peak itself; the prediction of what it covers."""
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
    """Whether a prediction, which is of a CUDA device, says anything of a category on the record's device. A CPU has
    neither the workspaces of CUDA's libraries nor the rounding of its allocator."""
    return profile.source != "cpu allocator" or category not in ("workspaces", "rounding")


def at_peak(profile: MemoryProfile, *categories: str) -> int:
    """Bytes of these categories at the peak."""
    return sum(profile.at_peak.get(category, 0) for category in categories)


def has_owners(profile: MemoryProfile) -> bool:
    """Whether the record has categories by owner, which an imported snapshot lacks."""
    return not set(profile.at_peak) & {"before", "during"}


def allocated_bytes(allocations: Iterable[Allocation]) -> int:
    """Bytes requested by these groups of allocations together."""
    return sum(made.requested_bytes * made.count for made in allocations)


def all_saved_bytes(profile: MemoryProfile) -> int:
    """Bytes that autograd saved, those of kinds that the record had no room for among them."""
    return saved_bytes(profile.saved) + (profile.saved_left_out.num_bytes if profile.saved_left_out else 0)


def saved_bytes(saved: Iterable[SavedTensors]) -> int:
    """Memory that these saved tensors hold."""
    return sum(tensors.stored_bytes for tensors in saved)


def peak_of(run: Run) -> int | None:
    """The run's peak: what the allocator counted over the timed steps, else that of the watched step."""
    if run.peak:
        return run.peak.peak_allocated_bytes
    return run.memory_profile.peak_bytes if run.memory_profile else None


def capacity(run: Run) -> int | None:
    """Memory of the run's device; None on a CPU, and where it is not recorded."""
    if run.memory and run.memory.total_bytes:
        return run.memory.total_bytes
    if run.environment and run.environment.device.kind == "cuda":
        return run.environment.device.memory_bytes
    return None


def smallest_card(prediction: MemoryPrediction) -> CardFit | None:
    """The GPU of the catalogue with the least memory on which a step fits; None: it fits none."""
    fitting = [card for card in prediction.cards if card.verdict == "fits"]
    return min(fitting, key=lambda card: card.usable_bytes, default=None)
