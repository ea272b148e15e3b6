import dataclasses
import math
from collections.abc import Iterable
from functools import cache
from statistics import mean, median

import msgspec
import pytest
from benchmarks.published import (
    PublicLayout,
    PublicRow,
    RowCheck,
    StackRates,
    check_rows,
    counts,
    fitted_stack,
    groups_of,
    load_of,
    loaded_rows,
    ranking,
    read_rows,
    step_of,
    summary,
    unseen_stacks,
)
from tests.documents import chapter_says

from steplab.costs.rates import gpu_named
from steplab.errors import Unsupported
from steplab.plan.layout.time import layout_step_s
from steplab.specs.layout import Layout
from steplab.stats import percentile


@cache
def published() -> tuple[PublicRow, ...]:
    return tuple(read_rows())


@cache
def checked() -> tuple[RowCheck, ...]:
    return tuple(check_rows(published()))


def errors(checks: Iterable[RowCheck]) -> list[float]:
    return [abs(check.error) for check in checks if check.error is not None]


# --- published steps ----------------------------------------------------------------------------------------------


@pytest.mark.release
def test_published_steps_are_predicted_better_than_by_any_constant_share_of_the_peak() -> None:
    own = [check for check in checked() if check.row.group == "mosaicml"]
    constant = [abs(check.constant_error) for check in own if check.constant_error is not None]
    assert len(errors(own)) == len(constant) == 135
    assert median(errors(own)) < 0.05 < median(constant)
    assert percentile(errors(own), 90) < 0.10 < percentile(constant, 90)
    assert sum(bool(check.inside) for check in own) >= 0.85 * len(own)


SOURCES = {
    "MosaicML, A100s and H100s": "mosaicml",
    "InternEvo, 8 to 1024 A100s": "internevo",
    "NeuSight, fp32, one GPU": "neusight",
    "torchtitan, 64 A100s": "torchtitan",
    "vTrain, 64 A100s, 26 layouts (no fit)": "vtrain",
    "Megatron-LM 2020, 1 to 8 A100s (no fit)": "megatron-lm",
    "nanotron, 8 and 64 H100s (no fit)": "nanotron",
    "Korthikanti et al. 2022 (no fit)": "korthikanti 2022",
    "BigScience, 384 A100s (no fit)": "bigscience",
    "KempnerForge, 1 and 4 H200s (no fit)": "kempnerforge",
}


@pytest.mark.release
def test_the_chapter_tells_the_errors_of_today() -> None:
    groups = {name: summary(group) for name, group in groups_of(checked()).items()}
    for name, group in SOURCES.items():
        chapter_says("plan_time", f"| {' | '.join((name, *groups[group]))} |")
    chapter_says("plan_time", f"| torchao, 8 H100s (no fit) | 1 | {groups['torchao'][3]} | | |")
    pairs = ranking(checked())
    of_vtrain, few, every = pairs["vtrain"], pairs["bigscience"], [right for own in pairs.values() for right in own]
    assert len(every) > 300
    assert mean(every) >= 0.8
    chapter_says(
        "plan_time",
        f"has {len(published())} steps that others measured, with the file and line of each; {len(checked())} are",
        f"In {len(every)} pairs of one job",
        f"{100 * mean(every):.0f} % are predicted in the measured order: "
        f"{100 * mean(of_vtrain):.0f} % of vTrain's {len(of_vtrain)},",
        f"and {sum(few)} of BigScience's {len(few)},",
    )
    chapter_says("plan_layout", f"rank {100 * mean(every):.0f} % of {len(every)} pairs")


def test_the_chapter_tells_how_far_off_published_sharded_steps_are_as_layouts() -> None:
    own = [row for row in published() if row.group == "torchtitan" and row.card == "A100 SXM 80GB" and counts(row)]
    specs = [dataclasses.replace(step_of(row), layout=Layout(fsdp=64)) for row in own]
    times = [layout_step_s(spec, gpu_named("A100 SXM 80GB")) or math.nan for spec in specs]
    off = [100 * (time / (row.measured_s or math.nan) - 1) for row, time in zip(own, times, strict=True)]
    assert len(off) == 6
    chapter_says("plan_layout", f"no factor, {min(off):.0f} to {max(off):.0f} % too long (median {median(off):.0f} %)")


@pytest.mark.release
def test_more_gpus_of_one_job_take_longer_as_measured() -> None:
    own = [check for check in checked() if check.row.group == "internevo"]
    assert median(errors(own)) < 0.05
    assert percentile(errors(own), 90) < percentile([abs(c.constant_error or 0.0) for c in own], 90)


@pytest.mark.release
def test_every_row_that_counts_has_a_prediction_or_a_reason() -> None:
    assert len(checked()) == sum(map(counts, published())) == 218
    for check in checked():
        assert (check.unsupported is None) == (check.predicted_s is not None)
        assert check.measured_s
        assert check.predicted_s is None or check.spread > 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"steplab_gpu": None}, "the GPU is unknown"),
        ({"layout": PublicLayout(cp=2)}, "split sequences"),
        ({"scope": "mixture of experts"}, "not a dense decoder"),
        ({"precision": {"compute": "fp8"}}, "number format"),
        ({"seq": None}, "lacks sizes"),
    ],
)
def test_a_row_that_is_not_known_says_why(change: dict[str, object], why: str) -> None:
    row = next(row for row in published() if row.group == "mosaicml" and counts(row))
    with pytest.raises(Unsupported, match=why):
        step_of(msgspec.structs.replace(row, **change))


def test_a_row_becomes_the_step_of_one_rank() -> None:
    row = next(row for row in published() if row.id == "mosaicml-0037")
    spec = step_of(row)
    shape = spec.model.shape
    assert shape is not None
    assert (shape.num_layers, shape.d_model, shape.num_heads, shape.d_ff, shape.vocab_size) == (
        (32, 4096, 32, 16384, 50368)
    )  # fmt: skip
    assert (shape.norm, shape.feed_forward, shape.head, shape.learned_positions) == ("layernorm", "gelu", "tied", 8192)
    assert (spec.batch, spec.context, spec.accumulation, spec.checkpointing) == (8, 8192, 2, "full")


def test_a_source_of_one_model_on_one_number_of_gpus_has_no_factors() -> None:
    rows = [row for row in published() if row.group == "mosaicml" and counts(row) and not row.is_split]
    alike = [row for row in rows if (row.model.key, row.gpus, row.card) == ("mpt-1b", 8, "H100 SXM")]
    assert len(alike) >= 4
    assert unseen_stacks(list(loaded_rows(alike))) == {}
    assert all(check.predicted_s for check in check_rows(alike))


def test_the_factors_of_a_source_are_found_again() -> None:
    rows = [row for row in published() if row.group == "mosaicml" and row.steplab_gpu == "H100 SXM" and counts(row)]
    true = StackRates(product_factor=1.3, attention_factor=1.6, streaming_factor=1.1)
    gpu = gpu_named("H100 SXM")
    made = [
        msgspec.structs.replace(row, derived={"step_time_s": load_of(row, gpu).seconds(true)})
        for row in rows
        if row.gpus == 8
    ]
    found = fitted_stack(list(loaded_rows(made)))
    assert found.product_factor == pytest.approx(1.3, rel=0.02)
    assert found.attention_factor == pytest.approx(1.6, rel=0.03)
    assert found.streaming_factor == pytest.approx(1.1, rel=0.05)
