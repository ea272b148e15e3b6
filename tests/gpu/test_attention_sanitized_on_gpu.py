import inspect
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from steplab.ops.attention import triton_tuning

pytestmark = pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed")

SCRIPT = Path(__file__).with_name("sanitize_attention.py")
ROOT = SCRIPT.parents[2]
HOPPER_KERNELS = [("triton_hopper_forward", "attention_forward"), ("triton_hopper_backward", "attention_backward")]


@pytest.fixture(params=["portable", "hopper"])
def variant(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    hopper = triton_tuning.hopper_kernels_on(torch.device("cuda", 0))
    if name == "hopper" and not hopper:
        pytest.skip("the Hopper kernels are for compute capability 9.0 and Triton 3.6")
    return name


def watched(tool: str, what: str, *options: str) -> tuple[int, str]:
    compiled(what)
    return ran(what, "compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *options)


@cache
def compiled(what: str) -> None:
    status, said = ran(what)
    assert status == 0, said[-3000:]


def ran(what: str, *before: str) -> tuple[int, str]:
    paths = [str(ROOT), *sys.path]
    ended = subprocess.run(
        [*before, sys.executable, str(SCRIPT), what],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return ended.returncode, ended.stdout


def test_no_access_out_of_bounds(variant: str) -> None:
    status, said = watched("memcheck", variant)
    assert status == 0, said[-3000:]


def test_no_race_in_the_portable_kernels() -> None:
    status, said = watched("racecheck", "portable")
    assert status == 0, said[-3000:]


def test_no_race_in_the_hopper_kernels_but_in_how_triton_hands_over_work() -> None:
    """Triton's compiler writes a warp group's task where that group reads it, at the kernel's head and at
    warp_specialize. racecheck misses these barriers, as an empty kernel shows.
    """
    if not triton_tuning.hopper_kernels_on(torch.device("cuda", 0)):
        pytest.skip("the Hopper kernels are for compute capability 9.0 and Triton 3.6")
    _, of_nothing = watched("racecheck", "handover", "--print-limit", "0")
    assert places_of(of_nothing), "racecheck no longer finds Triton's own hand-over: ask here for no race at all"
    _, said = watched("racecheck", "few", "--print-limit", "0")
    assert "130 queries of 64, 150 keys" in said, f"not all shapes were run: {said[-3000:]}"
    assert {file for file, _ in places_of(said)} == {file for file, _ in HOPPER_KERNELS}, "nothing, not even there"
    assert places_of(said) <= lines_of_handover(), said[-3000:]


def places_of(said: str) -> set[tuple[str, int]]:
    return {(file, int(line)) for file, line in re.findall(r"\w\+0x\w+ in (\w+)\.py:(\d+)", said)}


def lines_of_handover() -> set[tuple[str, int]]:
    import importlib

    lines = set()
    for file, name in HOPPER_KERNELS:
        module = importlib.import_module(f"steplab.ops.attention.{file}")
        source, first = inspect.getsourcelines(getattr(module, name).fn)
        calls = [number for number, line in enumerate(source) if "gl.warp_specialize(" in line]
        # A conditional access is reported at its condition.
        calls += [number - 1 for number in calls if source[number - 1].lstrip().startswith("if ")]
        head = next(number for number, line in enumerate(source) if line.startswith("def "))
        lines |= {(file, first + number) for number in (head, *calls)}
    return lines
