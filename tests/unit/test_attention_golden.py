"""The committed records of attention on an H200: what the documents say of flash_triton's speed holds."""

import gzip
from pathlib import Path
from statistics import median

import pytest

from steplab.records.attention import AttentionCell, AttentionRun
from steplab.records.codec import decode
from steplab.records.run import Run

NEWEST = "98bff4991d95"
"""Seven shapes beside cuDNN, FlashAttention-2 and FlexAttention."""
BESIDE_FLASH_ATTN_4 = ("bd0ee843eb9d", "09afbe05a098")
"""The same shapes beside flash-attn-4 and cuDNN, of an earlier backward kernel."""
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
        ("flex", "forward", 1.545, 1.989),
        ("flex", "backward", 1.499, 2.143),
        ("flex", "both", 1.567, 2.000),
        ("sdpa_flash", "both", 2.066, 2.459),
        ("sdpa_cudnn", "forward", 1.094, 1.301),
        ("sdpa_cudnn", "backward", 1.152, 1.393),
        ("sdpa_cudnn", "both", 1.138, 1.358),
        ("flash_attn_4", "forward", 1.030, 1.182),
        ("flash_attn_4", "backward", 0.964, 1.068),
        ("flash_attn_4", "both", 0.972, 1.075),
    ],
)
def test_flash_triton_beside_its_peers_in_seven_shapes(
    records: dict[str, AttentionRun | Run], peer: str, name: str, least: float, most: float
) -> None:
    found = [
        ratios(records[record], peer, name) for record in (BESIDE_FLASH_ATTN_4 if peer == "flash_attn_4" else [NEWEST])
    ]
    assert all(len(of_record) == 7 for of_record in found)
    assert min(map(min, found)) == pytest.approx(least, abs=0.001)
    assert max(map(max, found)) == pytest.approx(most, abs=0.001)


def test_speed_relative_to_flash_attn_4_inferred_through_cudnn(
    records: dict[str, AttentionRun | Run],
) -> None:
    ours = ratios(records[NEWEST], "sdpa_cudnn", "both")
    found = []
    for record in BESIDE_FLASH_ATTN_4:
        theirs = zip(
            times(records[record], "flash_attn_4", "both"), times(records[record], "sdpa_cudnn", "both"), strict=True
        )
        found += [own * fa / cudnn for own, (fa, cudnn) in zip(ours, theirs, strict=True)]
    assert min(found) == pytest.approx(1.021, abs=0.001)
    assert max(found) == pytest.approx(1.078, abs=0.001)


@pytest.mark.parametrize("record", BESIDE_FLASH_ATTN_4)
def test_forward_is_faster_than_flash_attn_4_in_every_shape(
    records: dict[str, AttentionRun | Run], record: str
) -> None:
    assert min(ratios(records[record], "flash_attn_4", "forward")) > 1


def test_the_first_shape_takes_less_than_the_best_public_kernel_of_triton(
    records: dict[str, AttentionRun | Run],
) -> None:
    peers = records[NEWEST]
    assert isinstance(peers, AttentionRun)
    (first,) = (
        cell
        for cell in peers.cells
        if cell.spec.implementation == "flash_triton" and (cell.spec.queries, cell.spec.dim) == (16384, 64)
    )
    assert median(first.samples("both")) == pytest.approx(3.207e-3, rel=0.001)


def test_first_calls_with_an_empty_cache_take_some_seconds(records: dict[str, AttentionRun | Run]) -> None:
    for record, longest_s in (("f23afa05cbf7", 5.39), ("65cff02a1f04", 7.40), ("0c7b03e7b9b4", 10.19)):
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
