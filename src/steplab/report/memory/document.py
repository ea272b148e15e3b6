from collections.abc import Iterator, Mapping, Sequence

from steplab import units
from steplab.errors import UserError
from steplab.records.memory_profile import MemoryProfile
from steplab.records.prediction import MemoryPrediction
from steplab.records.run import Run
from steplab.report.kit.document import (
    MOST_IN_FULL,
    Block,
    Document,
    Section,
    Sentences,
    Verdict,
    later,
    records_in_full,
)
from steplab.report.kit.grouping import spread
from steplab.report.memory import figures, words
from steplab.report.memory.categories import category_word
from steplab.report.memory.charts import peak_bars
from steplab.report.memory.figures import BASELINES, among, capacity, counterpart, profile_of, watched
from steplab.report.memory.tables import allocation_table, category_rows, category_table, phase_table, saved_table
from steplab.report.memory.timeline import memory_timeline
from steplab.report.run.cells import RunCell, cells_of, label, said, varying
from steplab.report.run.charts import peak_memory
from steplab.report.run.one_run import memory_blocks, run_subtitle, run_title

_WORTH_TELLING = 0.05
_MOST_PARTS = 3
_SAME = 1e-3


def memory_verdict(run: Run, prediction: MemoryPrediction | None = None, references: Sequence[Run] = ()) -> Verdict:
    profile = run.memory_profile
    assert profile is not None
    return Verdict(sentences=(_peak(profile), *_fits(run, profile, prediction), *effect_sentences(run, references)))


def _peak(profile: MemoryProfile) -> str:
    where = f", in {profile.peak_phase}" if profile.peak_phase else ""
    text = f"The peak is {units.format_bytes(profile.peak_bytes)}{where}"
    parts = sorted(figures.parts(profile), key=lambda part: -part.num_bytes) if figures.has_owners(profile) else []
    told = [part for part in parts if part.share >= _WORTH_TELLING][:_MOST_PARTS]
    if not told:
        return f"{text}."
    first, others = told[0], told[1:]
    text += f": {units.format_percent(first.share)} of it is {category_word(first.category)} "
    text += f"({units.format_bytes(first.num_bytes)})"
    rest = " and ".join(f"{category_word(part.category)} {units.format_percent(part.share)}" for part in others)
    return f"{text}, then {rest}." if rest else f"{text}."


def _fits(run: Run, profile: MemoryProfile, prediction: MemoryPrediction | None) -> Iterator[str]:
    total = run.memory.total_bytes if run.memory else None
    if profile.reserved_bytes is None or profile.outside_bytes is None:
        return
    taken = profile.reserved_bytes + profile.outside_bytes
    text = f"With the allocator's cache and memory outside the allocator, the step took {units.format_bytes(taken)}"
    text += f" of the device's {units.format_bytes(total)}" if total else ""
    least = figures.smallest_card(prediction) if prediction else None
    if least:
        text += f"; the smallest GPU that it is predicted to fit is the {least.gpu} "
        text += f"({units.format_bytes(least.usable_bytes)})"
    yield f"{text}."


def effect_sentences(run: Run, references: Sequence[Run] = ()) -> Iterator[str]:
    if run.spec is None or run.memory_profile is None:
        return
    own, every = among(run, references)
    for field, baseline in BASELINES:
        if other := counterpart(own, every, field, baseline):
            after, before = run.memory_profile.peak_bytes, profile_of(other).peak_bytes
            against = f"{units.format_bytes(before)} with {said(field, baseline)}"
            with_it = f"With {said(field, own.values[field])} the peak is"
            if abs(after - before) <= _SAME * before and units.format_bytes(after) == units.format_bytes(before):
                yield f"{with_it} the same as the {against}."
            else:
                share = units.format_share(abs(after / before - 1))
                yield f"{with_it} {share} {'lower' if after < before else 'higher'} than the {against}."


TERMS = (
    (
        "categories of memory",
        "The uses of the allocated bytes, which sum to the peak. Parameters include buffers. Gradients are "
        "parameters'. Activations are computed in a forward pass, or recomputed by checkpointing, and saved for "
        "backward. Autocast copies are weights that were cast once for all uses. Inputs are the step's batch. "
        "Workspaces belong to libraries and exist before and after the step. Temporaries are all other memory "
        "allocated in the step. Rounding is the allocator's addition to requested sizes.",
    ),
)


def memory_document(
    run: Run, *, prediction: MemoryPrediction | None = None, references: Sequence[Run] = ()
) -> Document:
    """Report a run's memory profile.

    `references` are runs of the same step in fp32, or without checkpointing, to compare with. Raises UserError if the
    run has no memory profile.
    """
    profile = run.memory_profile
    if profile is None:
        raise UserError(f"run {run.id} has no memory profile; `steplab memory` makes a run that has one")
    predictions = {run.id: prediction} if prediction else {}
    return Document(
        title=run_title(run),
        subtitle=run_subtitle(run),
        verdict=memory_verdict(run, prediction, references),
        sections=(Section.of("Memory", *memory_chapter_blocks(cells_of([run]), predictions), anchor="memory"),),
        data=category_rows(profile, prediction),
    )


def memory_chapter_blocks(cells: Sequence[RunCell], predictions: Mapping[str, MemoryPrediction]) -> Iterator[Block]:
    fields = varying(cells)

    def record(cell: RunCell) -> Section:
        profile, title = profile_of(cell), label(cell, fields) if len(cells) > 1 else ""
        told = Verdict(sentences=(words.peak_sentence(profile),))
        sections = _sections(cell, predictions.get(cell.id))
        return Section.of_record(words.heading(cell.run, profile), told, sections, title=title)

    if len(cells) > 1:
        yield later(peak_memory, cells)
    elif cells and cells[0].run.failure is None and (cells[0].run.timing or cells[0].run.memory):
        yield from memory_blocks(cells[0].run)  # an imported trace has no timing and no memory
    yield Section.of("Peaks by category", peak_bars(cells, predictions))
    yield from records_in_full(watched_in_full(cells), watched(cells), record)


def watched_in_full(cells: Sequence[RunCell]) -> list[RunCell]:
    return spread(watched(cells), MOST_IN_FULL)


def _sections(cell: RunCell, prediction: MemoryPrediction | None) -> Iterator[Section]:
    run, profile = cell.run, profile_of(cell)
    yield Section.of("Memory over time", later(memory_timeline, profile, capacity(run)))
    predicted = words.prediction_sentence(profile, prediction) if prediction else None
    yield Section.of("Peak by category", category_table(profile, prediction), predicted)
    yield Section.of("Peaks by phase", phase_table(run, profile))
    yield from _allocations(run, profile)
    if saved := profile.saved:
        told = Sentences.of(words.saved_sentences(profile))
        yield Section.of("Saved for backward", told, saved_table(saved, profile.saved_left_out))
    checks = [*words.check_sentences(profile), *words.around_sentences(profile)]
    yield Section.notes([*checks, *profile.notes], "Notes on this memory")
    yield Section.notes(prediction.notes if prediction else (), "Notes on the prediction")


def _allocations(run: Run, profile: MemoryProfile) -> Iterator[Section]:
    alive = [made for made in profile.largest if made.at_peak]
    others = [made for made in profile.largest if not made.at_peak]
    told = words.residual_sentence(run, profile)
    table = allocation_table(run, alive, words.smaller_sentence(profile))
    yield Section.of("Largest allocations alive at the peak" if alive else "Sizes", told, table)
    gone = allocation_table(run, others, "total: over the whole step, not at one time.")
    yield Section.of("Largest allocations not alive at the peak", gone, folded=True)
