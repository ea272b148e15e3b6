from dataclasses import replace
from statistics import median

import pytest
from tests.stored_records import stored
from tests.sure import sure

from steplab.records.ddp import DdpCell, DdpRun
from steplab.records.timing import PhaseSamples, find_phase
from steplab.report.ddp import figures
from steplab.report.ddp.document import ddp_verdict, facts


@pytest.fixture(scope="module")
def studies() -> dict[str, DdpRun]:
    runs = stored("ddp_h200", DdpRun)
    return {run.id: run for run in runs} | {run.name: run for run in runs[:3]}


def cell(run: DdpRun, label: str) -> DdpCell:
    return next(cell for cell in run.cells if cell.contender.label == label)


@pytest.mark.parametrize(
    ("name", "ours", "least", "most"),
    [
        ("compiled-2", "bucketed 100 MB, peer_copy", 0.29, 0.30),
        ("eager-2", "bucketed 10 MB, peer_copy", 0.35, 0.36),
        ("compiled, 4 GPUs", "bucketed 200 MB, peer_copy", 0.33, 0.34),
        ("3d6a55bb805c", "bucketed 200 MB, peer_copy", 0.31, 0.32),
        ("f260de00d084", "bucketed 200 MB, peer_copy", 0.32, 0.33),
    ],
)
def test_peer_copies_expose_about_a_third_of_what_torch_ddp_does(
    studies: dict[str, DdpRun], name: str, ours: str, least: float, most: float
) -> None:
    exposed_s, best_s = figures.exposed_s(cell(studies[name], ours)), figures.best_ddp_s(studies[name].cells)
    assert exposed_s is not None
    assert best_s is not None
    assert least < exposed_s / best_s < most


def test_with_a_head_start_python_was_ahead_of_every_step(studies: dict[str, DdpRun]) -> None:
    for name in ("compiled-2", "eager-2"):
        for one in studies[name].cells[1:]:  # the baseline's own row is of before the ranks had settled
            lead_s = sure(figures.host_lead_s(one))
            assert lead_s > 0.015, (name, one.contender.label)
            baseline = [median(find_phase(rank.baseline, "step").best_s) for rank in one.ranks]  # type: ignore[union-attr]
            assert max(baseline) == pytest.approx(0.084 if name == "compiled-2" else 0.1424, rel=0.005)


def test_where_less_was_allocated_than_is_held_no_count_of_all_and_no_peak_is_told(studies: dict[str, DdpRun]) -> None:
    run = studies["compiled-2"]
    after = sure(figures.memory_at(cell(run, "torch DDP 400 MB"), "after_step"))
    assert after.other_bytes is None
    assert figures.peak_bytes(cell(run, "torch DDP 400 MB")) is None
    assert figures.peak_bytes(cell(run, "torch DDP 25 MB")) == pytest.approx(45.1 * 2**30, rel=1e-2)
    (text,) = (text for text in facts(run) if "Other memory and the peak are not known" in text)
    assert "torch DDP 100 MB; torch DDP 400 MB; torch DDP 1000 MB; sharded 100 MB: an earlier" in text


def test_a_baseline_that_was_disturbed_is_told(studies: dict[str, DdpRun]) -> None:
    for run in studies.values():
        assert not disturbed(run)
    run = studies["compiled, 4 GPUs"]
    first, second, *others = run.cells
    ranks = tuple(replace(rank, baseline=tuple(map(a_tenth_longer, rank.baseline))) for rank in second.ranks)
    (text,) = disturbed(replace(run, cells=(first, replace(second, ranks=ranks), *others)))
    assert "83.9 ms next to one variant and 92.2 ms next to another" in text


def disturbed(run: DdpRun) -> list[str]:
    return [text for text in ddp_verdict(run).cautions if "unstable" in text]


def a_tenth_longer(samples: PhaseSamples) -> PhaseSamples:
    return replace(samples, device_s=tuple(1.1 * second for second in samples.device_s or ()))
