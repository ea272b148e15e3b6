import dataclasses
import re
from typing import Any

import pytest
from tests.rendering import render_page
from tests.runs import grid, make_run, recorder_run

from steplab.lab.layout_planning import plan_layout
from steplab.lab.planning import plan_memory, plan_steps, plan_time, plans_of
from steplab.plan.cards import LEAST_USABLE, OUTSIDE_BYTES
from steplab.report.kit.rendering import render
from steplab.report.plan.layouts import layouts_document
from steplab.report.plan.steps import planned_document, planned_table
from steplab.report.plan.time import time_document
from steplab.report.report import Context
from steplab.specs.resolve import resolve_step
from steplab.specs.study import study_from_grids
from steplab.units import GIB

SMALL: dict[str, Any] = {"model": ["tiny"], "model.num_layers": [1, 2], "context": [32, 64], "precision": ["bf16"]}
CELLS = study_from_grids("plan", "", [SMALL]).cells


def test_what_all_steps_have_in_common_stands_above_the_table() -> None:
    fields = {"model": ["8b"], "layout": ["fsdp=32,tp=8"], "batch": ["16"], "precision": ["bf16"]}
    several = study_from_grids("plan", "", [{**fields, "checkpointing": ["none", "full"]}]).cells
    document = planned_document(plan_steps(several))
    assert document.title == "2 planned steps on 256 GPUs"
    words = document.subtitle.split(" · ")
    assert {"8b", "batch 16", "context 128", "bf16", "layout fsdp=32,tp=8"} <= set(words)
    assert not any("checkpointing" in word for word in words)
    (of_one,) = {planned_document(plan_steps(several[:1])).title}
    assert of_one.split(" · ") == words
    models = study_from_grids("plan", "", [{"model": ["tiny", "small"], "context": ["32", "64"]}]).cells
    mixed = planned_document(plan_steps(models))
    assert mixed.title == "4 planned steps"
    assert {"tiny", "small", "context 32", "context 64"}.isdisjoint(mixed.subtitle.split(" · "))
    assert "batch 4" in mixed.subtitle


def test_each_row_is_what_is_predicted_of_that_step_alone() -> None:
    table = planned_table(plan_steps(CELLS, gpu="A100 SXM 80GB"))
    assert len(table.rows) == 4
    for cell, row in zip(CELLS, table.rows, strict=True):
        memory, time = plan_memory(cell), plan_time(cell, gpu="A100 SXM 80GB")
        on_it = plan_memory(cell, gpu="A100 SXM 80GB")  # whose cuBLAS takes less than a Hopper's
        (whole,) = (phase for phase in time.phases if phase.phase == "step")
        assert row["peak_bytes"] == on_it.peak_bytes < memory.peak_bytes
        assert (time.least_device_bytes, time.fit) == (on_it.least_device_bytes, on_it.cards[0])
        assert (row["low_s"], row["time_s"], row["high_s"]) == (whole.low_s, whole.seconds, whole.high_s)
        assert row["tokens_per_s"] == cell.tokens_of_all / whole.seconds
        least = min((card for card in memory.cards if card.verdict == "fits"), key=lambda card: card.usable_bytes)
        assert row["fits"] == least.gpu
    assert len({row["step"] for row in table.rows}) == 4


def test_what_cannot_be_predicted_has_its_reason() -> None:
    (cell,) = study_from_grids("plan", "", [{"model": ["xxl"]}]).cells
    (step,) = plan_steps([cell])
    assert step.time is None
    (why,) = step.why_not
    assert why.startswith("time: ")
    assert "not supported" in why
    text = render(planned_document([step]), "table", width=400)
    assert why in " ".join(text.split())


def test_the_answer_is_how_many_steps_fit_the_gpu() -> None:
    small, large = study_from_grids("plan", "", [{"model": ["small", "2.7b"], "model.num_layers": [1]}]).cells
    (one,) = planned_document(plan_steps([small], gpu="RTX 4090")).verdict.sentences
    assert one == "The step fits on RTX 4090."
    large = dataclasses.replace(large, batch=512)
    (both,) = planned_document(plan_steps([small, large], gpu="RTX 4090")).verdict.sentences
    assert re.fullmatch(r"1 of 2 steps fits on RTX 4090 \(does not fit: 2\.7b.*\)\.", both), both


def test_steps_on_layouts_have_the_times_that_the_search_gives_them() -> None:
    job: dict[str, Any] = {"model": "small", "context": 512, "precision": "bf16", "checkpointing": "selective"}
    found = plan_layout(**job, gpus=4, global_batch=8, gpu="A100 SXM 80GB")
    best = [each for each in found.candidates if each.time and each.layout in ("fsdp=4", "fsdp=2,pp=2")]
    assert len(best) == 2
    given = [each.spec for each in best if each.spec]
    steps = plan_steps(given, gpu="A100 SXM 80GB")
    assert [step.layout and step.layout.candidates for step in steps] == [(each,) for each in best]
    times = [each.time.seconds for each in best if each.time]
    assert [row["time_s"] for row in planned_table(steps).rows] == times
    assert [row["tokens_per_s"] for row in planned_table(steps).rows] == [8 * 512 / each for each in times]
    (answer,) = planned_document(steps).verdict.sentences
    assert answer == "2 of 2 steps fit on A100 SXM 80GB."


def test_of_one_layout_nothing_is_said_of_others() -> None:
    (step,) = plan_steps([resolve_step({"model": "small", "layout": "dp=4", "precision": "bf16"})])
    assert step.layout is not None
    told = " ".join((*layouts_document(step.layout).verdict.sentences, *step.layout.notes))
    assert "Steps are mostly faster with --attention sdpa --compile block." in told
    assert "options take lists" not in told
    assert "without the errors" not in told


def test_a_step_that_does_not_fit_on_its_layout_says_why() -> None:
    (step,) = plan_steps([resolve_step({"model": "8b", "layout": "fsdp=2"})], gpu="A100 SXM 40GB")
    assert step.layout is not None
    assert planned_table([step]).rows[0]["time_s"]
    assert list(planned_document([step]).verdict.sentences) == ["The step does not fit on A100 SXM 40GB."]
    answer = layouts_document(step.layout).verdict.sentences[0]
    assert re.search(r"does not fit: ranks? .* GiB of .* GiB of it .*; the time is for enough memory\.$", answer)


def test_a_time_says_that_the_step_does_not_fit_the_gpu() -> None:
    (spec,) = study_from_grids("plan", "", [{"model": ["2.7b"], "model.num_layers": [1], "batch": [512]}]).cells
    found = plan_time(spec, gpu="RTX 4090")
    (warning,) = time_document(spec, found).verdict.cautions
    needed, there = (float(size) for size in re.findall(r"([\d.]+) GiB", warning))
    assert warning.startswith("Warning: the step does not fit on RTX 4090: ")
    peak = plan_memory(spec, gpu="RTX 4090").peak_bytes
    assert (needed, there) == pytest.approx(((peak + OUTSIDE_BYTES) / GIB, LEAST_USABLE * 24), abs=0.05)
    fitting = dataclasses.replace(spec, batch=1)
    assert not time_document(fitting, plan_time(fitting, gpu="RTX 4090")).verdict.cautions


def test_a_page_sets_the_plan_beside_the_measurement() -> None:
    runs = grid({"model": ["tiny"], "context": [32, 64]})
    plans = plans_of([*runs, make_run({"model": "tiny", "pass": "forward"}), recorder_run()])
    assert list(plans) == [run.id for run in runs], "training steps of known models"
    page = render_page(runs, title="planned", about=Context(plans=plans))
    assert ">Planning<" in page
    assert "smallest GPU that fits" in page


def test_a_step_measured_in_two_ways_is_planned_once_and_many_are_thinned_out() -> None:
    twice = [make_run({"model": "tiny", "warmup": warmup}, id=str(warmup)) for warmup in (0, 5)]
    assert len(plans_of(twice)) == 1
    many = grid({"model": ["tiny"], "context": list(range(8, 8 + 20))})
    plans = plans_of(many)
    assert len(plans) == 12
    assert {many[0].id, many[-1].id} <= set(plans)
