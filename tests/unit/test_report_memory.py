import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest
from tests.rendering import assert_whole, render_page
from tests.runs import make_run, out_of_memory
from tests.sure import sure
from tests.unit.memory_records import MIB, cpu_run, imported_snapshot, prediction_of, watched_run

from steplab import units
from steplab.errors import UserError
from steplab.records.memory_profile import Allocation, LeftOut, MemoryProfile, MemoryTimeline
from steplab.records.run import Run
from steplab.report.kit import table
from steplab.report.kit.document import Section, drawn
from steplab.report.kit.rendering import render
from steplab.report.memory.document import memory_chapter_blocks, memory_document, watched_in_full
from steplab.report.memory.figures import error_text, parts, whole
from steplab.report.memory.tables import allocation_table, category_rows, derivation, saved_table, shaped_as
from steplab.report.memory.words import residual_sentence, saved_sentences
from steplab.report.report import Context
from steplab.report.run.cells import cells_of
from steplab.specs.resolve import resolve_step

FP32, BF16 = watched_run({"context": 512}), watched_run({"context": 512, "precision": "bf16"})
CHECKPOINTED = watched_run({"context": 512, "checkpointing": "full"}, checkpointed=True)
IMPORTED, CPU = imported_snapshot(), cpu_run()
ALL = {"fp32": FP32, "bf16": BF16, "checkpointed": CHECKPOINTED, "imported": IMPORTED, "cpu": CPU}


def profile_of(run: Run) -> MemoryProfile:
    assert run.memory_profile is not None
    return run.memory_profile


def text_of(run: Run, *, width: int, **beside_it: Any) -> str:
    return render(memory_document(run, **beside_it), width=width)


def flat(text: str) -> str:
    return " ".join(text.split())


# --- the text ---------------------------------------------------------------------------------------------


def test_what_was_predicted_alone_or_measured_alone_has_a_row_and_no_error_out_of_nothing() -> None:
    profile = profile_of(FP32)
    prediction = replace(prediction_of(profile), at_peak={"autocast_copies": MIB, "parameters": 5 * MIB})
    found = {part.category: part for part in parts(profile, prediction)}
    assert (found["autocast_copies"].num_bytes, found["autocast_copies"].error) == (0, None)
    assert (found["activations"].predicted_bytes, found["activations"].error) == (0, None)


def test_on_a_cpu_the_prediction_is_compared_in_what_it_covers() -> None:
    """Predictions are for CUDA: a CPU lacks cuBLAS's workspaces and the allocator's rounding."""
    profile = replace(profile_of(FP32), source="cpu allocator", at_peak={"parameters": 100, "workspaces": 4})
    profile = replace(profile, peak_bytes=104)
    prediction = replace(
        prediction_of(profile), at_peak={"parameters": 110, "workspaces": 64 * MIB, "rounding": 50}, peak_bytes=64 * MIB
    )
    found = {part.category: part for part in parts(profile, prediction)}
    assert set(found) == {"parameters", "workspaces"}
    assert (found["workspaces"].predicted_bytes, found["workspaces"].error) == (None, None)
    peak = whole(profile, prediction)
    assert peak.predicted_bytes == 110
    assert peak.error == pytest.approx(0.1)
    assert {row["predicted_peak_bytes"] for row in category_rows(profile, prediction)} == {110}


def test_without_a_memory_profile_it_says_how_to_get_one() -> None:
    with pytest.raises(UserError, match="`steplab memory` makes a run that has one"):
        memory_document(make_run())


# --- one residual-stream tensor, the largest allocation ------------------------------------------------------


@pytest.mark.parametrize("run", [FP32, BF16, CPU], ids=["fp32", "bf16", "cpu"])
def test_the_size_of_the_residual_stream_is_derived(run: Run) -> None:
    said = sure(residual_sentence(run, profile_of(run)))
    assert run.spec is not None
    figures = sure(re.search(r"= ([\d ×]+) = ([\d,]+) bytes; the peak is (\S+) times that", said))
    factors = [int(factor) for factor in figures[1].split(" × ")]
    assert factors == [run.spec.batch, run.spec.context, sure(run.spec.model.shape).d_model, 4]
    product = factors[0] * factors[1] * factors[2] * factors[3]
    assert int(figures[2].replace(",", "")) == product
    assert float(figures[3]) == pytest.approx(profile_of(run).peak_bytes / product, rel=0.005)
    assert ("Under autocast it stays float32" in said) == (run is BF16)


def test_where_nobody_knows_what_the_sizes_are_they_are_figures() -> None:
    unknown = sure(residual_sentence(replace(FP32, spec=None), profile_of(FP32)))
    assert "is 6.00 MiB: 4 × 512 × 768 × 4 (float32) = 6,291,456 bytes" in unknown
    assert residual_sentence(IMPORTED, profile_of(IMPORTED)) is None
    assert derivation((3, 4), "float4", None) is None


SCORES, LOGITS = (4, 12, 512, 512), (2048, 10_000)
SHAPES: list[tuple[tuple[int, ...], str | None]] = [
    (SCORES, "attention scores"),
    ((48, 512, 512), "attention scores"),
    (LOGITS, "logits"),
    ((4, 512, 10_000), "logits"),
    ((2048, 768), "residual stream"),
    ((4, 512, 3072), "inner feed-forward"),
    ((512, 512), None),  # not as many as the scores
    ((123, 45), None),
    ((), None),
]


@pytest.mark.parametrize(("shape", "words"), SHAPES)
def test_a_shape_is_named_only_where_it_is_certain(shape: tuple[int, ...], words: str | None) -> None:
    assert shaped_as(shape, FP32.spec) == words
    assert shaped_as(shape, None) is None


def test_the_table_of_allocations_names_shapes_of_activations_and_of_no_parameters() -> None:
    values: dict[str, Any] = {"requested_bytes": 1, "block_bytes": 512, "shape": LOGITS}
    made = [Allocation(category=category, **values) for category in ("activations", "gradients", "parameters")]
    unknown = Allocation(requested_bytes=1, block_bytes=512, category="activations")
    rows = allocation_table(FP32, [*made, unknown]).rows
    assert [row["what"] for row in rows] == ["logits", None, None, None]


def test_sizes_that_are_alike_are_not_told_apart() -> None:
    square = resolve_step({"model": "small", "context": 512, "model.d_ff": 768, "model.vocab_size": 768})
    assert shaped_as((2048, 768), square) is None
    assert derivation((2048, 768), "float32", square) == "2048 × 768 × 4 (float32)"


@pytest.mark.parametrize("context", [64, 32])  # as wide as a head, and as one of the halves that are turned
def test_scores_that_a_query_could_be_are_not_called_scores(context: int) -> None:
    spec = resolve_step({"model": "small", "context": context})
    shape = (4, 12, context, context)
    assert shaped_as(shape, spec) is None
    assert derivation(shape, "float32", spec) == f"4 × 12 × {context} × {context} × 4 (float32)"


# --- what autograd kept -------------------------------------------------------------------------------------


def test_what_a_block_saves_is_told_in_multiples_of_its_input() -> None:
    profile = profile_of(BF16)
    _, block = saved_sentences(profile)
    times = profile.blocks[0].saved_bytes / (4 * 4 * 512 * 768)
    assert f"{times:.1f} times its input" in block


def test_what_the_lists_were_too_short_for_is_counted_in_the_totals() -> None:
    profile = replace(profile_of(BF16), saved_left_out=LeftOut(count=7, num_bytes=64 * MIB))
    total = sum(saved.stored_bytes for saved in profile.saved) + 64 * MIB
    assert next(saved_sentences(profile)).startswith(f"Autograd saved {units.format_bytes(total)} for")
    table = saved_table(profile.saved, profile.saved_left_out)
    assert table.caption == "The table leaves out 7 smaller kinds, 64.0 MiB together."
    assert sum(float(str(row["share"])) for row in table.rows) == pytest.approx(1 - 64 * MIB / total)
    many_kinds = [replace(profile.saved[0], shape=(n,), stored_bytes=n * MIB) for n in range(1, 51)]
    assert [row["stored_bytes"] for row in saved_table(many_kinds).rows] == [n * MIB for n in range(50, 10, -1)]
    assert saved_table(many_kinds).caption == "The table leaves out 10 smaller kinds, 55.0 MiB together."


# --- tables: what looks alike, what a narrow terminal shows ---------------------------------------------------


def made(mib: int, count: int, **fields: Any) -> Allocation:
    values: dict[str, Any] = {"category": "gradients", "phase": "backward", "op": "aten::mm", "at_peak": True} | fields
    return Allocation(requested_bytes=mib * MIB, block_bytes=mib * MIB, count=count, **values)


def test_no_two_rows_look_alike_and_their_sums_stay() -> None:
    groups = [made(10, 3, shape=(10, 20)), made(10, 5, shape=(20, 10)), made(5, 2), made(10, 1, shape=(10, 20))]
    told = allocation_table(FP32, [*groups, replace(made(5, 5), block_bytes=8 * MIB)], remark="And more.")
    assert [(row["requested_bytes"], row["count"], row["together_bytes"], row["shape"]) for row in told.rows] == [
        (10 * MIB, 5, 50 * MIB, "20 × 10"), (10 * MIB, 4, 40 * MIB, "10 × 20"), (5 * MIB, 7, 35 * MIB, None)
    ]  # fmt: skip
    assert told.caption == "And more."


def test_allocations_of_one_line_are_distinct_on_a_narrow_terminal() -> None:
    gate, up = (
        made(10, 3, source="a/model.py:118 in f", module=f"blocks.0.feed_forward.{name}") for name in ("gate", "up")
    )
    told = table.drawn(table.sheet(allocation_table(FP32, [gate, up, replace(gate, op="aten::silu")])), 80)
    assert "module" not in " ".join(told.header)
    assert len(set(told.rows)) == 3


@pytest.mark.parametrize("width", [60, 72, 80, 120])
@pytest.mark.parametrize("run", ALL.values(), ids=ALL)
def test_no_line_is_wider_than_the_terminal_and_no_figure_is_broken_over_lines(run: Run, width: int) -> None:
    prediction = prediction_of(profile_of(run))
    text = text_of(run, prediction=prediction, references=(FP32,), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "None" not in text
    wide = text_of(run, prediction=prediction, references=(FP32,), width=1000)
    long_figure = r"\d[\d,]*,\d{3}|\.py:\d+"
    assert {*re.findall(long_figure, text)} <= {*re.findall(long_figure, wide)}
    assert not re.search(r"\d[,.:]?\n\s+(?:(?:[KMG]i)?B\b|%|ms\b)", text)


def test_an_error_that_rounds_away_is_told_from_none() -> None:
    assert [error_text(error) for error in (0.0, 1e-6, -1e-6, 0.0125, -0.5)] == [
        "exact", "±0.00 %", "±0.00 %", "+1.25 %", "-50.00 %"
    ]  # fmt: skip


# --- why a precision, or checkpointing, moves the peak ---------------------------------------------------------


def test_among_other_runs_the_same_cell_is_found_and_no_other() -> None:
    others = (watched_run({"context": 256}), FP32, CPU, IMPORTED, BF16)
    told = flat(text_of(BF16, references=others, width=120))
    assert "than the 3.81 GiB with fp32." in told or "same as the 3.81 GiB with fp32" in told
    assert "with fp32" not in flat(text_of(BF16, references=(watched_run({"context": 256}), make_run()), width=120))
    assert "3.81 GiB with no checkpointing" in flat(text_of(CHECKPOINTED, references=(BF16, FP32), width=120))


# --- rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ALL.values(), ids=ALL)
def test_the_rows_sum_to_the_peak(run: Run) -> None:
    profile = profile_of(run)
    prediction = prediction_of(profile)
    rows = category_rows(profile, prediction)
    assert {row["category"]: row["bytes"] for row in rows} == profile.at_peak
    assert sum(int(str(row["bytes"])) for row in rows) == profile.peak_bytes
    predicted = sum(int(str(row["predicted_bytes"] or 0)) for row in rows)
    on_cpu = profile.source == "cpu allocator"
    left_out = ("workspaces", "rounding") if on_cpu else ()  # which a CPU has none of
    assert predicted == sum(size for name, size in prediction.at_peak.items() if name not in left_out)
    assert on_cpu or predicted == prediction.peak_bytes
    assert {row["predicted_peak_bytes"] for row in rows} == {predicted}
    assert json.loads(render(memory_document(run, prediction=prediction), "json")) == list(rows)


# --- the page -----------------------------------------------------------------------------------------------


CONTEXTS = [
    watched_run({"context": context, "precision": precision})
    for context in (128, 256, 512)
    for precision in ("fp32", "bf16")
]


def parts_of(runs: list[Run]) -> list[Section]:
    chapter = Section.of("Memory", *memory_chapter_blocks(cells_of(runs), {}))
    return [block for block in drawn(chapter).blocks if isinstance(block, Section)]


def section_of(page: str) -> str:
    (section,) = re.findall(r'<section id="memory">(.*?)</section>', page, re.DOTALL)
    return str(section)


@pytest.mark.parametrize(
    "runs",
    [
        [CONTEXTS[0]],
        [IMPORTED],
        [cpu_run()],
        [*CONTEXTS, CHECKPOINTED, IMPORTED, make_run(seed=5), out_of_memory({"model": "xl"})],
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
    for run in watched:
        assert f"({profile_of(run).peak_bytes:,} bytes)" in section


def test_predictions_stand_beside_what_was_measured() -> None:
    run = CONTEXTS[0]
    prediction = prediction_of(profile_of(run), 1.05)
    page = render_page([run], title="x", about=Context(predictions={run.id: prediction}))
    section = section_of(page)
    for size in [*prediction.at_peak.values(), prediction.peak_bytes]:
        assert f">{size:,}</td>" in section
    assert section.count(">+5.00 %</td>") == len(prediction.at_peak) + 1
    assert "attention is plain" in section


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
