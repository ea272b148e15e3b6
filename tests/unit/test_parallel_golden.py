from dataclasses import replace
from statistics import median

import pytest
from tests.stored_records import stored
from tests.sure import sure

from steplab.costs.communication import wire_bytes
from steplab.costs.rates import gpu_named
from steplab.records.comm import CommRun
from steplab.records.ddp import COMPUTE_ROW, DdpCell, DdpRun
from steplab.records.timing import PhaseSamples, find_phase
from steplab.report.ddp import figures
from steplab.report.ddp.document import ddp_verdict, facts


@pytest.fixture(scope="module")
def studies() -> dict[str, DdpRun]:
    runs = stored("ddp_h200", DdpRun)
    return {run.id: run for run in runs} | {run.name: run for run in runs[:3]}


@pytest.fixture(scope="module")
def studies_of_updates() -> dict[str, DdpRun]:
    return {run.id: run for run in stored("ddp_update_h200", DdpRun)}


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


@pytest.mark.parametrize(("size_mb", "share"), [(100, 0.27), (200, 0.29), (400, 0.33)])
def test_four_ranks_that_send_in_turns_expose_a_third_at_every_bucket_size(
    studies: dict[str, DdpRun], size_mb: int, share: float
) -> None:
    """Against torch's DDP an hour earlier, with an equal step without communication."""
    turns, before = studies["16fec02a687f"], studies["3d6a55bb805c"]
    label = f"bucketed {size_mb} MB, peer_copy"
    exposed_s, best_s = figures.exposed_s(cell(turns, label)), figures.best_ddp_s(before.cells)
    earlier_s = figures.exposed_s(cell(before, label))
    assert exposed_s is not None
    assert best_s is not None
    assert earlier_s is not None
    assert exposed_s / best_s == pytest.approx(share, abs=0.005)
    assert exposed_s < 0.9 * earlier_s
    assert figures.usual_baseline_s(turns) == pytest.approx(figures.usual_baseline_s(before), rel=0.005)


@pytest.mark.parametrize(
    ("study", "shares"),
    [
        ("8e899e122774", {"100 MB": (0.24, 0.21), "200 MB": (0.30, 0.28), "400 MB": (0.33, 0.27)}),
        ("fcb4617b3d65", {"100 MB": (0.25, 0.22), "200 MB": (0.25, 0.22), "400 MB": (0.27, 0.245)}),
        ("12a6bcc50b23", {"100 MB": (0.27, 0.23), "200 MB": (0.27, 0.23), "400 MB": (0.32, 0.25)}),
        ("803eac21993f", {"100 MB": (0.28, None), "400 MB": (0.33, None)}),
        ("045711e386dd", {"100 MB": (None, 0.25), "200 MB": (None, 0.24), "400 MB": (None, 0.25)}),
    ],
)
def test_shares_of_what_torch_ddp_adds_with_the_update_afterwards_and_overlapped(
    studies_of_updates: dict[str, DdpRun], study: str, shares: dict[str, tuple[float | None, float | None]]
) -> None:
    run = studies_of_updates[study]
    best_s = sure(figures.best_ddp_s(run.cells))
    for size, of_updates in shares.items():
        for update, share in zip(("", ", update overlapped"), of_updates, strict=True):
            if share is None:
                continue
            exposed_s = sure(figures.exposed_s(cell(run, f"bucketed {size}, peer_copy{update}")))
            assert exposed_s / best_s == pytest.approx(share, abs=0.005), (size, update)
    sharded_s = sure(figures.exposed_s(cell(run, "sharded 100 MB, peer_copy")))
    assert sharded_s < 0


def test_peer_copies_slow_the_backward_pass_by_part_of_what_their_bytes_take(
    studies_of_updates: dict[str, DdpRun],
) -> None:
    """Bytes through each GPU's memory (sent, landed, averaged, returned, arrived), at its stated bandwidth."""
    shares, bytes_per_s = [], gpu_named("H200 SXM").bandwidth_bytes_per_s
    for run in studies_of_updates.values():
        size = run.study.processes
        assert run.facts is not None
        for one in run.cells:
            if one.contender.transport != "peer_copy":
                continue
            sharded = one.contender.kind == "sharded"
            moved_bytes = ((3 if sharded else 5) * size - (1 if sharded else 3)) / size * run.facts.gradient_bytes
            beside_s, by_itself_s = (
                max(median(rank.samples("backward", baseline=baseline)) for rank in one.ranks)
                for baseline in (False, True)
            )
            shares.append((beside_s - by_itself_s) / (moved_bytes / bytes_per_s))
    assert len(shares) >= 20
    assert (round(min(shares), 2), round(max(shares), 2)) == (0.62, 0.84)


def test_with_a_head_start_python_was_ahead_of_every_step(studies: dict[str, DdpRun]) -> None:
    for name in ("compiled-2", "eager-2"):
        for one in studies[name].cells[1:]:  # the baseline's own row is of before the ranks had settled
            lead_s = sure(figures.host_lead_s(one))
            assert lead_s > 0.015, (name, one.contender.label)
            baseline = [median(find_phase(rank.baseline, "step").best_s) for rank in one.ranks]  # type: ignore[union-attr]
            assert max(baseline) == pytest.approx(0.084 if name == "compiled-2" else 0.1424, rel=0.005)


@pytest.mark.parametrize(
    ("name", "fast", "slow", "num_kernels"),
    [
        ("compiled-2", "bucketed 100 MB, peer_copy", "bucketed 200 MB, peer_copy", 1207),
        ("eager-2", "bucketed 400 MB, peer_copy", "bucketed 100 MB, peer_copy", 1543),
        ("compiled, 4 GPUs", "bucketed 200 MB, peer_copy", "bucketed 100 MB, peer_copy", 1207),
        ("compiled, 4 GPUs", "bucketed 200 MB, peer_copy", "bucketed 400 MB, peer_copy", 1207),
    ],
)
def test_a_slow_forward_pass_has_longer_gaps_between_kernels_and_the_same_matmuls(
    studies: dict[str, DdpRun], name: str, fast: str, slow: str, num_kernels: int
) -> None:
    (fast_gaps, fast_matmuls), (slow_gaps, slow_matmuls) = (
        gaps_and_matmuls_us(cell(studies[name], label), num_kernels) for label in (fast, slow)
    )
    assert 1.0 < (slow_gaps - fast_gaps) / num_kernels < 1.35
    assert slow_matmuls == pytest.approx(fast_matmuls, rel=0.01)


def gaps_and_matmuls_us(found: DdpCell, num_kernels: int) -> tuple[float, float]:
    timeline = sure(found.traced).timeline
    (begin, end) = next((begin, end) for phase, begin, end in timeline.phases if phase == "forward")
    kernels = [
        (timeline.categories[kernel], duration)
        for kernel, stream, start, duration in zip(
            timeline.kernel, timeline.stream, timeline.start_ns, timeline.duration_ns, strict=True
        )
        if stream == COMPUTE_ROW and begin <= start < end
    ]
    assert len(kernels) == num_kernels
    matmuls = sum(duration for category, duration in kernels if category == "matmul")
    return (end - begin - sum(duration for _, duration in kernels)) / 1e3, matmuls / 1e3


def test_a_step_with_a_sharded_optimizer_is_at_most_a_twentieth_longer(studies: dict[str, DdpRun]) -> None:
    for name in ("compiled-2", "eager-2"):
        sharded, whole = (
            max(median(find_phase(rank.phases, "step").best_s) for rank in cell(studies[name], label).ranks)  # type: ignore[union-attr]
            for label in ("sharded 100 MB", "bucketed 100 MB")
        )
        assert 1 < sharded / whole < 1.05


def test_where_less_was_allocated_than_is_held_no_count_of_all_and_no_peak_is_told(studies: dict[str, DdpRun]) -> None:
    run = studies["compiled-2"]
    after = sure(figures.memory_at(cell(run, "torch DDP 400 MB"), "after_step"))
    assert after.other_bytes is None
    assert figures.peak_bytes(cell(run, "torch DDP 400 MB")) is None
    assert figures.peak_bytes(cell(run, "torch DDP 25 MB")) == pytest.approx(45.1 * 2**30, rel=1e-2)
    (text,) = (text for text in facts(run) if "Other memory and the peak are not known" in text)
    assert "torch DDP 100 MB, torch DDP 400 MB, torch DDP 1000 MB, sharded 100 MB: an earlier" in text


def test_a_sharded_optimizer_holds_half_its_state_on_each_of_two_gpus(studies: dict[str, DdpRun]) -> None:
    whole = figures.memory_at(cell(studies["compiled-2"], "bucketed 200 MB"), "after_step")
    sharded = figures.memory_at(cell(studies["compiled-2"], "sharded 100 MB"), "after_step")
    assert whole is not None
    assert sharded is not None
    assert sharded.optimizer_bytes == pytest.approx(whole.optimizer_bytes / 2, rel=1e-3)


def test_every_collective_was_right_and_an_all_reduce_of_a_gigabyte_fills_the_link() -> None:
    run, *_ = stored("comm_h200", CommRun)
    assert all(one.failure is None for one in run.cells)
    for size, busbw in ((2, 324e9), (4, 352e9)):
        (found,) = (
            one
            for one in run.cells
            if (one.spec.collective, one.spec.world_size, one.spec.size_bytes) == ("all_reduce", size, 10**9)
        )
        slowest_s = max(median(rank.device_s) for rank in found.ranks if rank.device_s)
        assert wire_bytes(found.spec) / slowest_s == pytest.approx(busbw, rel=0.01)


def test_peer_copies_have_more_bandwidth_than_nccl_and_a_larger_overhead() -> None:
    run = stored("comm_h200", CommRun)[-1]
    nccl, peer_copy, gloo = run.profile
    assert (nccl.way, peer_copy.way, gloo.way) == ("nccl", "peer_copy", "gloo")
    assert gloo.beta_s_per_byte > nccl.beta_s_per_byte > peer_copy.beta_s_per_byte
    assert gloo.alpha_s > peer_copy.alpha_s > nccl.alpha_s
    equal_bytes = (peer_copy.alpha_s - nccl.alpha_s) / (nccl.beta_s_per_byte - peer_copy.beta_s_per_byte)
    assert equal_bytes == pytest.approx(27e6, rel=0.03)  # docs/comm.md


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


def test_after_an_update_in_parts_the_state_of_all_of_them_is_there(studies_of_updates: dict[str, DdpRun]) -> None:
    """Two fp32 moments of xl's 2.0 G parameters, however the update was divided."""
    for study in studies_of_updates.values():
        for each in study.cells:
            memory = [rank.moment("after_step") for rank in each.ranks]
            if each.failure is None and each.contender.kind != "sharded":
                assert memory
                assert all(one and one.optimizer_bytes == pytest.approx(8 * 1_998_235_200, rel=1e-3) for one in memory)
