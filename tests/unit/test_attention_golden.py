"""The committed records of attention on an H200: what the documents say of flash_triton's speed holds."""

import gzip
from pathlib import Path
from statistics import median

import pytest

from steplab.records.attention import AttentionCell, AttentionRun
from steplab.records.codec import decode
from steplab.records.run import Run

PEERS = "f35c5aced2c3"
"""Seven shapes beside cuDNN, FlashAttention-2, FlexAttention and flash-attn-4, in one process in turns."""
RECORDS = Path(__file__).parents[2] / "benchmarks/results/attention_h200_202611.jsonl.gz"


@pytest.fixture(scope="module")
def records() -> dict[str, AttentionRun | Run]:
    found = (decode(line) for line in gzip.decompress(RECORDS.read_bytes()).splitlines())
    return {record.id: record for record in found if isinstance(record, (AttentionRun, Run))}


def times(run: AttentionRun | Run, implementation: str, name: str) -> list[float]:
    """Median seconds of a pass, shape by shape."""
    assert isinstance(run, AttentionRun)
    cells: list[AttentionCell] = [cell for cell in run.cells if cell.spec.implementation == implementation]
    return [median(cell.samples(name)) for cell in sorted(cells, key=lambda cell: repr(cell.spec.shape))]


def ratios(run: AttentionRun | Run, peer: str, name: str) -> list[float]:
    """What a peer takes over what flash_triton takes, shape by shape."""
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
    for record, longest_s in ((PEERS, 8.26), ("ac3c36ae99c0", 7.34), ("c7445ad0d890", 14.19)):
        run = records[record]
        assert isinstance(run, AttentionRun)
        first_s = [cell.first_call_s or 0.0 for cell in run.cells if cell.spec.implementation == "flash_triton"]
        assert max(first_s) == pytest.approx(longest_s, abs=0.05)


def test_a_step_of_head_dimension_80_is_no_slower_than_with_sdpa_flash(records: dict[str, AttentionRun | Run]) -> None:
    def step_s(record: str) -> float:
        run = records[record]
        assert isinstance(run, Run)
        assert run.timing is not None
        step = run.timing.phase("step")
        assert step is not None
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
