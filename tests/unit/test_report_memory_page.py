"""The page's section on memory: whole, self-contained, bounded, and what it says first."""

import random
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from tests.runs import make_run, out_of_memory
from tests.unit.memory_records import cpu_run, imported_snapshot, prediction_of, watched_run

from steplab import units
from steplab.records.memory_profile import Allocation, MemoryProfile, MemoryTimeline
from steplab.records.run import Run
from steplab.report.kit.document import Chart, Section, Sentences
from steplab.report.kit.html import drawn
from steplab.report.memory.document import memory_chapter, watched_in_full
from steplab.report.memory.facts import memory_facts
from steplab.report.page import render_page
from steplab.report.report import Context
from steplab.report.run.cells import cells_of

HOSTILE = "<script>alert(1)</script>\x1b[31m$&|{{7*7}}"
CONTEXTS = [
    watched_run({"context": context, "precision": precision})
    for context in (128, 256, 512)
    for precision in ("fp32", "bf16")
]
SETTINGS = [watched_run({"context": 128, "checkpointing": name}, checkpointed=True) for name in ("full", "selective")]
IMPORTED = imported_snapshot()


def profile_of(run: Run) -> MemoryProfile:
    assert run.memory_profile is not None
    return run.memory_profile


def parts_of(runs: list[Run]) -> list[Section]:
    """The sections of the chapter."""
    chapter = memory_chapter(cells_of(runs), {})
    assert chapter is not None
    return [block for block in drawn(chapter).blocks if isinstance(block, Section)]


def chart_of(section: Section) -> Chart:
    (chart,) = section.blocks
    assert isinstance(chart, Chart)
    return chart


def section_of(page: str) -> str:
    (section,) = re.findall(r'<section id="memory">(.*?)</section>', page, re.DOTALL)
    return str(section)


class Balance(HTMLParser):
    """Every element that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass


def assert_whole(page: str) -> None:
    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    assert not re.findall(r"(?:src|href)=\"(?!#)", page)
    assert "<script" not in page
    assert "None" not in re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)


@pytest.mark.parametrize(
    "runs",
    [
        [CONTEXTS[0]],
        [IMPORTED],
        [cpu_run()],
        [*CONTEXTS, *SETTINGS, IMPORTED, make_run(seed=5), out_of_memory({"model": "xl"})],
    ],
    ids=["one", "snapshot", "cpu", "all"],
)
def test_a_page_with_watched_memory_is_whole_and_needs_nothing_else(runs: list[Run]) -> None:
    page = render_page(runs, title="Memory")
    assert page == render_page(runs, title="Memory")
    assert_whole(page)
    assert page.count('<a href="#memory">') == 1
    section, watched = section_of(page), [cell.run for cell in watched_in_full(cells_of(runs))]
    assert len(re.findall("Memory over time</h[34]>", section)) == len(watched)
    assert len(re.findall("Peak by category</h[34]>", section)) == len(watched)
    for run in watched:
        assert f"({profile_of(run).peak_bytes:,} bytes)" in section
        for size in profile_of(run).at_peak.values():
            assert f">{size:,}</td>" in section
    assert "categories of memory" in page


def test_contexts_of_one_cell_stand_side_by_side() -> None:
    parts = parts_of([*CONTEXTS, *SETTINGS, IMPORTED])
    groups = [part for part in parts if part.title.startswith("Over time")]
    assert [part.title for part in groups] == [
        f"Over time, by context: small · {precision} · no checkpointing" for precision in ("fp32", "bf16")
    ]
    for part in groups:
        assert [picture.title for picture in chart_of(part).pictures] == ["context 128", "context 256", "context 512"]
    (tradeoff,) = [part for part in parts if part.title.startswith("Checkpointing")]
    assert [picture.title for picture in chart_of(tradeoff).pictures] == ["small · context 128 · fp32"]


def test_each_run_is_compared_with_its_own_counterpart() -> None:
    by_title = {}
    for part in [*parts_of([*CONTEXTS]), *parts_of([CONTEXTS[0], *SETTINGS])]:
        sentences = [
            text
            for section in part.blocks
            if isinstance(section, Section)
            for block in section.blocks
            if isinstance(block, Sentences)
            for text in block.texts
        ]
        by_title[part.title] = " ".join(sentences)
    for fp32, bf16 in zip(CONTEXTS[::2], CONTEXTS[1::2], strict=True):
        assert fp32.spec is not None
        told = by_title[f"context {fp32.spec.context} · bf16"]
        before, after = (units.format_bytes(profile_of(run).peak_bytes) for run in (fp32, bf16))
        assert f": {after}, against {before} with fp32." in told
        assert "with fp32" not in by_title[f"context {fp32.spec.context} · fp32"]
    assert "With checkpointing (selective) the peak is" in by_title["checkpointing selective"]


def test_predictions_stand_beside_what_was_measured() -> None:
    run = CONTEXTS[0]
    prediction = prediction_of(profile_of(run), 1.05)
    page = render_page([run], title="x", about=Context(predictions={run.id: prediction}))
    section = section_of(page)
    for size in [*prediction.at_peak.values(), prediction.peak_bytes]:
        assert f">{size:,}</td>" in section
    assert section.count(">+5.00 %</td>") == len(prediction.at_peak) + 1
    assert "What the peaks are made of" in section
    assert "The stroke marks the predicted peak" in section
    assert "Notes on the prediction" in section
    assert "attention is plain" in section
    assert "The stroke marks" not in render_page([run], title="x")


def test_without_watched_memory_the_page_does_not_speak_of_it() -> None:
    page = render_page([make_run()], title="x")
    assert "Peak by category" not in page
    chapter = memory_chapter(cells_of([make_run()]), {})
    assert chapter is not None
    assert not any(isinstance(block, Section) for block in drawn(chapter).blocks)


def test_six_runs_are_shown_in_full_and_long_tables_go_on_closed() -> None:
    runs = [replace(IMPORTED, id=f"{index:012x}", name=f"rank{index}") for index in range(8)]
    parts = [part for part in parts_of(runs) if part.title.startswith("rank")]
    assert [part.title for part in parts] == [f"rank{index}" for index in (0, 1, 3, 4, 6, 7)]
    page = render_page([IMPORTED], title="x")
    num_alive = sum(made.at_peak for made in profile_of(IMPORTED).largest)
    assert f"<summary>{num_alive - 10} more rows</summary>" in page
    assert len(re.findall("Largest allocations alive at the peak</h[34]>", page)) == 1


def test_hostile_names_are_text_on_the_page() -> None:
    profile = profile_of(CONTEXTS[1])
    hostile = replace(
        profile,
        peak_source=HOSTILE,
        peak_op=HOSTILE,
        peak_module=HOSTILE,
        peak_phase=HOSTILE,
        device=HOSTILE,
        file=HOSTILE,
        notes=(HOSTILE,),
        phases=tuple(replace(phase, name=HOSTILE) for phase in profile.phases),
        largest=tuple(
            replace(made, source=HOSTILE, op=HOSTILE, module=HOSTILE, dtype=HOSTILE) for made in profile.largest
        ),
        saved=tuple(replace(saved, module=HOSTILE, op=HOSTILE, dtype=HOSTILE) for saved in profile.saved),
    )
    runs = [replace(CONTEXTS[1], memory_profile=hostile), replace(IMPORTED, name=HOSTILE, memory_profile=hostile)]
    page = render_page([*runs, CONTEXTS[3]], title="x")
    assert_whole(page)
    assert "49" not in re.findall(r"alert\(1\)&lt;/script&gt;[^<]{0,20}", page)[0]


def test_a_page_of_a_snapshot_with_a_history_of_any_length_is_small() -> None:
    rng = random.Random(1)
    num = 60_000
    timeline = MemoryTimeline(
        time_s=tuple(range(num)),
        categories=("before", "during", "rounding"),
        allocated_bytes=tuple(tuple(rng.randrange(10**10) for _ in range(num)) for _ in range(3)),
        by_event=True,
    )
    long_line = "/very/long/path/" * 20 + "train.py:{} in step"
    largest = tuple(
        Allocation(requested_bytes=size, block_bytes=size, category="during", source=long_line.format(size))
        for size in range(2_000)
    )
    profile = replace(profile_of(IMPORTED), timeline=timeline, largest=largest)
    page = render_page([replace(IMPORTED, memory_profile=profile)], title="x")
    assert len(page.encode()) < 300_000


# --- what the page says first ---------------------------------------------------------------------------------------


def test_the_summary_says_what_the_highest_peak_is_and_what_each_choice_does_to_it() -> None:
    runs = [*CONTEXTS, SETTINGS[0]]
    first, low, full = memory_facts(cells_of(runs), ["context", "precision", "checkpointing"])
    highest = max(runs, key=lambda run: profile_of(run).peak_bytes)
    share = profile_of(highest).at_peak["activations"] / profile_of(highest).peak_bytes
    assert first.figure == units.format_percent(share)
    assert first.text.startswith("of the highest peak watched is activations: context 512 · fp32 · no checkpointing (")
    changes = sorted(
        profile_of(bf16).peak_bytes / profile_of(fp32).peak_bytes - 1
        for fp32, bf16 in zip(CONTEXTS[::2], CONTEXTS[1::2], strict=True)
    )
    assert low.figure == f"{100 * changes[0]:+.1f} % to {100 * changes[2]:+.1f} %"
    assert f"{100 * changes[0]:+.1f} % at" in low.text
    assert f"{100 * changes[2]:+.1f} % at" in low.text
    change = profile_of(SETTINGS[0]).peak_bytes / profile_of(CONTEXTS[0]).peak_bytes - 1
    assert full.figure == f"{100 * change:+.1f} %"
    assert full.text == "peak memory, checkpointing full instead of no checkpointing, at context 128 · fp32."


def test_snapshots_and_unwatched_runs_have_no_such_facts() -> None:
    assert memory_facts(cells_of([IMPORTED, make_run(), make_run({"precision": "bf16"})]), []) == []
