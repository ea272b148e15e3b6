import itertools
from pathlib import Path
from statistics import median

import pytest
from tests.stored_records import stored
from tests.sure import sure

from steplab.records.run import Run

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return stored("step_h200", Run)


def test_the_whole_study_is_there(runs: list[Run]) -> None:
    cells = {
        (run.spec.model.name, run.spec.context, run.spec.precision, run.spec.pass_name, run.spec.compile)
        for run in runs
        if run.spec and run.timing and run.spec.attention == "plain"
    }
    sizes, passes = ("small", "medium", "large", "xl", "2.7b"), ("forward", "forward_backward", "train")
    eager = itertools.product(sizes, (128, 256, 512, 1024), ("fp32", "bf16"), passes, ("off",))
    compiled = itertools.product(sizes, (256, 512), ("bf16",), passes, ("default",))
    assert cells >= {*eager, *compiled}
    warmups = {(run.spec.model.name, run.spec.warmup) for run in runs if run.name == "warmup" and run.spec}
    assert warmups == set(itertools.product(("small", "large"), (0, 1, 2, 5)))


def test_a_cell_that_cannot_fit_is_a_row_with_what_it_asked_for(runs: list[Run]) -> None:
    [failed] = [run for run in runs if run.failure]
    assert failed.failure is not None
    assert failed.failure.kind == "out_of_memory"
    # One layer's scores in fp32, where autocast runs softmax: batch x heads x context x context x 4 bytes.
    assert failed.failure.requested_bytes == 4 * 32 * 8192 * 8192 * 4


@pytest.mark.parametrize(
    ("convention", "flops_per_step", "percent"),
    [
        ("causal", (6 * (3_406_809_600 - 25_600_000) + 6 * 32 * 2560 * 512) * 2048, "25.2"),
        ("full", (6 * (3_406_809_600 - 25_600_000) + 12 * 32 * 2560 * 512) * 2048, "25.5"),
        ("params", 6 * 3_406_809_600 * 2048, "25.1"),
    ],
)
def test_mfu_of_2_7b_agrees_with_the_hand_calculation_in_the_docs(
    runs: list[Run], convention: str, flops_per_step: int, percent: str
) -> None:
    [run] = [run for run in runs if run.id == "5e7271880f12"]
    [mfu] = [u for u in run.utilizations if u.kind == "mfu" and u.convention == convention]
    step = sure(sure(run.timing).phase("step"))
    by_hand = flops_per_step / median(step.best_s) / 989.5e12
    assert mfu.flops == flops_per_step
    assert mfu.value == pytest.approx(by_hand, rel=1e-12)
    assert f"{100 * by_hand:.1f}" == percent
    text = (REPOSITORY / "docs" / "mfu.md").read_text(encoding="utf-8")
    assert f"{flops_per_step / 1e12:.3f}e12 / 0.16880 / 989.5e12 = {percent} %" in text


def test_the_two_clocks_agree_on_every_loop(runs: list[Run]) -> None:
    for run in runs:
        step = run.timing.phase("step") if run.timing else None
        if run.timing is None or step is None:
            continue
        assert run.timing.back_to_back_host_s is not None
        # The host's clock also sees the launch of the first kernel and the way back from the last.
        assert sum(step.best_s) == pytest.approx(run.timing.back_to_back_host_s, rel=0.03), run.id
