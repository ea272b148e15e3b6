from collections.abc import Iterator, Mapping, Sequence

from steplab import units
from steplab.errors import UserError
from steplab.records.finding import Findings
from steplab.records.profile import Profile
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
from steplab.report.profile import tables, words
from steplab.report.profile.attention import attention_notes, attention_rows
from steplab.report.profile.charts import device_time
from steplab.report.profile.roofline import roofline
from steplab.report.profile.timeline import timeline_chart
from steplab.report.profile.verdict import finding_sentences, findings_section
from steplab.report.run.cells import RunCell, cells_of, label, varying
from steplab.report.run.one_run import interval_words, run_subtitle, run_title
from steplab.report.run.verdict import run_cautions
from steplab.stats import summarize

TITLE = "Where the time goes"


def profile_document(run: Run, findings: Findings | None = None) -> Document:
    """Report a profile, with kernels as data and the verdict from `findings`, if given.

    Raises UserError if the run has no profile.
    """
    if run.profile is None:
        raise UserError(f"run {run.id} has no profile; `steplab profile` makes a run that has one")
    blocks = profile_blocks(cells_of([run]), {run.id: findings} if findings else {})
    return Document(
        title=run_title(run),
        subtitle=run_subtitle(run),
        verdict=profile_verdict(run, run.profile, findings),
        sections=(Section.of(TITLE, *blocks, anchor="profiles"),),
        data=tables.kernel_rows(run.profile),
    )


def profile_verdict(run: Run, profile: Profile, findings: Findings | None = None) -> Verdict:
    timed = []
    if run.samples_s:
        summary = summarize(run.samples_s)
        timed = [f"A step takes {units.format_time(summary.median)} ({interval_words(summary)}) without the profiler."]
    cautions = (*_doubts(profile), *run_cautions(run))
    return Verdict(sentences=(*finding_sentences(run, findings), *timed), cautions=cautions)


def profile_blocks(cells: Sequence[RunCell], findings: Mapping[str, Findings] | None = None) -> Iterator[Block]:
    profiled = [cell for cell in cells if cell.run.profile]
    fields, found = varying(cells), findings or {}

    def record(cell: RunCell) -> Section:
        run, profile = cell.run, cell.run.profile
        assert profile is not None
        title = label(cell, fields) if len(cells) > 1 else ""
        doubts = _doubts(profile) if title else ()  # else they open the report
        told = Verdict(sentences=(words.time_sentence(run, profile),), cautions=doubts)
        first = [findings_section(found[cell.id])] if cell.id in found else []
        return Section.of_record(words.heading(run, profile), told, [*first, *_sections(run, profile)], title=title)

    yield Sentences.of([words.caution(cell.run for cell in profiled)] if profiled else [], "note")
    yield from records_in_full(spread(profiled, MOST_IN_FULL), profiled, record)


def _doubts(profile: Profile) -> tuple[str, ...]:
    return tuple(f"Caution: {doubt}." for doubt in profile.doubts)


def _sections(run: Run, profile: Profile) -> Iterator[Section]:
    yield Section.of(
        f"{words.device_word(profile)} time by phase",
        device_time(run, profile),
        tables.phase_table(run, profile),
        words.overlap_note(run, profile),
    )
    told = [*words.matmul_sentences(run, profile), words.uncategorised_sentence(run, profile)]
    yield Section.of("Categories", tables.category_table(run, profile), *told)
    if profile.kernels:
        tops = Sentences.of(words.top_kernel_sentences(profile), "finding")
        yield Section.of(f"Top {words.kernels_word(profile)}", tops, tables.kernel_table(profile))
    if rows := attention_rows(run, profile):
        notes = Sentences.of(attention_notes(run, rows), "note")
        yield Section.of("Attention", tables.attention_table(rows), words.softmax_sentence(run, profile), notes)
    if run.traced_ranks:
        yield tables.ranks_section(run.traced_ranks)
    yield Section.of("Roofline", later(roofline, run, profile))
    yield Section.of("Communication", words.communication_sentence(run, profile))
    yield Section.of("Timeline of one step", later(timeline_chart, profile))
    yield Section.of("Host calls that wait or copy", tables.host_call_table(profile))
    yield Section.notes(note for note in profile.notes if note not in profile.doubts)  # which begin the section
