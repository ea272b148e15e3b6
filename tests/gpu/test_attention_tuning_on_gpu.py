from dataclasses import replace

import pytest
import torch
from benchmarks.tile_trials import CheckTask, TimeTask, check, time_candidates
from benchmarks.tune_attention import KERNELS, Dtype, candidates

from steplab.ops.attention.triton_tuning import Kernel, hopper_kernels_on
from steplab.specs.attention import AttentionSpec


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("dtype", "dim"), [("bf16", 64), ("fp32", 64), ("fp32", 256)])
def test_a_candidate_passes_the_check_and_takes_a_time(kernel: Kernel, dtype: Dtype, dim: int) -> None:
    hopper = hopper_kernels_on(torch.device("cuda", 0))
    bits = 32 if dtype == "fp32" else 16
    # The Hopper backward kernel has one size and no candidates: its place is taken by the portable one.
    offered = candidates("any", dim, bits=bits, hopper=hopper, portable=True)
    candidate = next(tiles for tiles in offered if tiles.kernel == kernel)
    shape = AttentionSpec(batch=4, heads=4, queries=720, dim=dim, causal=True, dtype=dtype)
    assert check(CheckTask(device="cuda:0", tiles=candidate, shape=shape)) == ""
    (samples,) = time_candidates(TimeTask(device="cuda:0", candidates=(candidate,), shape=shape))
    assert len(samples) >= 5
    assert 1e-6 < min(samples) < (1e-2 if dtype == "bf16" else 1e-1)


def test_tiles_that_do_not_fit_are_named_and_the_next_goes_on() -> None:
    shape = AttentionSpec(batch=4, heads=4, queries=720, dim=256, causal=True)
    first = next(c for c in candidates("any", 256, hopper=False, portable=False) if c.kernel == "forward")
    large = CheckTask(device="cuda:0", tiles=replace(first, queries=128, keys=128, stages=4), shape=shape)
    assert "out of resource" in check(large)
    assert check(CheckTask(device="cuda:0", tiles=first, shape=shape)) == ""
