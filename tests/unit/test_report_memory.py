"""What a memory profile says in words, tables and rows is what its record holds."""

import csv
import io
import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest
from tests.rendering import run_text
from tests.runs import make_run
from tests.unit.memory_records import (
    MIB,
    cpu_run,
    imported_snapshot,
    prediction_of,
    watched_run,
)

from steplab import units
from steplab.errors import UserError
from steplab.records.memory import Memory
from steplab.records.memory_profile import Allocation, BlockMemory, LeftOut, MemoryProfile, SavedTensors
from steplab.records.memory_references import MemoryReferences
from steplab.records.rows import run_row
from steplab.records.run import Run
from steplab.report.kit.document import Section, Table
from steplab.report.kit.rendering import render
from steplab.report.memory.comparison import checkpointing_sentences, precision_sentences
from steplab.report.memory.document import memory_chapter, memory_document
from steplab.report.memory.figures import at_peak, error_text, parts, peak_of, whole
from steplab.report.memory.tables import allocation_table, category_rows, saved_table
from steplab.report.memory.tensors import derivation, saved_by, what_it_is
from steplab.report.memory.words import (
    allocation_words,
    around_sentences,
    check_sentences,
    heading,
    largest_sentences,
    parts_sentence,
    peak_sentence,
    residual_sentence,
    saved_sentences,
)
from steplab.report.run.cells import cells_of
from steplab.report.run.words import run_title
from steplab.specs.resolve import resolve_step
from steplab.units import format_share

FP32, BF16 = watched_run({"context": 512}), watched_run({"context": 512, "precision": "bf16"})
CHECKPOINTED = watched_run({"context": 512, "checkpointing": "full"}, checkpointed=True)
IMPORTED, CPU = imported_snapshot(), cpu_run()
ALL = {"fp32": FP32, "bf16": BF16, "checkpointed": CHECKPOINTED, "imported": IMPORTED, "cpu": CPU}
HOSTILE = "\x1b[31m<script>$&|{{7*7}}\x07"


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


@pytest.mark.parametrize("run", ALL.values(), ids=ALL)
def test_the_text_says_the_records_own_figures(run: Run) -> None:
    profile, text = profile_of(run), text_of(run, width=200)
    assert f"The peak is {units.format_bytes(profile.peak_bytes)} ({profile.peak_bytes:,} bytes)" in text
    table = text.partition("Peak by category")[2].partition("Largest allocations")[0]
    told = [int(figure.replace(",", "")) for figure in re.findall(r"B +([\d,]+) +\S+ %", table)]
    assert told == [*(profile.at_peak[name] for name in sorted_names(profile)), profile.peak_bytes]
    assert sum(told[:-1]) == told[-1]
    for phase in profile.phases:
        assert re.search(rf"{phase.name} +{re.escape(units.format_bytes(phase.peak_bytes))} ", text)
    for made in profile.largest[:10]:
        assert units.format_bytes(made.requested_bytes) in text
        place, _, function = (made.source or "").partition(" in ")
        assert place.rpartition("/")[2] in text
        assert function in text
    for note in profile.notes:
        assert note in text


def sorted_names(profile: MemoryProfile) -> list[str]:
    """The categories with anything, as the record's own timeline stacks them."""
    return [name for name in profile.timeline.categories if profile.at_peak.get(name)]


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("run", ALL.values(), ids=ALL)
def test_no_line_is_wider_than_the_terminal(run: Run, width: int) -> None:
    text = text_of(run, prediction=prediction_of(profile_of(run)), references=beside(FP32), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "None" not in text


def test_the_moment_of_the_peak_is_told_as_far_as_it_is_known() -> None:
    known = replace(profile_of(FP32), peak_phase="backward", peak_module="blocks.3.attention", peak_op="aten::bmm",
                    peak_source="model.py:81 in forward")  # fmt: skip
    end = "reached in backward, in blocks.3.attention, when aten::bmm allocated at model.py:81 in forward."
    assert peak_sentence(known).endswith(end)
    compiled = replace(known, peak_module=None, peak_op=None)
    assert peak_sentence(compiled).endswith(
        "reached in backward, by an allocation that goes back to model.py:81 in forward."
    )
    unnamed = replace(known, peak_phase=None, peak_module=None, peak_op=None, peak_source=None, peak_s=0.25)
    assert peak_sentence(unnamed).endswith("reached 250 ms into the history.")
    by_event = replace(profile_of(IMPORTED), peak_op=None, peak_source=None, peak_s=320.0)
    assert peak_sentence(by_event).endswith(f"reached after 320 of {by_event.num_events} events.")


def test_the_watched_peak_is_set_against_the_allocators_count_and_the_unwatched_steps() -> None:
    profile, memory = profile_of(FP32), FP32.memory
    assert memory is not None
    assert list(check_sentences(profile, memory)) == [
        "The allocator's own high-water mark over the watched step is the same, to the byte.",
        "Each phase's peak equals, to the byte, what the allocator counted over the steps timed phase by phase.",
    ]
    off = replace(profile, counted_peak_bytes=profile.peak_bytes + 512, unwatched_peak_bytes=profile.peak_bytes - MIB)
    counted, unwatched = check_sentences(off, None)
    assert f"({profile.peak_bytes + 512:,} bytes), 512 B more" in counted
    assert f"({profile.peak_bytes - MIB:,} bytes), 1.00 MiB less" in unwatched
    assert list(check_sentences(replace(profile, counted_peak_bytes=None, unwatched_peak_bytes=None), Memory())) == []


def test_a_phase_that_peaked_otherwise_in_the_timed_steps_is_named() -> None:
    profile = profile_of(FP32)
    (forward, *others), memory = profile.phases, FP32.memory
    assert memory is not None
    lower = replace(forward, peak_bytes=forward.peak_bytes - 3 * MIB)
    _, *told = check_sentences(replace(profile, phases=(lower, *others)), memory)
    assert told == [
        f"In forward the watched peak was {units.format_bytes(lower.peak_bytes)}; over the steps timed phase by "
        f"phase the allocator counted {units.format_bytes(forward.peak_bytes)} ({forward.peak_bytes:,} bytes), "
        f"3.00 MiB more ({format_share(3 * MIB / lower.peak_bytes)})."
    ]


def test_a_prediction_stands_beside_what_was_measured() -> None:
    profile = profile_of(BF16)
    prediction = prediction_of(profile, 1.02)
    text = text_of(BF16, prediction=prediction, width=200)
    table = text.partition("Peak by category")[2]
    for name, size in profile.at_peak.items():
        error = 100 * (prediction.at_peak[name] - size) / size
        row = rf"{size:,} +\S+ % +.*? {prediction.at_peak[name]:,} +{re.escape(f'{error:+.2f} %')}"
        assert re.search(row, table), name
    said = (
        f"The predicted peak is {units.format_bytes(prediction.peak_bytes)} ({prediction.peak_bytes:,} bytes), +2.00 %"
    )
    assert said in text
    assert "- attention is plain" in text


def test_what_was_predicted_alone_or_measured_alone_has_a_row_and_no_error_out_of_nothing() -> None:
    profile = profile_of(FP32)
    prediction = replace(prediction_of(profile), at_peak={"autocast_copies": MIB, "parameters": 5 * MIB})
    found = {part.category: part for part in parts(profile, prediction)}
    assert (found["autocast_copies"].num_bytes, found["autocast_copies"].error) == (0, None)
    assert (found["activations"].predicted_bytes, found["activations"].error) == (0, None)


def test_on_a_cpu_the_prediction_is_compared_in_what_it_covers() -> None:
    """A prediction is of CUDA: of cuBLAS's workspaces and the allocator's rounding there is nothing on a CPU."""
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


def test_names_from_a_file_do_not_steer_the_terminal() -> None:
    profile = profile_of(FP32)
    hostile = replace(
        profile,
        peak_source=HOSTILE,
        peak_op=HOSTILE,
        notes=(HOSTILE,),
        file=HOSTILE,
        largest=tuple(replace(made, source=HOSTILE, op=HOSTILE, module=HOSTILE) for made in profile.largest),
        saved=tuple(replace(saved, module=HOSTILE, op=HOSTILE) for saved in profile.saved),
    )
    text = text_of(replace(FP32, memory_profile=hostile), width=160)
    assert "\x1b" not in text
    assert "\x07" not in text


def test_show_has_the_watched_memory_and_imported_snapshots_a_title() -> None:
    assert run_text(FP32, width=120).count("Peak by category") == 1
    assert run_title(IMPORTED) == "their step (imported snapshot)"
    assert run_title(replace(IMPORTED, name="")) == "snapshot.pickle (imported snapshot)"
    named = replace(IMPORTED, memory_profile=replace(profile_of(IMPORTED), device_name="NVIDIA H200"))
    row = run_row(named)
    assert row["device"] == "NVIDIA H200"
    assert row["peak_allocated_bytes"] == peak_of(named) == profile_of(named).peak_bytes


# --- one residual-stream tensor, the largest allocation ------------------------------------------------------


@pytest.mark.parametrize("run", [FP32, BF16, CPU], ids=["fp32", "bf16", "cpu"])
def test_the_size_of_the_residual_stream_is_derived(run: Run) -> None:
    said = residual_sentence(run, profile_of(run))
    assert said is not None
    assert run.spec is not None
    assert run.spec.model.shape is not None
    figures = re.search(r"= ([\d ×]+) = ([\d,]+) bytes; the peak is (\S+) times that", said)
    assert figures is not None
    factors = [int(factor) for factor in figures[1].split(" × ")]
    assert factors == [run.spec.batch, run.spec.context, run.spec.model.shape.d_model, 4]
    product = factors[0] * factors[1] * factors[2] * factors[3]
    assert int(figures[2].replace(",", "")) == product
    assert float(figures[3]) == pytest.approx(profile_of(run).peak_bytes / product, rel=0.005)
    assert "batch × context × width × bytes of float32" in said
    assert ("Under autocast it stays float32" in said) == (run is BF16)


def test_where_nobody_knows_what_the_sizes_are_they_are_figures() -> None:
    foreign = replace(FP32, spec=replace(resolve_step({"model": "examples.my_model:build"}), context=512))
    said = residual_sentence(foreign, profile_of(FP32))
    assert said is not None
    assert "batch × context × width × bytes of float32 = 4 × 512 × 768 × 4" in said
    unknown = residual_sentence(replace(FP32, spec=None), profile_of(FP32))
    assert unknown is not None
    assert "is 6.00 MiB: 4 × 512 × 768 × 4 (float32) = 6,291,456 bytes" in unknown
    assert residual_sentence(IMPORTED, profile_of(IMPORTED)) is None
    assert derivation((3, 4), "float4", None) is None


SCORES, LOGITS = (4, 12, 512, 512), (2048, 10_000)
TENSORS: list[tuple[dict[str, Any], str | None]] = [
    ({"shape": SCORES, "op": "aten::_softmax", "phase": "forward"}, "attention weights (softmax of the scores)"),
    ({"shape": (48, 512, 512), "op": "aten::bmm", "phase": "forward"}, "products of queries and keys"),
    ({"shape": SCORES, "op": "aten::masked_fill", "phase": "forward"}, "masked attention scores"),
    ({"shape": SCORES, "op": "aten::mul.Tensor", "phase": "forward"}, "scaled attention scores"),
    ({"shape": SCORES, "op": "aten::bmm", "phase": "backward"}, "a tensor of the size of the attention scores"),
    ({"shape": SCORES, "op": "aten::_softmax", "phase": "backward"}, "attention weights (softmax of the scores)"),
    ({"shape": SCORES, "op": "aten::_softmax_backward_data", "phase": "backward"}, "gradient of the attention scores"),
    ({"shape": SCORES, "op": "aten::_to_copy", "phase": "forward"}, "a tensor of the size of the attention scores"),
    ({"shape": LOGITS, "op": "aten::mm", "phase": "forward"}, "logits"),
    ({"shape": LOGITS, "op": "aten::_log_softmax", "phase": "forward"}, "log-probabilities of the loss"),
    ({"shape": (4, 512, 10_000), "op": "aten::mm", "phase": "backward"}, "a tensor of the size of the logits"),
    ({"shape": LOGITS, "op": "aten::_log_softmax_backward_data", "phase": "backward"}, "gradient of the logits"),
    ({"shape": (10_000, 768), "category": "gradients"}, "gradient of the embedding or the head"),
    ({"shape": (3072, 768), "category": "parameters"}, "a feed-forward weight"),
    ({"shape": (768, 768), "category": "optimizer_state"}, "optimizer state of an attention projection"),
    ({"shape": (768, 3072), "category": "autocast_copies"}, "low-precision copy of a feed-forward weight"),
    ({"shape": (4, 512, 3072)}, "a tensor of the inner width of the feed-forward"),
    ({"shape": (2048, 768)}, "a tensor of the width of the residual stream"),
    ({"shape": (512, 512)}, None),  # not as many as the scores
    ({"shape": (4, 512)}, None),
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
    assert saved_by(kept_by_a_graph(shape, 1, "float32"), spec) == f"4 × 12 × {context} × {context} float32"
    assert derivation(shape, "float32", spec) == f"4 × 12 × {context} × {context} × 4 (float32)"


def test_the_largest_allocation_has_its_line_its_derivation_and_those_alike() -> None:
    first, together = largest_sentences(FP32, profile_of(FP32))
    assert first == (
        "The largest allocation alive at the peak is 78.1 MiB: logits, (batch × context) × vocabulary × bytes of "
        "float32 = 2048 × 10000 × 4, made in forward by aten::mm in head at transformer.py:52 in forward."
    )
    assert together.startswith(
        "The equal allocations that hold most together are 12 × 48.0 MiB = 576 MiB: attention weights"
    )
    assert "reference.py:31 in plain" in together
    by_engine = Allocation(requested_bytes=64 * MIB, block_bytes=64 * MIB, category="temporaries", phase="backward",
                           op="aten::mm", at_peak=True)  # fmt: skip
    before = Allocation(requested_bytes=96 * MIB, block_bytes=96 * MIB, category="workspaces", at_peak=True)
    gone = replace(by_engine, requested_bytes=10**12, at_peak=False)
    (told,) = largest_sentences(FP32, replace(profile_of(FP32), largest=(by_engine, gone)))
    assert (
        "64.0 MiB: temporaries, made in backward by aten::mm (by the autograd engine, so from no line of Python)."
        in told
    )
    (told,) = largest_sentences(FP32, replace(profile_of(FP32), largest=(before,)))
    assert told.endswith("96.0 MiB: workspaces, allocated before the recording.")
    since = replace(before, category="during")
    (told,) = largest_sentences(IMPORTED, replace(profile_of(IMPORTED), largest=(since,)))
    assert told.endswith("allocated during the history, by code that the history does not name.")
    outside = replace(before, op="aten::empty")  # of no phase, and yet seen
    (told,) = largest_sentences(FP32, replace(profile_of(FP32), largest=(outside,)))
    assert told.endswith("workspaces, made by aten::empty.")
    assert list(largest_sentences(FP32, replace(profile_of(FP32), largest=()))) == []


def test_a_size_that_is_not_its_shapes_is_not_derived() -> None:
    logits = next(made for made in profile_of(FP32).largest if made.module == "head")
    odd = replace(logits, requested_bytes=123)
    (told,) = largest_sentences(FP32, replace(profile_of(FP32), largest=(odd,)))
    assert "123 B: logits, made in forward" in told


# --- what autograd kept -------------------------------------------------------------------------------------


def test_the_five_largest_contributors_and_their_share() -> None:
    profile = profile_of(BF16)
    total = sum(saved.stored_bytes for saved in profile.saved)
    five = sorted((saved.stored_bytes for saved in profile.saved), reverse=True)[:5]
    kept, block = saved_sentences(BF16, profile)
    assert kept.startswith(f"Autograd saved {units.format_bytes(total)} for the backward pass.")
    assert f"The 5 largest contributors hold {100 * sum(five) / total:.1f} % of it: attention weights in blocks" in kept
    assert [float(share) for share in re.findall(r"\(([\d.]+) %\)", kept)] == [
        pytest.approx(100 * size / total, abs=0.05) for size in five
    ]
    first = profile.blocks[0]
    assert first.gradient_bytes is not None
    assert block == (
        f"blocks.0 saves {units.format_bytes(first.saved_bytes)} of activations for backward, "
        f"{first.saved_bytes / (4 * 4 * 512 * 768):.1f} times its input, "
        f"and its backward pass leaves {units.format_bytes(first.gradient_bytes)} of parameters' gradients."
    )


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


def test_an_imported_history_says_when_its_parts_were_allocated_and_says_it_once() -> None:
    profile = replace(profile_of(IMPORTED), at_peak={"before": 75 * MIB, "during": 25 * MIB}, peak_bytes=100 * MIB)
    assert parts_sentence(profile) == (
        "Of the peak, 75.0 % was allocated before the history, 25.0 % was allocated during the history."
    )
    before = Allocation(requested_bytes=1, block_bytes=1, category="before")
    assert allocation_words(before, IMPORTED) == "allocated before the history"
    assert "one allocation or release" in heading(IMPORTED, replace(profile, num_events=1))


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
    blocks = tuple(BlockMemory(module=f"blocks.{n}", saved_bytes=n * MIB) for n in range(10))
    many = replace(profile, blocks=blocks, blocks_left_out=LeftOut(count=2, num_bytes=30 * MIB))
    told = list(saved_sentences(BF16, many))[1:]
    assert told[0] == "blocks.0 saves no activations for backward."
    assert len(told) == 5
    assert told[-1] == "There are 8 more kinds of block; one of each together save 69.0 MiB."


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
    (sentence,) = largest_sentences(FP32, replace(profile_of(FP32), largest=(made(9, 5), made(9, 2))))
    assert "one of 7 equal ones" in sentence


@pytest.mark.parametrize("width", [60, 72, 80, 100, 120])
@pytest.mark.parametrize("run", ALL.values(), ids=ALL)
def test_no_figure_is_broken_over_lines(run: Run, width: int) -> None:
    prediction = prediction_of(profile_of(run))
    text = text_of(run, prediction=prediction, references=beside(FP32), width=width)
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
    """The run with a peak of these MiB by category."""
    sizes = {name: size * MIB for name, size in at_peak_mib.items()}
    profile = replace(profile_of(run), at_peak=sizes, peak_bytes=sum(sizes.values()), **fields)
    return replace(run, memory_profile=profile)


STATES = {"parameters": 500, "optimizer_state": 1000}


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({"optimizer_state": 1000}, {"optimizer_state": 500}, "optimizer state shrinks from 1000 MiB to 500 MiB"),
        ({"parameters": 500}, {"parameters": 250}, "parameters shrink from 500 MiB to 250 MiB"),
        ({"optimizer_state": 9, "inputs": 9}, {"optimizer_state": 9}, "Optimizer state stays at 9.00 MiB"),
        ({"temporaries": 9, "inputs": 9}, {"temporaries": 9}, "Temporaries stay at 9.00 MiB"),
        ({"inputs": 9}, {"inputs": 9, "optimizer_state": 8}, "optimizer state adds 8.00 MiB"),
        ({"inputs": 9}, {"inputs": 9, "activations": 8}, "activations add 8.00 MiB"),
    ],
)
def test_a_verb_agrees_with_its_categories(before: dict[str, int], after: dict[str, int], told: str) -> None:
    (sentence, *_) = precision_sentences(like(BF16, after, saved=()), like(FP32, before))
    assert told in sentence


def test_why_autocast_lowers_a_peak_by_category() -> None:
    before = like(FP32, STATES | {"activations": 600, "temporaries": 100})
    after = like(BF16, STATES | {"activations": 400, "autocast_copies": 100, "temporaries": 50}, saved=())
    (told,) = precision_sentences(after, before)
    assert told == (
        "With bf16 autocast the peak is 6.8 % lower: 2.00 GiB, against 2.15 GiB with fp32. Parameters and optimizer "
        "state stay at 1.46 GiB; activations shrink from 600 MiB to 400 MiB (0.67×, -200 MiB); autocast copies add "
        "100 MiB (+100 MiB); temporaries shrink from 100 MiB to 50.0 MiB (0.50×, -50.0 MiB); net -150 MiB."
    )


@pytest.mark.parametrize(
    ("after", "before", "words"),
    [(4, 1000, "almost nothing is left"), (1000, 4, "almost nothing before"), (8, 1000, "0.0080×"),
     (790, 1000, "0.79×"), (1500, 1000, "1.5×"), (4007, 100, "40×"), (12_345, 100, "120×")],
)  # fmt: skip
def test_a_ratio_has_two_digits_and_words_where_it_says_nothing(after: int, before: int, words: str) -> None:
    (told,) = precision_sentences(
        like(BF16, {"parameters": 1, "gradients": after}, saved=()), like(FP32, {"parameters": 1, "gradients": before})
    )
    assert f"({words}, " in told


def test_a_ratio_that_rounds_to_one_is_left_out() -> None:
    (told,) = precision_sentences(like(BF16, {"gradients": 1003}, saved=()), like(FP32, {"gradients": 1000}))
    assert "grow from 1000 MiB to 1003 MiB (+3.00 MiB)" in told


def test_what_checkpointing_keeps_is_named() -> None:
    assert CHECKPOINTED.spec is not None
    kept = SavedTensors(module="blocks.*", op="", shape=(1,), dtype="float32", count=1, stored_bytes=MIB)
    assert saved_by(kept, CHECKPOINTED.spec) == "checkpointing in blocks.*"
    assert saved_by(kept, FP32.spec) == "a tensor in blocks.*"
    autocast = replace(CHECKPOINTED, spec=replace(CHECKPOINTED.spec, precision="bf16"))
    told = next(precision_sentences(like(autocast, STATES | {"activations": 1}, saved=(kept,)), None))
    assert "(most of it: checkpointing 1.00 MiB)" in told


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
    told = list(precision_sentences(like(COMPILED, STATES | {"activations": 450}, saved=kept), None))
    assert told == [
        "The compiled graph saves 100 MiB of bfloat16 casts of weights, recognised by their shapes; the table of the "
        "peak counts them as activations.",
        "Of the 350 MiB of activations saved for backward, 85.7 % is bfloat16; 50.0 MiB stay in float32.",
        "Autocast does not change parameters, gradients and optimizer state: 1.46 GiB, 76.9 % of the peak.",
        "In float32 the low-precision activations would take 300 MiB more, so autocast lowers this peak by at most "
        "that, excluding temporaries. It may also raise the peak: 100 MiB of weight copies, alive at the peak, would "
        "not exist in fp32. Measure the same cell in fp32 to see the difference.",
    ]
    # 60 MiB of what was kept is gone by the peak: perhaps casts, so that the bound counts on 40 MiB of them alone.
    *_, late = precision_sentences(like(COMPILED, STATES | {"activations": 390}, saved=kept), None)
    assert "40.0 MiB of weight copies" in late


def test_casts_that_their_shape_does_not_tell_are_said_to_be_counted_as_activations() -> None:
    foreign = replace(COMPILED, spec=replace(resolve_step({"model": "examples.my_model:build", "precision": "bf16"}),
                                             compile="default"))  # fmt: skip
    square = resolve_step({"model": "small", "context": 192, "precision": "bf16"})  # 768 tokens, as wide as the stream
    kept = (kept_by_a_graph((768, 768), 30),)
    for run in (foreign, replace(COMPILED, spec=replace(square, compile="default"))):
        unsure, total, *_ = precision_sentences(like(run, STATES | {"activations": 30}, saved=kept), None)
        assert unsure.startswith("30.0 MiB of bfloat16 may be casts of weights or activations")
        assert total.startswith("Of the 30.0 MiB of activations")


def test_what_a_compiled_graph_keeps_is_told_by_shape() -> None:
    kept = (kept_by_a_graph((2048, 3072), 300), kept_by_a_graph((3072, 768), 80), kept_by_a_graph((48, 512, 512), 70))
    told = next(saved_sentences(COMPILED, replace(profile_of(BF16), saved=kept)))
    assert "A compiled graph saved it, so that shapes are known and modules are not." in told
    assert "2048 × 3072 bfloat16 (inner width of the feed-forward) 300 MiB" in told
    assert "3072 × 768 bfloat16 (weights) 80.0 MiB" in told
    assert "48 × 512 × 512 bfloat16 (attention scores) 70.0 MiB" in told
    assert "CompiledFunction in" not in told


def test_why_autocast_does_not_lower_a_peak() -> None:
    before = like(FP32, STATES | {"activations": 200})
    (raised,) = precision_sentences(like(BF16, STATES | {"activations": 120, "autocast_copies": 200}, saved=()), before)
    assert raised.startswith("With bf16 autocast the peak is 7.1 % higher: 1.78 GiB, against 1.66 GiB with fp32.")
    assert "autocast copies add 200 MiB (+200 MiB); activations shrink" in raised
    (same,) = precision_sentences(like(BF16, STATES | {"activations": 200}, saved=()), before)
    assert "the peak is the same: 1.66 GiB" in same
    moved = like(BF16, {**STATES, "gradients": 500}, peak_phase="optimizer", saved=())
    told = list(precision_sentences(moved, replace(before)))
    assert "the 200 MiB of activations disappear (-200 MiB)" in told[0]
    assert told[1] == "The two peaks are at different moments: with fp32 in backward, with bf16 autocast in optimizer."


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
    told = list(precision_sentences(alone, None))
    assert told == [
        "Of the 400 MiB of activations saved for backward, 75.0 % is bfloat16; 100 MiB stay in float32 (most of it: "
        "Softmax 80.0 MiB, FusedRmsNorm 20.0 MiB).",
        "Autocast does not change parameters, gradients and optimizer state: 1.46 GiB, 75.0 % of the peak.",
        "In float32 the low-precision activations would take 300 MiB more, so autocast lowers this peak by at most "
        "that, excluding temporaries. It may also raise the peak: 100 MiB of weight copies, alive at the peak, would "
        "not exist in fp32. Measure the same cell in fp32 to see the difference.",
    ]
    assert alone.spec is not None
    flash = replace(alone, spec=replace(alone.spec, attention="sdpa_flash"))
    *_, last = precision_sentences(flash, None)
    assert last.endswith("The same cell cannot be measured in fp32: attention sdpa_flash does not run in it.")
    late = like(BF16, STATES | {"gradients": 500}, saved=kept, peak_phase="optimizer")
    assert "It does not raise the peak, which is in the optimizer" in list(precision_sentences(late, None))[-1]
    costly = like(BF16, STATES | {"activations": 400, "autocast_copies": 400}, saved=kept)
    assert "may also raise the peak: 400 MiB of weight copies" in list(precision_sentences(costly, None))[-1]
    only_copies = like(BF16, STATES | {"autocast_copies": 400}, saved=())
    assert "so autocast does not lower this peak" in list(precision_sentences(only_copies, None))[-1]
    cut = replace(profile_of(costly), saved_left_out=LeftOut(count=3, num_bytes=MIB))
    told = list(precision_sentences(replace(costly, memory_profile=cut), None))
    assert "it does not say by how much autocast can lower this peak" in told[-1]
    none = like(BF16, STATES | {"activations": 80}, saved=kept[1:2])
    said = next(precision_sentences(none, None))
    assert said.startswith(
        "Of the 80.0 MiB of activations saved for backward, nothing is in low precision; 80.0 MiB stay"
    )


def test_float32_runs_and_bf16_throughout_are_not_told_about_autocast() -> None:
    assert list(precision_sentences(FP32, FP32)) == []
    assert FP32.spec is not None
    pure = replace(FP32, spec=replace(FP32.spec, precision="bf16_pure"))
    half = like(pure, {"parameters": 250, "optimizer_state": 500})
    (told,) = precision_sentences(half, like(FP32, STATES))
    assert told.startswith("With bf16 throughout the peak is 50.0 % lower")
    assert list(precision_sentences(half, None)) == []
    assert list(precision_sentences(make_run({"precision": "bf16"}), FP32)) == []


def test_of_weights_with_masters_no_bounds_of_autocast_are_told() -> None:
    assert BF16.spec is not None
    spec = replace(BF16.spec, precision="bf16_master", optimizer="adamw_triton")
    told = list(precision_sentences(replace(BF16, spec=spec), None))
    assert told[-1].startswith("A weight of a linear layer and its fp32 master take 6 bytes where fp32 takes 4")
    assert not any("Autocast does not change" in sentence or "lowers this peak" in sentence for sentence in told)


def test_checkpointing_is_set_against_the_same_cell_without() -> None:
    told = list(checkpointing_sentences(CHECKPOINTED, FP32))
    before, after = profile_of(FP32), profile_of(CHECKPOINTED)
    lower = 100 * (1 - after.peak_bytes / before.peak_bytes)
    assert told[0].startswith(f"With checkpointing (full) the peak is {lower:.1f} % lower")
    shrunk = at_peak(after, "activations") / at_peak(before, "activations")
    assert f"activations shrink from 2.26 GiB to 186 MiB ({shrunk:#.2g}×" in told[0]
    assert re.fullmatch(r"The step takes \S+ ms instead of \S+ ms \([+-]\S+ %\)\.", told[-1])
    assert list(checkpointing_sentences(FP32, FP32)) == []
    assert list(checkpointing_sentences(CHECKPOINTED, None)) == []


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
def test_the_rows_sum_to_the_peak_in_every_format(run: Run) -> None:
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
    document = memory_document(run, prediction=prediction)
    assert json.loads(render(document, "json")) == list(rows)
    lines = list(csv.DictReader(io.StringIO(render(memory_document(run), "csv"))))
    assert {line["category"]: int(line["bytes"]) for line in lines} == profile.at_peak
    assert "predicted_bytes" not in lines[0]
    for name in ("md", "latex", "table"):
        text = render(document, name, width=120)
        for size in profile.at_peak.values():
            assert units.format_bytes(size) in text
            assert f"{size:,}" in text


def test_the_largest_allocations_that_were_not_alive_at_the_peak_have_a_table_of_their_own() -> None:
    gone = made(7, 3, at_peak=False, source="a/steplab/model.py:81 in forward")
    run = replace(FP32, memory_profile=replace(profile_of(FP32), largest=(made(5, 2), gone)))
    chapter = memory_chapter(cells_of([run]), {})
    assert chapter is not None
    record = chapter.blocks[-1]
    assert isinstance(record, Section)
    tables = {
        section.title: block
        for section in record.blocks
        if isinstance(section, Section)
        for block in section.blocks
        if isinstance(block, Table)
    }
    (row,) = tables["Large allocations not alive at the peak"].rows
    assert (row["line"], row["function"], row["folder"]) == ("model.py:81", "forward", "a/steplab")
    assert row["together_bytes"] == 21 * MIB
    (row,) = tables["Largest allocations alive at the peak"].rows
    assert row["together_bytes"] == 10 * MIB


def test_what_lies_around_the_peak_is_told_and_absent_where_nobody_knows() -> None:
    profile = replace(profile_of(FP32), peak_bytes=1000 * MIB, reserved_bytes=1300 * MIB, outside_bytes=540 * MIB)
    held, outside = around_sentences(profile)
    assert held.startswith("The allocator held at most 1.27 GiB of the device's memory, 300 MiB more than the peak,")
    assert outside.startswith("Outside the allocator the device had 540 MiB in use")
    assert list(around_sentences(profile_of(CPU))) == []
