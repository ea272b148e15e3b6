"""examples/eight_b.py, at a size for two processes on a CPU."""

import contextlib
import io
import math
import re
import runpy
from pathlib import Path

import pytest
import torch
from tests.distributed.ranks import on_ranks

EXAMPLE = Path(__file__).parents[2] / "examples/eight_b.py"


def test_two_ranks_learn_their_sequences() -> None:
    on_ranks(2, case_losses_fall_from_those_of_guessing)


def case_losses_fall_from_those_of_guessing() -> None:
    example = runpy.run_path(str(EXAMPLE))
    names = example["main"].__globals__
    names |= {"LAYERS": 2, "WIDTH": 64, "FF": 96, "HEADS": 2, "VOCABULARY": 100, "CONTEXT": 32}
    names |= {"ATTENTION": "sdpa", "LOSS": "chunked", "WARM_UP": 0, "STEPS": 4}
    printed = io.StringIO()
    torch.compiler.set_stance("force_eager")  # compiling would take most of the test
    try:
        with contextlib.redirect_stdout(printed):
            seconds = example["main"](torch.device("cpu"))
    finally:
        torch.compiler.set_stance("default")
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed.getvalue())]
    assert (len(seconds), len(losses)) == (4, 5)
    assert losses[0] == pytest.approx(math.log(100), abs=0.2)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
