from statistics import geometric_mean, median

import pytest
from tests.stored_records import stored
from tests.sure import sure

from steplab.ops.attention.choice_rule import choose
from steplab.records.attention import AttentionCell, AttentionRun
from steplab.records.run import Run
from steplab.specs.attention import AttentionSpec

PEERS = "f35c5aced2c3"
"""Seven shapes against cuDNN, FlashAttention-2, FlexAttention and flash-attn-4, alternating in one process."""
PEERS_H100 = "dc04c9eddde1"
DIMS = "b0c5ae3034ca"
DIMS_H100 = "141770e23524"
NEWER_TRITON = {"c7e14285cab3": ("3.7.1", 2.29), "f958da98bd3e": ("3.9.0", 2.26)}
"""The seven shapes with newer Triton, and the speed of both passes against FlashAttention-2."""
PORTABLE = "9db2e697ab2d"


@pytest.fixture(scope="module")
def records() -> dict[str, AttentionRun | Run]:
    names = "attention_h200", "attention_h100", "attention_triton_h200"
    benchmarks = {run.id: run for name in names for run in stored(name, AttentionRun)}
    return benchmarks | {run.id: run for name in names for run in stored(name, Run)}


def times(run: AttentionRun | Run, implementation: str, name: str) -> list[float]:
    assert isinstance(run, AttentionRun)
    cells: list[AttentionCell] = [cell for cell in run.cells if cell.spec.implementation == implementation]
    return [median(cell.samples(name)) for cell in sorted(cells, key=lambda cell: repr(cell.spec.shape))]


def ratios(run: AttentionRun | Run, peer: str, name: str) -> list[float]:
    pairs = zip(times(run, peer, name), times(run, "flash_triton", name), strict=True)
    return [theirs / ours for theirs, ours in pairs]


@pytest.mark.parametrize(
    ("peer", "name", "least", "most"),
    [
        ("flex", "forward", 1.546, 2.061),
        ("flex", "backward", 1.501, 2.145),
        ("flex", "both", 1.591, 1.997),
        ("sdpa_flash", "both", 2.118, 2.496),
        ("sdpa_cudnn", "forward", 1.091, 1.302),
        ("sdpa_cudnn", "backward", 1.177, 1.395),
        ("sdpa_cudnn", "both", 1.162, 1.352),
        ("flash_attn_4", "forward", 1.025, 1.178),
        ("flash_attn_4", "backward", 1.031, 1.084),
        ("flash_attn_4", "both", 1.049, 1.086),
    ],
)
def test_flash_triton_is_faster_than_each_peer_in_seven_shapes(
    records: dict[str, AttentionRun | Run], peer: str, name: str, least: float, most: float
) -> None:
    found = ratios(records[PEERS], peer, name)
    assert len(found) == 7
    assert min(found) > 1
    assert min(found) == pytest.approx(least, abs=0.001)
    assert max(found) == pytest.approx(most, abs=0.001)


@pytest.mark.parametrize(
    ("peer", "name", "least", "most"),
    [
        ("sdpa_flash", "both", 2.026, 2.458),
        ("flex", "both", 1.475, 1.962),
        ("sdpa_cudnn", "both", 1.160, 1.334),
        ("flash_attn_4", "forward", 1.024, 1.210),
        ("flash_attn_4", "backward", 1.037, 1.062),
        ("flash_attn_4", "both", 1.033, 1.095),
    ],
)
def test_so_it_is_on_an_h100(
    records: dict[str, AttentionRun | Run], peer: str, name: str, least: float, most: float
) -> None:
    found = ratios(records[PEERS_H100], peer, name)
    assert len(found) == 7
    assert (min(found), max(found)) == pytest.approx((least, most), abs=0.001)


def beyond_proportion(run: AttentionRun, name: str, dim: int, kv_heads: int, length: int) -> float:
    """Excess of flash_triton's time over its FLOPs: for a head dimension between 64 and 128, or for 32 heads on fewer
    key heads.
    """

    def seconds(dim: int, kv_heads: int) -> float:
        (cell,) = (
            cell
            for cell in run.cells
            if (cell.spec.implementation, cell.spec.heads, cell.spec.kv_heads, cell.spec.dim, cell.spec.queries)
            == ("flash_triton", heads, kv_heads, dim, length)
        )
        return median(cell.samples(name))

    heads = 16 if kv_heads == 16 else 32
    low, high = seconds(64, heads), seconds(128, heads)
    return seconds(dim, kv_heads) / (low + (high - low) * (dim - 64) / 64) - 1


@pytest.mark.parametrize(
    ("dim", "kv_heads", "h200", "h100"),
    [
        (80, 16, (0.104, 0.097), (0.101, 0.123)),
        (96, 16, (0.042, 0.063), (0.038, 0.061)),
        (112, 16, (0.160, 0.105), (0.166, 0.114)),
        (64, 8, (-0.018, 0.012), (-0.032, -0.005)),
        (64, 4, (-0.014, 0.011), (-0.034, -0.003)),
        (128, 8, (0.038, 0.016), (0.055, 0.035)),
        (128, 4, (0.020, 0.010), (0.073, 0.016)),
    ],
)
def test_head_dimensions_and_grouped_heads_take_what_their_flops_say_and_some_percent(
    records: dict[str, AttentionRun | Run],
    dim: int,
    kv_heads: int,
    h200: tuple[float, float],
    h100: tuple[float, float],
) -> None:
    for record, beyond in ((DIMS, h200), (DIMS_H100, h100)):
        run = records[record]
        assert isinstance(run, AttentionRun)
        found = [beyond_proportion(run, "both", dim, kv_heads, length) for length in (4096, 16384)]
        assert found == pytest.approx(list(beyond), abs=0.001)


def test_the_first_shape_takes_less_than_the_best_public_kernel_of_triton(
    records: dict[str, AttentionRun | Run],
) -> None:
    peers = records[PEERS]
    assert isinstance(peers, AttentionRun)
    (first,) = (
        cell
        for cell in peers.cells
        if cell.spec.implementation == "flash_triton" and (cell.spec.queries, cell.spec.dim) == (16384, 64)
    )
    assert median(first.samples("both")) == pytest.approx(3.215e-3, rel=0.001)


def test_first_calls_with_an_empty_cache_take_some_seconds(records: dict[str, AttentionRun | Run]) -> None:
    seen = (
        (PEERS, 128, 8.26),
        (DIMS, 64, 9.25),
        (DIMS, 80, 7.18),
        (DIMS, 96, 6.69),
        (DIMS, 128, 6.77),
        (DIMS, 256, 4.56),
    )
    for record, dim, longest_s in (*seen, ("e9005061e56e", 80, 11.56), (DIMS_H100, 64, 9.93)):
        run = records[record]
        assert isinstance(run, AttentionRun)
        ours = [cell for cell in run.cells if (cell.spec.implementation, cell.spec.dim) == ("flash_triton", dim)]
        assert max(cell.first_call_s or 0.0 for cell in ours) == pytest.approx(longest_s, abs=0.01)


def test_a_step_of_head_dimension_80_is_no_slower_than_with_sdpa_flash(records: dict[str, AttentionRun | Run]) -> None:
    def step_s(record: str) -> float:
        run = records[record]
        assert isinstance(run, Run)
        step = sure(sure(run.timing).phase("step"))
        return median(step.best_s)

    assert step_s("0c97f848ef80") == pytest.approx(0.351, rel=0.005)
    assert step_s("766b2aba5139") == pytest.approx(0.367, rel=0.005)


def test_the_long_grid_is_complete(records: dict[str, AttentionRun | Run]) -> None:
    cells = {
        cell.spec: cell
        for run in records.values()
        if isinstance(run, AttentionRun) and run.study.name == "long"
        for cell in run.cells
        if cell.spec.queries <= 65536
    }
    assert len(cells) == 10 * 4 * 2 * 4  # lengths, head dimensions, types, columns
    assert all(cell.failure is None for cell in cells.values())


def test_newer_versions_of_triton_are_as_fast(records: dict[str, AttentionRun | Run]) -> None:
    for number, (version, mean) in NEWER_TRITON.items():
        record = records[number]
        assert record.environment is not None
        assert (record.environment.triton, record.environment.flash_triton) == (version, "hopper")
        assert geometric_mean(ratios(record, "sdpa_flash", "both")) == pytest.approx(mean, abs=0.005)
    portable = records[PORTABLE]
    assert sure(portable.environment).flash_triton == "portable"
    assert max(ratios(portable, "sdpa_cudnn", "both")) < 0.83, "auto takes cuDNN where they run"


def test_autos_rule_is_the_fastest_within_three_per_cent(records: dict[str, AttentionRun | Run]) -> None:
    taken: dict[tuple[str, AttentionSpec], dict[str, float]] = {}
    for record in records.values():
        if isinstance(record, AttentionRun) and record.id != PORTABLE and record.created_utc >= "2026-11-23":
            for cell in record.cells:
                samples = cell.samples("both")
                if samples and cell.spec.dim <= 128 and cell.spec.implementation not in ("plain", "flash_attn_4"):
                    taken.setdefault((record.id, cell.spec.shape), {})[cell.spec.implementation] = median(samples)
    checked = [
        times_s[chosen] / min(times_s.values())
        for (record_id, spec), times_s in taken.items()
        if len(times_s) > 1 and (chosen := rule(str(records[record_id].device_name), spec)) in times_s
    ]
    assert len(checked) >= 200
    assert max(checked) < 1.03


def rule(device: str, spec: AttentionSpec) -> str:
    return choose(
        device=device,
        dtype={"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[spec.dtype],
        head_dim=spec.dim,
        num_queries=spec.queries,
        num_keys=spec.num_keys,
        causal=spec.causal,
        grouped=spec.num_kv_heads != spec.heads,
        hopper=True,
    ).implementation
