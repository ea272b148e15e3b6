from dataclasses import replace

import pytest
from tests.rendering import render_page, sheet_of
from tests.runs import grid, make_run, recorder_run
from tests.sure import sure

from steplab.records.rows import run_row
from steplab.records.run import Run
from steplab.records.timing import PhaseSamples, Timing
from steplab.report.kit.labels import cut, text_width
from steplab.report.run.cells import COMPARED, HOW, cells_of, label, over_size, varying
from steplab.report.run.phases import phases
from steplab.report.run.verdict import facts, runs_verdict
from steplab.specs.resolve import resolve_step
from steplab.specs.step import describe


def labels(runs: list[Run]) -> list[str]:
    cells = cells_of(runs)
    return [label(cell, varying(cells)) for cell in cells]


def own_loop(name: str, **parts: tuple[float, ...]) -> Run:
    samples = tuple(PhaseSamples(phase=phase, host_s=seconds) for phase, seconds in parts.items())
    return recorder_run(name=name, id=name, timing=Timing(warmup=(), back_to_back=samples))


# --- what a label says ------------------------------------------------------------------------------------


def test_how_one_cell_was_measured_is_not_said_of_all() -> None:
    other = make_run({"context": 64, "precision": "bf16", "warmup": 2, "steps": 5})
    runs = [*grid({"context": [64, 128], "precision": ["fp32"], "model": ["small"]}), other]
    assert labels(runs) == ["context 64 · fp32", "context 64 · bf16", "context 128 · fp32"]
    assert list(sure(over_size(cells_of(runs)))[1][""]) == ["fp32", "bf16"]


def test_it_is_said_where_nothing_else_tells_cells_apart() -> None:
    runs = [make_run({"context": 64, "warmup": warmup}) for warmup in (0, 1, 5)]
    runs += [make_run({"context": 128}), make_run({"context": 64, "warmup": 5}, seed=1)]
    told = labels(runs)
    assert told == [
        "context 64 · 0 warm-up steps",
        "context 64 · 1 warm-up step",
        "context 64 · 5 warm-up steps · run 1",
        "context 64 · 5 warm-up steps · run 2",
        "context 128",
    ]


def test_equal_runs_are_called_by_their_names_and_those_of_one_name_by_their_ids_too() -> None:
    names = ("before", "after", "after", "", "a\x1b[31m\nb" + 40 * "c")
    runs = [
        make_run({"context": context}, seed=seed, id=f"id{context}-{seed}", name=name,
                 created_utc=f"2026-11-23T08:00:0{seed}Z")
        for context in (64, 128) for seed, name in enumerate(names)
    ]  # fmt: skip
    assert labels(runs)[:5] == [
        "context 64 · 'before'",
        "context 64 · 'after' (id64-1)",
        "context 64 · 'after' (id64-2)",
        "context 64 · run 4",
        f"context 64 · 'a b{12 * 'c'}…{16 * 'c'}'",
    ]
    (series,) = (list(lines) for lines in sure(over_size(cells_of(runs)))[1].values())
    assert series[:4] == ["'before'", "run 2 ('after')", "run 3 ('after')", "run 4"], "a series is named after its runs"


def test_no_two_cells_share_a_label_or_a_place() -> None:
    runs = grid({"model": ["tiny", "small"], "context": [64, 128], "precision": ["fp32", "bf16"], "warmup": [0, 5]})
    runs += [make_run({"context": 64, "warmup": 5, "steps": steps}, seed=7) for steps in (1, 10)]
    runs += [recorder_run(id="1"), recorder_run(id="2"), recorder_run(id="3", name="")]
    told = labels(runs)
    assert len(set(told)) == len(told) == len(runs)
    assert over_size(cells_of(runs)) is None, "loops have no size"
    sized = cells_of([run for run in runs if run.spec])
    axis, panels = sure(over_size(sized))
    places = [
        (title, series, cell.values[axis])
        for title, lines in panels.items()
        for series, some in lines.items()
        for cell in some
    ]
    assert len(places) == len(sized)
    told_apart = {tuple(cell.values[field] for field in COMPARED if field not in HOW) for cell in sized}
    assert len(set(places)) == len(told_apart) == 8, "repeated measurements share a place"


def test_a_factorys_model_brings_its_own_attention() -> None:
    spec = resolve_step({"model": "examples.my_model:build"})
    assert "attention" not in describe(spec)
    assert "sdpa attention" in describe(resolve_step({"attention": "sdpa"}))
    run = make_run({"attention": "sdpa"})
    assert "plain" not in " ".join(labels([run, replace(run, id="f", spec=spec)]))


@pytest.mark.parametrize(
    ("steps", "said"), [(1, "1 warm-up step · 1 measured step ·"), (2, "2 warm-up steps · 2 measured steps ·")]
)
def test_a_caption_counts_one_as_one(steps: int, said: str) -> None:
    rows = [run_row(make_run({"warmup": steps, "steps": steps, "context": context})) for context in (64, 128)]
    assert said in sheet_of(rows).caption


# --- that it fits -----------------------------------------------------------------------------------------


def test_a_width_is_that_of_the_letters() -> None:
    assert text_width("ii", 12) < text_width("WW", 12) == pytest.approx(2 * text_width("W", 12), rel=0.02)
    assert text_width("語語", 12) == text_width("WW", 12)
    assert text_width("small", 24) == pytest.approx(2 * text_width("small", 12), rel=0.05)


def test_what_is_shortened_keeps_both_ends() -> None:
    assert cut("abcdefghij", 6) == "ab…hij"
    assert cut("abc", 3) == "abc"


# --- the parts of a step ----------------------------------------------------------------------------------


def test_a_loop_with_one_part_has_a_bar_beside_training_cells() -> None:
    chart = sure(phases(cells_of([make_run(), own_loop("my loop", step=(2.0, 2.0), forward=(0.5, 0.5))])))
    (loop,) = [bar for bar in chart.bars if bar.label == "my loop"]
    assert [segment.tip for segment in loop.segments] == ["forward: 500 ms, 25.0 % of the step"]
    assert chart.note.endswith("The empty part of a bar is time outside all parts.")


def test_a_cell_that_only_its_training_cell_covers_has_no_bar_of_its_own() -> None:
    runs = grid({"context": [64, 128], "pass": ["forward", "forward_backward", "train"]})
    covered = [run for run in runs if not (run.spec and run.spec.context == 128 and run.spec.pass_name == "train")]
    chart = sure(phases(cells_of(covered)))
    assert len(chart.bars) == 2  # training at 64; forward and backward at 128
    assert "The empty part of a bar" not in chart.note


def test_bars_of_steplabs_own_steps_are_full_however_noisy_the_medians() -> None:
    run = make_run()
    noisy = Timing(
        warmup=(),
        back_to_back=(
            PhaseSamples(phase="step", host_s=(1.0, 4.0, 4.0)),
            PhaseSamples(phase="forward", host_s=(0.5, 0.5, 3.5)),
            PhaseSamples(phase="backward", host_s=(0.5, 3.5, 0.5)),
        ),
    )
    chart = sure(phases(cells_of([replace(run, timing=noisy)])))
    first, second = chart.bars[0].segments
    assert first.value + second.value == 1.0
    assert first.tip == "forward: 500 ms, 12.5 % of the step"  # of 4 s, as in the table of one run


# --- the summary ------------------------------------------------------------------------------------------


def test_unlike_things_are_not_ranked() -> None:
    def told(*runs: Run) -> str:
        return " ".join(fact.text for fact in facts(cells_of(list(runs))))

    small, medium, loop = make_run(), make_run({"model": "medium"}), recorder_run()
    answer = " ".join(runs_verdict(cells_of([small, loop])).sentences)
    assert "Fastest" not in told(small, medium)  # the smallest model has the fastest step
    assert "as long" not in answer
    assert "From small to medium the step takes" in runs_verdict(cells_of([small, medium])).sentences[0]
    assert "as long" not in " ".join(runs_verdict(cells_of([loop, recorder_run(name="another", id="other")])).sentences)


def test_figures_on_the_page_stay_with_their_units() -> None:
    from steplab.report.kit.text import unbroken

    for text in ("5 %", "1.2 TFLOP/s", "3 ms", "2 GiB", "1.3 k tokens/s", "28 GB/s", "1.98 GHz", "700 W", "41 °C"):
        assert " " not in unbroken(text), text
    assert unbroken("5 steps of 3 models") == "5 steps of 3 models"
    assert "within 5 % of" not in render_page([make_run()], title="t")
