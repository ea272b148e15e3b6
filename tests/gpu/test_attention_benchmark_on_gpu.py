import gc

import pytest

from steplab.measurement.attention.session import measure_attention
from steplab.measurement.jobs import CellsTask
from steplab.measurement.observer import Observer
from steplab.plan.attention_memory import plain_account
from steplab.records.attention import AttentionCell
from steplab.specs.attention import AttentionSpec, AttentionStudy, cells_of
from steplab.specs.resolve import Grid

FAR_TOO_LONG = 2**18
"""Positions whose scores exceed any GPU's memory."""


def measured(*cells: AttentionSpec) -> list[AttentionCell]:
    gc.collect()  # tensors of earlier tests would be freed, and counted, in the middle
    found: dict[int, AttentionCell] = {}
    study = AttentionStudy(name="test", cells=cells, device="cuda", least_repeats=3, most_repeats=5, warmup_s=0.01)
    assert [*study.cells] == [*cells]
    numbers = {cell: index for index, cell in enumerate(study.cells)}
    groups = [[numbers[cell] for cell in group] for group in study.groups()]
    observer = Observer(on_cell=lambda index, cell: found.__setitem__(index, cell))
    measure_attention(CellsTask(study=study, groups=groups), observer)
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_peak_of_plain_attention_is_that_of_its_account(causal: bool, dtype: str) -> None:
    spec = AttentionSpec(batch=2, heads=4, queries=2048, dim=64, causal=causal, dtype=dtype)  # type: ignore[arg-type]
    (cell,) = measured(spec)
    assert cell.failure is None
    assert cell.memory is not None
    own = sum(term.num_bytes for term in plain_account(spec, backward=True)[1][4:])
    assert cell.memory.both_peak_bytes == pytest.approx(own, rel=0.005)
    kept = sum(term.num_bytes for term in plain_account(spec, backward=True)[1] if term.kept)
    output = spec.batch * spec.heads * spec.queries * spec.dim * (4 if dtype == "fp32" else 2)
    assert cell.memory.saved_bytes == pytest.approx(kept + output, rel=0.01)


def test_after_a_cell_that_does_not_fit_the_process_goes_on() -> None:
    implementations = ["plain", "sdpa_flash"]
    grid: Grid = {"sequence": [FAR_TOO_LONG, 1024], "dim": [64], "causal": [True], "implementation": implementations}
    cells = measured(*cells_of([{**grid, "dtype": ["bf16"]}]))
    too_long, fused, short, short_fused = cells
    assert too_long.failure is not None
    assert too_long.failure.kind == "out_of_memory"
    assert too_long.failure.requested_bytes is not None
    assert too_long.failure.requested_bytes >= 2 * FAR_TOO_LONG**2
    assert [cell.failure for cell in (fused, short, short_fused)] == [None] * 3
    assert short.interleaved == ("sdpa_flash",)


def test_errors_on_the_gpu_are_those_of_the_type() -> None:
    grid: Grid = {"sequence": [512], "heads": [4], "dim": [64], "implementation": ["sdpa_flash"], "dtype": ["bf16"]}
    (cell,) = measured(*cells_of([grid]))
    assert cell.checked_heads == 4
    for error in cell.errors:
        assert error.relative is not None
        assert error.plain_relative is not None
        assert 1e-4 < error.relative < 2 * error.plain_relative
