import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
from benchmarks import eight_b_study
from tests.distributed.ranks import on_ranks

from steplab.ops.fp8.linear import fp8_linear
from steplab.ops.rms_norm import plain_add_rms_norm
from steplab.ops.rotary_heads import plain_rotary_heads
from steplab.ops.swiglu import plain_swiglu

SMALL = {"LAYERS": 2, "WIDTH": 64, "FF": 96, "HEADS": 2, "VOCABULARY": 100, "CONTEXT": 32}
OF_A_CPU = {
    "rotary_heads": plain_rotary_heads,
    "add_rms_norm": plain_add_rms_norm,
    "swiglu": plain_swiglu,
    "fp8_heads": lambda x, weight, *rest: plain_rotary_heads(fp8_linear(x, weight), *rest),
    "add_rms_norm_amax": lambda *given: (*plain_add_rms_norm(*given), None),
    "fp8_swiglu": lambda x, first, second, x_amax: fp8_linear(plain_swiglu(fp8_linear(x, first)), second),
}


def test_two_ranks_learn_their_sequences() -> None:
    on_ranks(2, case_losses_fall_from_those_of_guessing_and_are_the_peers)


def case_losses_fall_from_those_of_guessing_and_are_the_peers() -> None:
    losses = losses_of("ours", LOSS="chunked")
    assert losses[0] == pytest.approx(4.605, abs=0.2)  # ln 100
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    in_fp8 = losses_of("fp8", LOSS="chunked")
    assert in_fp8 == pytest.approx(losses, abs=0.005)
    assert in_fp8 != losses
    assert losses_of("peer") == pytest.approx(losses, abs=1 / 32)  # its loss is bf16, which 4 to 8 has in 1/32


def losses_of(what: str, **names: Any) -> list[float]:
    example = eight_b_study.load(what)
    vars(example).update(SMALL, **OF_A_CPU, ATTENTION="sdpa", WARM_UP=0, STEPS=4, **names)
    torch.compiler.set_stance("force_eager")  # compiling would take most of the test
    try:
        with patch.dict(os.environ, TRITON_INTERPRET="0"):  # its casts take minutes
            seconds, losses = eight_b_study.measured(example, torch.device("cpu"))
    finally:
        torch.compiler.set_stance("default")
    assert (len(seconds), len(losses)) == (4, 5)
    return losses
