"""The report of a profile: the device's time, categories, top kernels, attention, and calls of the host."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from steplab.errors import UserError
from steplab.records.profile import Profile
from steplab.records.run import Run
from steplab.report.kit.document import (
    Block,
    Document,
    Section,
    Sentences,
    Table,
    chapter,
    later,
    named_section,
    notes_section,
    record_section,
)
from steplab.report.profile import words
from steplab.report.profile.attention import attention_notes, attention_rows
from steplab.report.profile.charts import category_bars, device_time, kernel_bars
from steplab.report.profile.roofline import roofline
from steplab.report.profile.tables import (
    attention_table,
    category_table,
    host_call_table,
    kernel_rows,
    kernel_table,
    phase_table,
)
from steplab.report.profile.timeline import timeline_chart
from steplab.report.run.cells import RunCell, cells_of, label, varying
from steplab.report.run.words import run_subtitle, run_title

TITLE = "Where the time goes"
_MOST_OPEN = 6  # profiles of a page, after which they start closed


def profile_document(run: Run) -> Document:
    """The report of a run's profile, with its kernels as data. Raises UserError for a run without a profile."""
    if run.profile is None:
        raise UserError(f"run {run.id} has no profile; `steplab profile` makes a run that has one")
    kernels = Table(name="kernels", columns=(), rows=tuple(kernel_rows(run.profile)))
    section = profile_chapter(cells_of([run]))
    return Document(
        title=run_title(run),
        subtitle=run_subtitle(run),
        sections=(section,) if section else (),
        data=kernels,
    )


def profile_chapter(cells: Sequence[RunCell]) -> Section | None:
    """The profiled runs of a page, in the cells' order; after the sixth they start closed."""
    profiled = [(cell, cell.run.profile) for cell in cells if cell.run.profile]
    fields = varying(cells)
    parts = [
        replace(
            _record(cell.run, profile, label(cell, fields) if len(cells) > 1 else ""),
            folded=index >= _MOST_OPEN,
        )
        for index, (cell, profile) in enumerate(profiled)
    ]
    cautions = tuple(dict.fromkeys(words.caution(cell.run) for cell, _ in profiled))
    note = Sentences(texts=cautions, role="note")
    return chapter(TITLE, "profiles", note, *parts) if parts else None


def _record(run: Run, profile: Profile, title: str) -> Section:
    told = (*(f"Caution: {doubt}." for doubt in profile.doubts), words.time_sentence(run, profile))
    return record_section(words.heading(run, profile), told, _sections(run, profile), title=title)


def _sections(run: Run, profile: Profile) -> Iterator[Section]:
    yield _section(
        f"{words.device_word(profile)} time by phase",
        later(device_time, run, profile),
        phase_table(run, profile),
        words.overlap_note(run, profile),
    )
    told = [*words.matmul_sentences(run, profile), words.uncategorised_sentence(run, profile)]
    yield _section("Categories", later(category_bars, run, profile), category_table(run, profile), *told)
    if profile.kernels:
        tops = Sentences(texts=tuple(words.top_kernel_sentences(profile)), role="finding")
        yield _section(f"Top {words.kernels_word(profile)}", tops, later(kernel_bars, profile), kernel_table(profile))
    if rows := attention_rows(run, profile):
        notes = Sentences(texts=tuple(attention_notes(run, rows)), role="note")
        yield _section("Attention", attention_table(rows), words.softmax_sentence(run, profile), notes)
    yield _section("Roofline", later(roofline, run, profile))
    if talk := words.communication_sentence(run, profile):
        yield _section("Communication", talk)
    yield _section("Timeline of one step", later(timeline_chart, profile))
    if profile.host_calls:
        yield _section("Host calls that wait or copy", host_call_table(profile))
    yield from notes_section(words.further_notes(profile))


def _section(title: str, *parts: Block | str | None) -> Section:
    """A section of the blocks and sentences that are not None."""
    blocks = (Sentences(texts=(part,)) if isinstance(part, str) else part for part in parts)
    return named_section(title, *blocks)
