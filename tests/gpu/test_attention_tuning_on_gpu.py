"""What only a GPU can show of tuning: that its kernels pass the check, fit or say so, and take a time."""

from dataclasses import replace

import pytest
import torch

from steplab.measurement.attention.trial import CheckTask, TimeTask, check, time_candidates
from steplab.ops.attention.triton_tuning import hopper_kernels_run
from steplab.specs.attention import AttentionSpec
from steplab.specs.attention_tuning import KERNELS, TunedDtype, TunedKernel, TuningStudy, candidates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("dtype", "dim"), [("bf16", 64), ("fp32", 64), ("fp32", 256)])
def test_a_candidate_passes_the_check_and_takes_a_time(kernel: TunedKernel, dtype: TunedDtype, dim: int) -> None:
    hopper = torch.cuda.get_device_capability() == (9, 0) and hopper_kernels_run()
    bits = TuningStudy(dtype=dtype).bits
    # The Hopper backward kernel has one size and no candidates: its place is taken by the portable one.
    candidate = next(c for c in candidates(dim, bits=bits, hopper=hopper, portable=True) if c.kernel == kernel)
    shape = AttentionSpec(batch=4, heads=4, queries=720, dim=dim, causal=True, dtype=dtype)
    assert check(CheckTask(device="cuda:0", candidate=candidate, shape=shape)) == ""
    (samples,) = time_candidates(TimeTask(device="cuda:0", candidates=(candidate,), shape=shape))
    assert len(samples) >= 5
    assert 1e-6 < min(samples) < (1e-2 if dtype == "bf16" else 1e-1)


def test_tiles_that_do_not_fit_are_named_and_the_next_goes_on() -> None:
    shape = AttentionSpec(batch=4, heads=4, queries=720, dim=256, causal=True)
    first = next(c for c in candidates(256, hopper=False, portable=False) if c.kernel == "forward")
    large = CheckTask(device="cuda:0", candidate=replace(first, queries=128, keys=128, stages=4), shape=shape)
    assert "out of resource" in check(large)
    assert check(CheckTask(device="cuda:0", candidate=first, shape=shape)) == ""
