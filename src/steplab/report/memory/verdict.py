"""The answer of a memory profile: the peak, its greatest parts, which GPUs it fits, and what precision does to it."""

from collections.abc import Iterator

from steplab import units
from steplab.records.memory_profile import MemoryProfile
from steplab.records.memory_references import MemoryReferences
from steplab.records.prediction import MemoryPrediction
from steplab.records.run import Run
from steplab.report.kit.document import Verdict
from steplab.report.memory import figures
from steplab.report.memory.categories import category_word
from steplab.report.memory.forecast import moved_words
from steplab.report.memory.pairs import BASELINES, among, counterpart, profile_of
from steplab.report.run.cells import RunCell, said

_WORTH_TELLING = 0.05
"""Share of the peak from which a category is told."""
_MOST_PARTS = 3


def memory_verdict(
    run: Run, prediction: MemoryPrediction | None = None, references: MemoryReferences | None = None
) -> Verdict:
    """The peak and its greatest parts, which GPUs it fits, and the peak with fp32 or without checkpointing; of a run
    with a memory profile."""
    profile = run.memory_profile
    assert profile is not None
    return Verdict(sentences=(_peak(profile), *_fits(run, profile, prediction), *effect_sentences(run, references)))


def _peak(profile: MemoryProfile) -> str:
    where = f", in {profile.peak_phase}" if profile.peak_phase else ""
    text = f"The peak is {units.format_bytes(profile.peak_bytes)}{where}"
    if not figures.has_owners(profile):
        return f"{text}."
    parts = sorted(figures.parts(profile), key=lambda part: -part.num_bytes)
    told = [part for part in parts if part.share >= _WORTH_TELLING][:_MOST_PARTS]
    if not told:
        return f"{text}."
    first, others = told[0], told[1:]
    text += f": {units.format_percent(first.share)} of it is {category_word(first.category)} "
    text += f"({units.format_bytes(first.num_bytes)})"
    rest = " and ".join(f"{category_word(part.category)} {units.format_percent(part.share)}" for part in others)
    return f"{text}, then {rest}." if rest else f"{text}."


def _fits(run: Run, profile: MemoryProfile, prediction: MemoryPrediction | None) -> Iterator[str]:
    """How much of the device the step took, and the smallest GPU of the catalogue that it fits."""
    total = run.memory.total_bytes if run.memory else None
    if profile.reserved_bytes is None or profile.outside_bytes is None:
        return
    taken = profile.reserved_bytes + profile.outside_bytes
    text = f"With the allocator's cache and what lies outside of it, the step took {units.format_bytes(taken)}"
    text += f" of the device's {units.format_bytes(total)}" if total else ""
    least = figures.smallest_card(prediction) if prediction else None
    if least:
        text += f"; the smallest GPU that it is predicted to fit is the {least.gpu} "
        text += f"({units.format_bytes(least.usable_bytes)})"
    yield f"{text}."


def effect_sentences(run: Run, references: MemoryReferences | None = None) -> Iterator[str]:
    """By how much low precision and checkpointing move the peak, measured or, for precision, predicted."""
    if run.spec is None or references is None or run.memory_profile is None:
        return
    own, every = among(run, references.others)
    for field, baseline in BASELINES:
        other = counterpart(own, every, field, baseline)
        if other:
            yield _moved(own, field, baseline, run.memory_profile.peak_bytes, profile_of(other).peak_bytes, "")
        elif field == "precision" and (forecast := references.forecasts.get(run.id)):
            before, after = forecast.fp32.peak_bytes, forecast.own.peak_bytes
            yield _moved(own, field, baseline, after, before, " (both predicted)")


def _moved(cell: RunCell, field: str, baseline: str, after: int, before: int, how: str) -> str:
    choice, moved = said(field, cell.values[field]), moved_words(after, before)
    against = f"{units.format_bytes(before)} with {said(field, baseline)}"
    if moved is None:
        return f"With {choice} the peak is the same as the {against}{how}."
    return f"With {choice} the peak is {moved} than the {against}{how}."
