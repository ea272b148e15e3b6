import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.rendering import assert_whole
from tests.runs import make_run, out_of_memory
from tests.stored_lines import fill
from tests.stored_records import stored
from tests.sure import sure
from tests.unit.memory_records import (
    MIB,
    cpu_run,
    imported_snapshot,
    prediction_of,
    watched_run,
)

from steplab import units
from steplab.errors import UserError
from steplab.lab.explaining import fp32_forecast, memory_references
from steplab.records.memory_profile import Allocation, LeftOut, MemoryProfile, MemoryTimeline, SavedTensors
from steplab.records.memory_references import Fp32Forecast, MemoryReferences
from steplab.records.run import Run
from steplab.report.kit.document import Chart, Section
from steplab.report.kit.html import drawn
from steplab.report.kit.rendering import render
from steplab.report.memory.comparison import (
    checkpointing_sentences,
    comparison_sentences,
    forecast_sentence,
    precision_sentences,
)
from steplab.report.memory.document import memory_chapter, memory_document, watched_in_full
from steplab.report.memory.figures import error_text, memory_facts, parts, whole
from steplab.report.memory.tables import allocation_table, category_rows, derivation, saved_table, what_it_is
from steplab.report.memory.words import (
    residual_sentence,
    saved_sentences,
)
from steplab.report.page import render_page
from steplab.report.report import Context
from steplab.report.run.cells import cells_of
from steplab.specs.resolve import resolve_step

FP32, BF16 = watched_run({"context": 512}), watched_run({"context": 512, "precision": "bf16"})
CHECKPOINTED = watched_run({"context": 512, "checkpointing": "full"}, checkpointed=True)
IMPORTED, CPU = imported_snapshot(), cpu_run()
ALL = {"fp32": FP32, "bf16": BF16, "checkpointed": CHECKPOINTED, "imported": IMPORTED, "cpu": CPU}
HOSTILE = "<script>alert(1)</script>\x1b[31m$&|{{7*7}}\x07"


def profile_of(run: Run) -> MemoryProfile:
    assert run.memory_profile is not None
    return run.memory_profile


def beside(*runs: Run) -> MemoryReferences:
    return MemoryReferences(others=runs)


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
TENSORS: list[tuple[dict[str, Any], str | None]] = [
    ({"shape": SCORES, "op": "aten::_softmax", "phase": "forward"}, "attention weights (softmax of the scores)"),
    ({"shape": (48, 512, 512), "op": "aten::bmm", "phase": "forward"}, "products of queries and keys"),
    ({"shape": SCORES, "op": "aten::mul.Tensor", "phase": "forward"}, "scaled attention scores"),
    ({"shape": SCORES, "op": "aten::bmm", "phase": "backward"}, "a tensor of the size of the attention scores"),
    ({"shape": SCORES, "op": "aten::_softmax_backward_data", "phase": "backward"}, "gradient of the attention scores"),
    ({"shape": LOGITS, "op": "aten::mm", "phase": "forward"}, "logits"),
    ({"shape": LOGITS, "op": "aten::_log_softmax", "phase": "forward"}, "log-probabilities of the loss"),
    ({"shape": (4, 512, 10_000), "op": "aten::mm", "phase": "backward"}, "a tensor of the size of the logits"),
    ({"shape": LOGITS, "op": "aten::_log_softmax_backward_data", "phase": "backward"}, "gradient of the logits"),
    ({"shape": (10_000, 768), "category": "gradients"}, "gradient of the embedding or the head"),
    ({"shape": (3072, 768), "category": "parameters"}, "a feed-forward weight"),
    ({"shape": (768, 3072), "category": "autocast_copies"}, "low-precision copy of a feed-forward weight"),
    ({"shape": (2048, 768)}, "a tensor of the width of the residual stream"),
    ({"shape": (512, 512)}, None),  # not as many as the scores
    ({"shape": (123, 45)}, None),
    ({"shape": None}, None),
]


@pytest.mark.parametrize(("fields", "words"), TENSORS)
def test_a_tensor_is_named_only_where_shape_and_operator_make_it_certain(
    fields: dict[str, Any], words: str | None
) -> None:
    values: dict[str, Any] = {"requested_bytes": 1, "block_bytes": 512, "category": "activations"} | fields
    made = Allocation(**values)
    assert what_it_is(made, FP32.spec) == words
    assert what_it_is(made, None) is None


def test_sizes_that_are_alike_are_not_told_apart() -> None:
    square = resolve_step({"model": "small", "context": 512, "model.d_ff": 768, "model.vocab_size": 768})
    made = Allocation(requested_bytes=1, block_bytes=1, category="gradients", shape=(768, 768))
    assert what_it_is(made, square) is None
    assert what_it_is(replace(made, category="activations", shape=(2048, 768), op="aten::mm"), square) is None
    assert derivation((2048, 768), "float32", square) == "2048 × 768 × 4 (float32)"


@pytest.mark.parametrize("context", [64, 32])  # as wide as a head, and as one of the halves that are turned
def test_scores_that_a_query_could_be_are_not_called_scores(context: int) -> None:
    spec = resolve_step({"model": "small", "context": context})
    shape = (4, 12, context, context)
    for op in ("aten::bmm", "aten::mul.Tensor", "aten::_to_copy"):
        made = Allocation(requested_bytes=1, block_bytes=1, category="activations", op=op, shape=shape)
        assert what_it_is(made, spec) is None
    assert derivation(shape, "float32", spec) == f"4 × 12 × {context} × {context} × 4 (float32)"


# --- what autograd kept -------------------------------------------------------------------------------------


def test_what_a_block_saves_is_told_in_multiples_of_its_input() -> None:
    profile = profile_of(BF16)
    _, block = saved_sentences(BF16, profile)
    times = profile.blocks[0].saved_bytes / (4 * 4 * 512 * 768)
    assert f"{times:.1f} times its input" in block


def test_the_copies_of_weights_that_a_block_keeps_are_told_beside_its_activations() -> None:
    def copies(count: int) -> SavedTensors:
        return SavedTensors(module="blocks.*.feed_forward", op="MmBackward0", shape=(768, 3072), dtype="bfloat16",
                            count=count, stored_bytes=120 * MIB, category="autocast_copies")  # fmt: skip

    def told(count: int, **fields: Any) -> str:
        profile = replace(profile_of(BF16), saved=(copies(count),), **fields)
        return next(text for text in saved_sentences(BF16, profile) if text.startswith("blocks.0"))

    assert ", and 10.0 MiB of low-precision copies of its weights" in told(12)
    assert ", not counting low-precision copies of its weights" in told(11)
    assert ", not counting low-precision copies of its weights" in told(
        12, saved_left_out=LeftOut(count=1, num_bytes=1)
    )
    assert not any("copies of its" in text for text in saved_sentences(FP32, profile_of(FP32)))


def test_what_the_lists_were_too_short_for_is_counted_in_the_totals() -> None:
    profile = replace(profile_of(BF16), saved_left_out=LeftOut(count=7, num_bytes=64 * MIB))
    total = sum(saved.stored_bytes for saved in profile.saved) + 64 * MIB
    assert next(saved_sentences(BF16, profile)).startswith(f"Autograd saved {units.format_bytes(total)} for")
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


@pytest.mark.parametrize("width", [60, 72, 80, 120])
@pytest.mark.parametrize("run", ALL.values(), ids=ALL)
def test_no_line_is_wider_than_the_terminal_and_no_figure_is_broken_over_lines(run: Run, width: int) -> None:
    prediction = prediction_of(profile_of(run))
    text = text_of(run, prediction=prediction, references=beside(FP32), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "None" not in text
    wide = text_of(run, prediction=prediction, references=beside(FP32), width=1000)
    long_figure = r"\d[\d,]*,\d{3}|\.py:\d+"
    assert {*re.findall(long_figure, text)} <= {*re.findall(long_figure, wide)}
    assert not re.search(r"\d[,.:]?\n\s+(?:(?:[KMG]i)?B\b|%|ms\b)", text)


def test_an_error_that_rounds_away_is_told_from_none() -> None:
    assert [error_text(error) for error in (0.0, 1e-6, -1e-6, 0.0125, -0.5)] == [
        "exact", "±0.00 %", "±0.00 %", "+1.25 %", "-50.00 %"
    ]  # fmt: skip


# --- why a precision, or checkpointing, moves the peak ---------------------------------------------------------


def like(run: Run, at_peak_mib: dict[str, int], **fields: Any) -> Run:
    sizes = {name: size * MIB for name, size in at_peak_mib.items()}
    profile = replace(profile_of(run), at_peak=sizes, peak_bytes=sum(sizes.values()), **fields)
    return replace(run, memory_profile=profile)


STATES = {"parameters": 500, "optimizer_state": 1000}


@pytest.mark.parametrize(
    ("after", "before", "words"),
    [(4, 1000, "almost nothing is left"), (1000, 4, "almost nothing before"), (8, 1000, "0.0080×"),
     (1500, 1000, "1.5×"), (12_345, 100, "120×")],
)  # fmt: skip
def test_a_ratio_has_two_digits_and_words_where_it_says_nothing(after: int, before: int, words: str) -> None:
    (told,) = precision_sentences(
        like(BF16, {"parameters": 1, "gradients": after}, saved=()), like(FP32, {"parameters": 1, "gradients": before})
    )
    assert f"({words}, " in told
    (one,) = precision_sentences(like(BF16, {"gradients": 1003}, saved=()), like(FP32, {"gradients": 1000}))
    assert "grow from 1000 MiB to 1003 MiB (+3.00 MiB)" in one


assert BF16.spec is not None
COMPILED = replace(BF16, spec=replace(BF16.spec, compile="default"))


def kept_by_a_graph(shape: tuple[int, ...], mib: int, dtype: str = "bfloat16") -> SavedTensors:
    return SavedTensors(module="", op="CompiledFunctionBackward", shape=shape, dtype=dtype, count=1,
                        stored_bytes=mib * MIB)  # fmt: skip


def test_casts_of_weights_that_a_compiled_graph_keeps_are_no_activations() -> None:
    kept = (
        kept_by_a_graph((2048, 3072), 300),
        kept_by_a_graph((3072, 768), 80),
        kept_by_a_graph((768, 768), 20),
        kept_by_a_graph((4, 512, 768), 50, "float32"),
    )
    casts, total, _ = precision_sentences(like(COMPILED, STATES | {"activations": 450}, saved=kept), None)
    assert casts.startswith("The compiled graph saves 100 MiB of bfloat16 casts of weights")
    assert "Saved for backward: 350 MiB of activations; 85.7 % is bfloat16; 50.0 MiB stay in float32" in total


def test_casts_that_their_shape_does_not_tell_are_said_to_be_counted_as_activations() -> None:
    foreign = replace(COMPILED, spec=replace(resolve_step({"model": "examples.my_model:build", "precision": "bf16"}),
                                             compile="default"))  # fmt: skip
    square = resolve_step({"model": "small", "context": 192, "precision": "bf16"})  # 768 tokens, as wide as the stream
    kept = (kept_by_a_graph((768, 768), 30),)
    for run in (foreign, replace(COMPILED, spec=replace(square, compile="default"))):
        unsure, total, *_ = precision_sentences(like(run, STATES | {"activations": 30}, saved=kept), None)
        assert unsure.startswith("30.0 MiB of bfloat16 may be casts of weights or activations")
        assert total.startswith("Saved for backward: 30.0 MiB of activations")


def test_the_changes_told_add_up_to_the_net_whatever_the_peaks() -> None:
    categories = ("parameters", "gradients", "activations", "autocast_copies", "temporaries")
    for seed in range(40):
        rng = random.Random(seed)
        peaks = [{name: rng.choice([0, 0, 100, 100, rng.randrange(1, 900)]) for name in categories} for _ in range(2)]
        peaks = [{name: size for name, size in peak.items() if size} for peak in peaks]
        if not all(peaks):
            continue
        told = next(precision_sentences(like(BF16, peaks[0], saved=()), like(FP32, peaks[1])))
        in_mib = {"MiB": 1.0, "GiB": 1024.0}
        found = [
            float(sign + size) * in_mib[unit] for sign, size, unit in re.findall(r"[ (]([+-])([\d.]+) ([MG]iB)\)", told)
        ]
        net = sum(peaks[0].values()) - sum(peaks[1].values())
        assert sum(found) == pytest.approx(net, abs=0.01 * max(map(abs, [*found, 1])) + 2), told


def test_what_stays_in_float32_is_named_and_one_record_alone_says_what_it_can() -> None:
    def saved(op: str, dtype: str, mib: int, **fields: Any) -> SavedTensors:
        return SavedTensors(
            module="blocks.*", op=op, shape=(1,), dtype=dtype, count=1, stored_bytes=mib * MIB, **fields
        )

    kept = (
        saved("MmBackward0", "bfloat16", 300),
        saved("SoftmaxBackward0", "float32", 80),
        saved("FusedRmsNormBackward0", "float32", 20),
        saved("MmBackward0", "bfloat16", 500, category="autocast_copies"),
    )
    alone = like(BF16, STATES | {"activations": 400, "autocast_copies": 100}, saved=kept)
    low, states = precision_sentences(alone, None)
    assert "75.0 % is bfloat16; 100 MiB stay in float32 (most of it: Softmax 80.0 MiB, FusedRmsNorm 20.0 MiB)" in low
    assert states.endswith(": 1.46 GiB, 75.0 % of the peak.")
    none = like(BF16, STATES | {"activations": 80}, saved=kept[1:2])
    said = next(precision_sentences(none, None))
    assert said.startswith("Saved for backward: 80.0 MiB of activations; nothing is in low precision; 80.0 MiB stay")


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({"optimizer_state": 1000}, {"optimizer_state": 500}, "optimizer state shrinks from 1000 MiB to 500 MiB"),
        ({"optimizer_state": 9, "inputs": 9}, {"optimizer_state": 9}, "Optimizer state stays at 9.00 MiB"),
        ({"inputs": 9}, {"inputs": 9, "optimizer_state": 8}, "optimizer state adds 8.00 MiB"),
        ({"inputs": 9, "activations": 8}, {"inputs": 9}, "the 8.00 MiB of activations disappear (-8.00 MiB)"),
        ({"inputs": 9}, {"inputs": 9}, "the peak is the same: 9.00 MiB"),
        ({"inputs": 8}, {"inputs": 9}, "the peak is 12.5 % higher: 9.00 MiB, against 8.00 MiB with fp32"),
    ],
)
def test_a_change_of_the_peak_is_told_by_what_it_is_to_each_category(
    before: dict[str, int], after: dict[str, int], told: str
) -> None:
    (sentence,) = precision_sentences(like(BF16, after, saved=()), like(FP32, before))
    assert told in sentence
    _, moments = precision_sentences(like(BF16, after, saved=(), peak_phase="optimizer"), like(FP32, before))
    assert moments.endswith("with fp32 in backward, with bf16 autocast in optimizer.")


def test_nothing_is_said_of_a_choice_that_was_not_made_or_has_nothing_beside_it() -> None:
    assert list(precision_sentences(FP32, FP32)) == []
    assert list(checkpointing_sentences(FP32, FP32)) == list(checkpointing_sentences(CHECKPOINTED, None)) == []
    pure = replace(FP32, spec=replace(sure(FP32.spec), precision="bf16_pure"))
    half = like(pure, {"parameters": 250, "optimizer_state": 500})
    (told,) = precision_sentences(half, like(FP32, STATES))
    assert told.startswith("With bf16 throughout the peak is 50.0 % lower")
    assert list(precision_sentences(half, None)) == []
    assert list(precision_sentences(make_run({"precision": "bf16"}), FP32)) == []


def test_of_weights_with_masters_no_bounds_of_autocast_are_told() -> None:
    spec = replace(sure(BF16.spec), precision="bf16_master", optimizer="adamw_triton")
    told = list(precision_sentences(replace(BF16, spec=spec), None))
    assert told[-1].startswith("A weight of a linear layer and its fp32 master take 6 bytes where fp32 takes 4")
    assert not any("Autocast does not change" in sentence or "lowers this peak" in sentence for sentence in told)


def test_among_other_runs_the_same_cell_is_found_and_no_other() -> None:
    told = flat(text_of(BF16, references=beside(watched_run({"context": 256}), FP32, CPU, IMPORTED, BF16), width=120))
    assert "against 3.81 GiB with fp32." in told
    assert "with fp32" not in flat(
        text_of(BF16, references=beside(watched_run({"context": 256}), make_run()), width=120)
    )
    assert "against 3.81 GiB with no checkpointing" in flat(
        text_of(CHECKPOINTED, references=beside(BF16, FP32), width=120)
    )


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
SETTINGS = [watched_run({"context": 128, "checkpointing": name}, checkpointed=True) for name in ("full", "selective")]


def parts_of(runs: list[Run]) -> list[Section]:
    chapter = sure(memory_chapter(cells_of(runs), {}))
    return [block for block in drawn(chapter).blocks if isinstance(block, Section)]


def chart_of(section: Section) -> Chart:
    (chart,) = section.blocks
    assert isinstance(chart, Chart)
    return chart


def section_of(page: str) -> str:
    (section,) = re.findall(r'<section id="memory">(.*?)</section>', page, re.DOTALL)
    return str(section)


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
    for run in watched:
        assert f"({profile_of(run).peak_bytes:,} bytes)" in section


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


def test_predictions_stand_beside_what_was_measured() -> None:
    run = CONTEXTS[0]
    prediction = prediction_of(profile_of(run), 1.05)
    page = render_page([run], title="x", about=Context(predictions={run.id: prediction}))
    section = section_of(page)
    for size in [*prediction.at_peak.values(), prediction.peak_bytes]:
        assert f">{size:,}</td>" in section
    assert section.count(">+5.00 %</td>") == len(prediction.at_peak) + 1
    assert "attention is plain" in section


def test_six_runs_are_shown_in_full_and_long_tables_go_on_closed() -> None:
    runs = [replace(IMPORTED, id=f"{index:012x}", name=f"rank{index}") for index in range(8)]
    parts = [part for part in parts_of(runs) if part.title.startswith("rank")]
    assert [part.title for part in parts] == [f"rank{index}" for index in (0, 1, 3, 4, 6, 7)]
    page = render_page([IMPORTED], title="x")
    num_alive = sum(made.at_peak for made in profile_of(IMPORTED).largest)
    assert f"<summary>{num_alive - 10} more rows</summary>" in page
    assert len(re.findall("Largest allocations alive at the peak</h[34]>", page)) == 1


def test_names_from_a_file_are_text_on_the_page_and_do_not_steer_the_terminal() -> None:
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
    assert not {"\x1b", "\x07"} & {*text_of(runs[0], width=160)}


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


# --- a low-precision cell alone in a store: what is said agrees with the fp32 cell that was measured -------------


UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return stored("memory_h200", Run)


@pytest.fixture(scope="module")
def pairs(runs: list[Run]) -> list[tuple[Run, Run]]:
    by_spec = {run.spec: run for run in runs}
    low = [run for run in runs if run.spec and run.spec.precision not in ("fp32", "tf32")]
    twins = [(run, by_spec.get(replace(run.spec, precision="fp32"))) for run in low if run.spec]
    found = [(run, twin) for run, twin in twins if twin]
    assert len(found) >= 14
    return found


def change(run: Run, twin: Run) -> int:
    return profile_of(run).peak_bytes - profile_of(twin).peak_bytes


def size_in(text: str) -> float:
    number, unit = text.split()
    return float(number) * UNITS[unit]


def test_the_direction_told_of_a_cell_alone_is_that_of_the_measured_fp32_cell(pairs: list[tuple[Run, Run]]) -> None:
    directions = []
    for run, twin in pairs:
        first = next(precision_sentences(run, None, fp32_forecast(run)))
        truth = change(run, twin)
        if first.endswith("with bf16 autocast the peak is the same."):
            assert abs(truth) <= 2e-3 * profile_of(twin).peak_bytes, run.name
            continue
        told = re.search(r"predicts (\S+ \w+) in fp32: .* the peak is \S+ % (lower|higher), by (\S+ \w+)\.", first)
        assert told, f"{run.name}: {first}"
        assert told[2] == ("lower" if truth < 0 else "higher"), f"{run.name}: {first}"
        assert size_in(told[1]) == pytest.approx(profile_of(twin).peak_bytes, rel=7e-3)
        assert size_in(told[3]) == pytest.approx(abs(truth), abs=2e-3 * profile_of(twin).peak_bytes)
        directions.append(told[2])
    assert set(directions) == {"lower", "higher"}
    assert len(directions) >= len(pairs) - 1


def test_a_cell_that_is_alone_in_a_store_is_set_against_its_prediction_and_else_against_the_stored_cell(
    pairs: list[tuple[Run, Run]], tmp_path: Path
) -> None:
    run, twin = next(pair for pair in pairs if pair[0].name == "2.7b-512-train-bf16")
    path = tmp_path / "store.db"
    fill(path, run)
    (cell,) = cells_of([run])
    alone = list(comparison_sentences(cell, [cell], memory_references([run], path)))
    assert "gives this peak within 0.01 %" in alone[0]
    assert "with bf16 autocast the peak is 3.9 % higher, by 2.2" in alone[0]
    other_card = replace(twin, id="another", environment=None)  # the newer, and of no known machine
    fill(path, twin, replace(other_card, created_utc="2030-01-01T00:00:00Z"))
    references = memory_references([run], path)
    assert ([other.id for other in references.others], dict(references.forecasts)) == ([twin.id], {})
    beside = next(comparison_sentences(cell, [cell], references))
    assert beside.startswith("With bf16 autocast the peak is 3.9 % higher")


def test_a_difference_within_the_dry_runs_own_error_has_no_direction(pairs: list[tuple[Run, Run]]) -> None:
    run, _ = pairs[0]
    forecast, profile = fp32_forecast(run), profile_of(run)
    assert forecast is not None

    def told(own_error: int, fp32_change: int) -> str:
        assert forecast is not None
        own = replace(forecast.own, peak_bytes=profile.peak_bytes + own_error)
        fp32 = replace(forecast.fp32, peak_bytes=profile.peak_bytes + fp32_change)
        return forecast_sentence("bf16 autocast", profile, Fp32Forecast(own=own, fp32=fp32))

    assert "which gives this peak exactly" in told(0, 2**30)
    assert "lower, by 1.00 GiB" in told(2**28, 2**30)
    assert "higher, by 1.00 GiB" in told(2**28, -(2**30))
    for change_bytes in (2**30, -(2**30)):
        assert told(2**29, change_bytes).endswith(
            "too close to this cell's peak to say whether bf16 autocast lowers or raises it."
        )
    assert told(0, 100).endswith("with bf16 autocast the peak is the same.")


def test_an_estimate_tells_a_direction_only_beyond_what_estimates_are_off_by(runs: list[Run]) -> None:
    found = {}
    for run in runs:
        if run.spec and run.spec.compile != "off" and (forecast := fp32_forecast(run)):
            text = forecast_sentence("bf16 autocast", profile_of(run), forecast)
            assert "The estimate of the step" in text
            change = abs(profile_of(run).peak_bytes / forecast.fp32.peak_bytes - 1)
            found["too close" in text] = True
            assert ("too close" in text) == (change <= 0.0305) or 0.028 < change < 0.07, text
            assert abs(forecast.own.peak_bytes / profile_of(run).peak_bytes - 1) < 0.03
    assert set(found) == {True, False}


def test_only_a_low_precision_step_on_cuda_has_a_forecast(pairs: list[tuple[Run, Run]]) -> None:
    run, twin = pairs[0]
    assert fp32_forecast(twin) is None
    on_cpu = replace(profile_of(run), source="cpu allocator")
    assert fp32_forecast(replace(run, memory_profile=on_cpu)) is None
    assert run.spec is not None
    flash = replace(run.spec, attention="sdpa_flash")
    assert fp32_forecast(replace(run, spec=flash)) is None  # no such kernel in fp32
    graphs = replace(run.spec, compile="reduce-overhead")
    assert fp32_forecast(replace(run, spec=graphs)) is None  # a lower bound
