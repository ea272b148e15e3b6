import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.attention_records import make_benchmark
from tests.cli.program import Program, complaint, digests, finish, tiny
from tests.first import first

import steplab
from steplab.errors import Unsupported, UserError
from steplab.lab.attention import attention_study
from steplab.lab.machine import doctor
from steplab.records.codec import decode, encode

WITH_DEVICE = {
    "run": ("run",),
    "sweep": ("sweep",),
    "profile": ("profile",),
    "memory": ("memory",),
    "precision": ("precision",),
    "precision's sums": ("precision", "--only", "accumulation"),
    "attention": ("attention",),
    "attention --derive": ("attention", "--derive"),
    "doctor": ("doctor",),
    "plan memory": ("plan", "memory"),
    "comm": ("comm", "--processes", "2"),
    "run --processes": ("run", "--processes", "2"),
}
UNKNOWN = ("cuda:one", "", "cpu:0", "zzz", "gpu", "meta", "cuda:")


@pytest.mark.parametrize("device", first(2, UNKNOWN))
@pytest.mark.parametrize("command", WITH_DEVICE)
def test_an_unknown_device_is_refused_at_once(steplab: Program, command: str, device: str) -> None:
    said = complaint(steplab.here(*WITH_DEVICE[command], "--device", device), 2)
    known = "cuda, cpu" if command == "comm" else "auto, cpu, mps, cuda or cuda:N"
    says_so = f"device '{device}' is not known; choose one of {known}" in said
    assert says_so or (device == "" and "device must be a name, not ''" in said), said
    assert not steplab.store.exists()


def test_a_device_of_a_collective_is_not_passed_over(steplab: Program) -> None:
    said = complaint(steplab.here("comm", "--processes", "2", "--device", "cpu,gpu"), 2)
    assert said == "steplab: device 'gpu' is not known; choose one of cuda, cpu"


@pytest.mark.parametrize("command", [("ddp", "--processes", "2"), ("explain", "--try")])
def test_commands_whose_device_is_given_otherwise_take_none(steplab: Program, command: tuple[str, ...]) -> None:
    assert "--device" in complaint(steplab.here(*command, "--device", "gpu"), 2)


@pytest.mark.parametrize(
    "command",
    [("run", *tiny(device="cuda:99")), ("attention", "--device", "cuda:99"), ("doctor", "--device", "cuda:99")],
)
def test_a_device_that_is_not_there_is_refused_with_those_that_are(filled: Program, command: tuple[str, ...]) -> None:
    before = digests(filled.store.parent)
    said = complaint(filled(*command), 2)
    assert "device cuda:99 is not supported: " in said
    assert "this machine has " in said
    assert "; use --device " in said
    assert digests(filled.store.parent) == before


def _recorded(device: str, store: Path) -> None:
    with steplab.recorder("loop", device=device, store=store):
        pytest.fail("the loop began")


CALLS: dict[str, Callable[[str, Path], object]] = {
    "recorder": _recorded,
    "measure": lambda device, store: steplab.measure("tiny", device=device, store=store),
    "profile": lambda device, store: steplab.profile("tiny", device=device, store=store),
    "memory": lambda device, store: steplab.memory("tiny", device=device, store=store),
    "doctor": lambda device, store: doctor(device=device, store=store),
    "attention": lambda device, store: attention_study({"grid": "tiny", "device": device}),
}


@pytest.mark.parametrize("device", first(2, [device for device in UNKNOWN if device != "cpu:0"]))
@pytest.mark.parametrize("call", CALLS)
def test_python_refuses_an_unknown_device_before_anything_begins(tmp_path: Path, call: str, device: str) -> None:
    refusal = f"device '{device}' is not known" if device else "device ('' is not known|must be a name, not '')"
    with pytest.raises(UserError, match=refusal):
        CALLS[call](device, tmp_path / "store.db")
    assert list(tmp_path.iterdir()) == []


def test_the_recorder_refuses_a_device_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"device cuda:99 is not supported: .*this machine has .*cpu"):
        _recorded("cuda:99", tmp_path / "store.db")


MEASURED_AGAIN = """
from steplab.lab.attention import measure_attention
from steplab.records.codec import decode
measure_attention(decode(open("old.json").read()).study)
"""


def test_a_benchmark_of_an_unknown_device_is_read_but_not_measured(steplab: Program) -> None:
    before = encode(make_benchmark()).replace(b'"device":"auto"', b'"device":"gpu"', 1)
    old: Any = decode(before)
    assert old.study.device == "gpu"
    steplab.write("old.json", before.decode())
    ended = finish(steplab.start("-c", MEASURED_AGAIN, module="python"))
    assert ended.code == 1
    refusal = r"steplab\.errors\.\w+: .*device 'gpu' is not known.*; this machine has .*cpu"
    assert re.search(refusal, ended.stderr), ended.stderr
