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
