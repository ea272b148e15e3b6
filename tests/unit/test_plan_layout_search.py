import itertools
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from tests.documents import chapter_says

from steplab.cli.app import main
from steplab.errors import Unsupported, UserError
from steplab.lab.checkpointing import choose_checkpointing
from steplab.lab.layout_planning import plan_layout, plan_layouts
from steplab.plan.layout.search import layouts_of
from steplab.plan.memory import predict_memory
from steplab.records.layout_plan import LayoutPlan
from steplab.report.kit.rendering import render
from steplab.report.plan.compared_layouts import compared_layouts_document
from steplab.report.plan.layouts import layout_rows, layouts_document
from steplab.specs.hardware import hardware_named
from steplab.specs.resolve import resolve_step
from steplab.units import format_time

JOB: dict[str, Any] = {
    "model": "2.7b", "context": 2048, "precision": "bf16", "attention": "sdpa_flash", "compile": "default",
}  # fmt: skip


FOUND: dict[str, LayoutPlan] = {}


def planned(**asked: Any) -> LayoutPlan:
    if (key := repr(asked)) not in FOUND:
        spec = asked.pop("spec", JOB)
        FOUND[key] = plan_layout(resolve_step(spec), **{"gpus": 16, "global_batch": 64, "gpu": "H100 SXM", **asked})
    return FOUND[key]


@pytest.mark.parametrize("gpus", [1, 2, 12, 64, 4096])
def test_layouts_are_all_factorisations(gpus: int) -> None:
    found = [(layout.dp, layout.fsdp, layout.tp, layout.pp) for layout in layouts_of(gpus)]
    divisors = [size for size in range(1, gpus + 1) if gpus % size == 0]
    every = {sizes for sizes in itertools.product(divisors, repeat=4) if prod(sizes) == gpus}
    assert set(found) == every
    assert len(found) == len(every)


@pytest.mark.parametrize("update", ["after", "overlapped"])
def test_an_overlapped_update_is_said_to_be_planned_as_one_afterwards(update: str) -> None:
    plan = planned(spec={"model": "small", "compile": "block", "update": update}, gpus=2, global_batch=2)
    assert ("times assume the update after the backward pass" in " ".join(plan.notes)) == (update == "overlapped")


def test_fields_that_one_process_alone_cannot_have_are_those_of_the_layouts() -> None:
    fields: dict[str, Any] = {"model": "small", "compile": "default", "update": "overlapped", "bucket_size_mb": 50}
    plan = plan_layout(gpus=2, global_batch=2, **fields)
    specs = {each.layout: each.spec for each in plan.candidates if each.spec}
    assert list(specs) == ["dp=2"]
    assert (specs["dp=2"].update, specs["dp=2"].bucket_size_mb) == ("overlapped", 50)
    assert "times assume the update after the backward pass" in " ".join(plan.notes)
    with pytest.raises(Unsupported, match="use --compile block"):
        plan_layout(gpus=1, global_batch=2, model="small", compile="default", update="overlapped")


def test_the_search_agrees_with_brute_force() -> None:
    plan = planned(gpus=8, global_batch=16, gpu="A100 SXM 40GB")
    verdicts = {each.layout: each for each in plan.candidates}
    for layout in layouts_of(8):
        per_rank, remainder = divmod(16, layout.data_ranks)
        if remainder:
            continue
        best = None
        for size in (s for s in range(1, per_rank + 1) if per_rank % s == 0):
            for schedule in ("1f1b", "interleaved"):
                fields = JOB | {"layout": str(layout), "batch": size, "accumulation": per_rank // size}
                if layout.pp > 1:
                    fields = JOB | {
                        "layout": str(layout), "batch": per_rank, "microbatches": per_rank // size,
                        "pipeline_schedule": schedule,
                    }  # fmt: skip
                try:
                    prediction = predict_memory(resolve_step(fields), device="NVIDIA A100-SXM4-40GB")
                except UserError:
                    continue
                (card,) = [card for card in prediction.cards if card.gpu == "A100 SXM 40GB"]
                order = ("does not fit", "too tight to promise", "fits")
                best = max(best or "does not fit", card.verdict, key=order.index)
        expected = best or "not possible"
        assert verdicts[str(layout)].verdict == expected, layout


def test_those_that_fit_come_first_and_the_fastest_of_them_first() -> None:
    plan = planned()
    timed = [each for each in plan.candidates if each.time]
    assert list(plan.candidates[: len(timed)]) == timed
    sure = [each.time.seconds for each in timed if each.time and each.verdict == "fits"]
    assert sure == sorted(sure)
    assert 1 <= plan.num_as_fast <= len(sure)
    for each in plan.candidates[len(timed) :]:
        assert each.reason


def test_a_layout_that_is_too_tight_to_promise_is_not_counted_among_those_that_fit() -> None:
    long = {"model": "8b", "context": 32768, "attention": "flash_triton", "loss": "chunked", "precision": "bf16"}
    plan = planned(spec=long | {"checkpointing": "full"}, gpus=2, global_batch=2, gpu="H200 SXM")
    verdicts = {each.layout: each.verdict for each in plan.candidates if each.time}
    assert verdicts == {"fsdp=2": "fits", "dp=2": "too tight to promise"}
    assert (
        layouts_document(plan)
        .verdict.sentences[0]
        .startswith("1 of 4 layouts fits; 1 is too tight to promise. Fastest: --layout fsdp=2")
    )
    said = " ".join(layouts_document(plan).verdict.sentences)
    seconds = {each.layout: each.time.seconds for each in plan.candidates if each.time}
    assert seconds["dp=2"] < seconds["fsdp=2"]
    faster = format_time(seconds["dp=2"])
    assert f"Faster, if its memory is enough, is --layout dp=2 --batch 1, about {faster} a step." in said
    tight = tuple(each for each in plan.candidates if each.layout != "fsdp=2")
    assert (
        layouts_document(replace(plan, candidates=tight))
        .verdict.sentences[0]
        .startswith("None of 3 layouts is known to fit; 1 is too tight to promise. Fastest: --layout dp=2")
    )


def test_a_batch_that_no_layout_can_share_out_is_told_of_with_one_that_can() -> None:
    plan = planned(spec={"model": "tiny", "context": 64, "model.num_heads": 1}, gpus=7, global_batch=3, gpu="H200 SXM")
    impossible = tuple(each for each in plan.candidates if each.verdict == "not possible")
    (said,) = layouts_document(replace(plan, candidates=impossible)).verdict.sentences
    assert said == (
        f"None of {len(impossible)} layouts is possible; the table says why. "
        "--global-batch 7 gives each of 7 GPUs as many sequences as any other."
    )


def test_of_a_layout_that_must_recompute_as_few_blocks_are_recomputed_as_it_fits_with() -> None:
    long = {"model": "8b", "context": 32768, "attention": "flash_triton", "loss": "chunked", "precision": "bf16"}
    job: dict[str, Any] = {"gpus": 2, "global_batch": 2, "gpu": "H200 SXM"}
    (best, *_) = planned(spec=long | {"checkpointing": "auto"}, **job).candidates
    (full, *_) = planned(spec=long | {"checkpointing": "full"}, **job).candidates
    assert best.spec
    assert best.time
    assert full.spec
    assert full.time
    chosen = choose_checkpointing(replace(full.spec, checkpointing="auto"), hardware_named("H200 SXM"))
    assert best.spec.checkpointing == chosen.spec.checkpointing == "first_29"
    assert best.verdict == "fits"
    assert best.time.seconds < full.time.seconds


def test_the_options_are_those_of_a_step_of_the_job() -> None:
    plan = planned()
    for each in plan.candidates:
        if not each.options:
            continue
        words = shlex.split(each.options)
        fields = {
            name.removeprefix("--").replace("-", "_"): value
            for name, value in zip(words[::2], words[1::2], strict=True)
        }
        spec = resolve_step(JOB | fields)
        assert spec == each.spec
        assert spec.batch * spec.accumulation * spec.layout.data_ranks == 64
        assert spec.layout.world_size == 16


def test_a_small_gpu_needs_more_shards() -> None:
    plan = planned(gpu="RTX 4090", gpus=8, global_batch=8, spec=JOB | {"compile": "off"})
    reasons = {each.layout: each.reason for each in plan.candidates}
    assert "ranks 0 to 7 need" in reasons["dp=8"]
    assert "optimizer state" in reasons["dp=8"]


@pytest.mark.release
def test_four_thousand_gpus_take_seconds() -> None:
    started = time.process_time()
    plan = planned(gpus=4096, global_batch=4096, spec=JOB | {"model": "8b", "checkpointing": "full"})
    chapter_says("plan_layout", f"{len(plan.candidates)} layouts of 4,096 GPUs take")
    assert time.process_time() - started < 15  # 3 s on a quiet one; a hosted one is slower


def test_without_a_network_layouts_that_leave_a_node_have_no_time() -> None:
    plan = planned(gpu="MI300X", gpus=16, spec=JOB | {"compile": "off"})
    assert not any(each.time for each in plan.candidates)
    assert any("give its bandwidth" in note for note in plan.notes)
    told = render(layouts_document(plan), "md")
    assert "fit, but none has a known time" in told
    assert "Layouts that do not fit" not in told
    assert any(
        each.time for each in planned(gpu="MI300X", spec=JOB | {"compile": "off"}, links=["network=45"]).candidates
    )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"gpus": 0}, "gpus must be between"),
        ({"global_batch": 0}, "at least 1 sequence"),
        ({"gpu": "H1000"}, "unknown hardware"),
        ({"links": ["network"]}, "--link takes a link and GB/s"),
        ({"links": ["ici=90"]}, "choose node or network"),
        ({"links": ["node=-1"]}, "more than 0 GB/s"),
        ({"gpus_per_node": 0}, "at least 1"),
        ({"spec": JOB | {"layout": "dp=2"}}, "leave --layout out"),
    ],
)
def test_bad_requests_are_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        planned(**asked)


def test_models_that_are_not_known_are_refused() -> None:
    with pytest.raises(Unsupported, match="use `steplab plan accounting`"):
        planned(spec={"model": "xxl"})
    with pytest.raises(Unsupported, match="it has fewer than 2 blocks"):
        planned(spec={"model": "toy"})


def test_a_configuration_is_spread_along_every_axis_as_what_it_is() -> None:
    model = f"hf:{Path(__file__).parents[2] / 'examples/hf/llama-tiny.json'}"
    plan = planned(spec=JOB | {"compile": "off", "checkpointing": "none", "model": model}, gpus=8, global_batch=8)
    assert plan.spec.model.label == "hf:llama-tiny"
    reasons = {each.layout: each.reason for each in plan.candidates if not each.time}
    found = {each.layout for each in plan.candidates if each.time}
    assert found >= {"dp=8", "dp=4,fsdp=2", "fsdp=8", "dp=4,pp=2", "dp=4,tp=2"}
    assert "tp=8 does not divide" in reasons["tp=8"]
    assert any("with all tokens on every rank and all-reduces" in note for note in plan.notes)
    assert any("pipelines of this model are planned, not run" in note for note in plan.notes)
    assert any("within a node a GPU is assumed to send" in note for note in plan.notes)
    assert plan.model is not None
    assert plan.utilizations


def test_where_only_the_network_is_unknown_the_answer_names_the_option_for_it() -> None:
    job: dict[str, Any] = {"gpu": "RTX 4090", "gpus": 16, "global_batch": 16, "spec": JOB | {"model": "small"}}
    (said,) = layouts_document(planned(**job, gpus_per_node=1)).verdict.sentences
    assert "fit, but none has a known time" in said
    given = re.findall(r"--link (\S+=[0-9]+(?:Gb/s)?)", said)
    assert given == ["network=45", "network=400Gb/s"]
    for link in given:
        assert planned(**job, gpus_per_node=1, links=[link]).candidates[0].time


def test_a_stated_network_is_reached_as_that_of_the_catalogue() -> None:
    """400 Gb/s is an H100's in hardware.toml; half of it reaches half the bandwidth."""
    small = JOB | {"model": "small"}
    known = planned(spec=small)
    stated, half = (planned(spec=small, links=[f"network={number}Gb/s"]) for number in (400, 200))
    assert stated.candidates == known.candidates
    assert known.network_bytes_per_s is not None
    reached = known.network_bytes_per_s / 2
    assert half.network_bytes_per_s == reached
    assert half.candidates == planned(spec=small, links=[f"network={reached / 1e9!r}"]).candidates
    assert "23.5 GB/s (0.940 of the 200 Gb/s of InfiniBand NDR)" in render(layouts_document(half), "md")
    with pytest.raises(UserError, match="given twice"):
        planned(links=["network=200Gb/s", "network=45"])


def test_a_training_takes_its_steps_one_after_the_other() -> None:
    plan = planned(tokens=1e12)
    time = plan.candidates[0].time
    assert time is not None
    days = 1e12 / (64 * 2048) * time.seconds / 86_400
    said = next(each for each in layouts_document(plan).verdict.sentences if "GPU-hours" in each)
    assert said.startswith(f"1.00 T tokens take about {days:.1f} days (")


def test_what_is_trained_with_is_named_beside_defaults() -> None:
    told = layouts_document(planned(spec={"model": "small", "compile": "block"}, gpus=2, global_batch=2)).verdict
    assert any("faster with --precision bf16 --attention sdpa;" in said for said in told.sentences)


def test_alternatives_stand_side_by_side_with_their_best_layouts() -> None:
    given: dict[str, Any] = {"gpus": [1, 8], "global_batches": [64], "gpu_names": ["H100 SXM", "A100 SXM 40GB"]}
    plans = plan_layouts({name: [value] for name, value in JOB.items()}, **given, tokens=1e12)
    document = compared_layouts_document(plans)
    assert isinstance(document.data, Sequence)
    rows = document.data
    assert [row["alternative"] for row in rows] == [
        "1 × H100 SXM", "8 × H100 SXM", "1 × A100 SXM 40GB", "8 × A100 SXM 40GB",
    ]  # fmt: skip
    assert plans[1] == planned(tokens=1e12, gpus=8)
    best = plans[1].candidates[0]
    assert best.time is not None
    assert (rows[1]["options"], rows[1]["step_s"]) == (best.options, best.time.seconds)
    assert rows[1]["gpu_hours"] == pytest.approx(1e12 / (64 * 2048) * best.time.seconds / 3600 * 8)
    # 2.7b has 3.4e9 parameters, and 16 bytes of state for each.
    assert rows[2]["step_s"] is None
    assert "needs" in str(rows[2]["options"])
    answer = " ".join(document.verdict.sentences)
    assert "Most tokens/s: 8 × H100 SXM" in answer
    assert "fits for 1 × A100 SXM 40GB" in answer
    assert "between nodes" not in answer  # there is one
    spanning = plan_layouts({"model": ["small"]}, gpus=[16], global_batches=[16], gpu_names=given["gpu_names"])
    sentences = compared_layouts_document(spanning).verdict.sentences
    assert any("47.0 GB/s (0.940 of the 400 Gb/s" in each and "(0.960 of the 200 Gb/s" in each for each in sentences)


def test_checkpointing_auto_is_the_best_of_three_on_each_layout() -> None:
    job: dict[str, Any] = {"gpus": 4, "global_batch": 8, "gpu": "A100 SXM 40GB"}
    found = planned(spec=JOB | {"checkpointing": "auto"}, **job)
    three = {choice: planned(spec=JOB | {"checkpointing": choice}, **job) for choice in ("none", "selective", "full")}
    for each in found.candidates:
        those = [other for plan in three.values() for other in plan.candidates if other.layout == each.layout]
        sure = [other.time.seconds for other in those if other.time and other.verdict == "fits"]
        assert (each.verdict == "fits") == bool(sure)
        if sure:
            assert each.time is not None
            assert each.time.seconds == min(sure)
            assert each.spec is not None
            assert (f"--checkpointing {each.spec.checkpointing}" in each.options) == (each.spec.checkpointing != "none")
    assert len({each.spec.checkpointing for each in found.candidates if each.spec and each.time}) > 1
    assert any("--checkpointing auto" in said for said in layouts_document(three["none"]).verdict.sentences)


def test_one_gpu_has_one_layout_and_one_rate() -> None:
    answer = layouts_document(planned(spec={"model": "small", "precision": "bf16"}, gpus=1, global_batch=4)).verdict
    assert answer.sentences[0].startswith("A step takes about ")
    assert answer.sentences[0].endswith("; --layout dp=1 --batch 4 fits.")
    assert "on each GPU" not in answer.sentences[1]


def test_the_answer_has_the_utilization_of_the_fastest() -> None:
    plan = planned()
    time = plan.candidates[0].time
    assert time is not None
    weights = 32 * (4 * 2560**2 + 3 * 2560 * 10240 + 2 * 2560) + 2560 + 2560 * 10_000  # but for the embedding
    flops = 64 * 2048 * 6 * (weights + 32 * 2560 * 2048)
    mfu = flops / (time.seconds * 16 * 989.4e12)
    (rate,) = (said for said in layouts_document(plan).verdict.sentences if "MFU" in said)
    told, share = re.findall(r"([\d.]+) k tokens/s on each GPU, an MFU of ([\d.]+) %", rate)[0]
    assert float(share) == pytest.approx(100 * mfu, rel=2e-3)
    assert 1e3 * float(told) == pytest.approx(64 * 2048 / time.seconds / 16, rel=5e-3)


def test_rows_are_the_candidates_and_times_between_nodes_are_said_to_be_assumed() -> None:
    plan = planned()
    assert "Times between nodes are assumed" in render(layouts_document(plan), "md")
    rows = layout_rows(plan)
    assert [row["layout"] for row in rows] == [each.layout for each in plan.candidates]
    assert len({tuple(row) for row in rows}) == 1


def test_the_command_ranks_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        shlex.split(
            'plan layout --model small --context 512 --precision bf16 --gpus 4 --global-batch 16 --gpu "H200 SXM"'
        )
    )
    assert code == 0
    assert "Layouts on 4 GPUs, H200 SXM" in capsys.readouterr().out
    assert main(shlex.split("plan layout --model small --gpus 2,4 --global-batch 8 --format csv --tokens 3B")) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(shlex.split("plan layout --model small --gpus some --global-batch 16")) == 2
    assert main(shlex.split("plan layout --model small --gpus 4 --global-batch 16 --tokens many")) == 2
    assert main(shlex.split("plan layout --model small --layout dp=4 --gpus 4 --global-batch 16")) == 2
    assert main(shlex.split("plan memory --model small --layout dp=2 --variant zero9")) == 2
