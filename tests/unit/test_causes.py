import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steplab.measurement.machine import load, nvml
from steplab.measurement.machine.failures import failure_of
from steplab.measurement.processes.started import crash
from steplab.records.failure import FailureKind

ADVICE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call.\nCompile with TORCH_USE_CUDA_DSA"
)
WATCHDOG = (
    "[rank1]:[E1122 10:00:00.0 ProcessGroupNCCL.cpp:683] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800030 milliseconds"
)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (torch.AcceleratorError(f"CUDA error: unspecified launch failure{ADVICE}"), "crashed", "dmesg | grep Xid"),
        (RuntimeError(f"CUDA error: GPU is lost{ADVICE}"), "crashed", "the GPU no longer answers"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "crashed", "memory has an uncorrectable"),
        (
            RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
            "crashed",
            "another process holds the GPU",
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "error", "CUDA_LAUNCH_BLOCKING=1"),
        (RuntimeError(f"x\n{WATCHDOG}"), "timeout", "a collective of NCCL did not end"),
        (
            RuntimeError("[unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"),
            "timeout",
            "a collective of gloo did not end",
        ),
        (ValueError("shapes differ"), "error", "ValueError: shapes differ"),
    ],
)
def test_an_error_of_the_machine_is_told_from_one_of_the_step(error: Exception, kind: FailureKind, said: str) -> None:
    failure = failure_of(error, "measure")
    assert failure.kind == kind
    assert said in failure.message
    assert type(error).__name__ in failure.message
    assert "\n" not in failure.message


def test_a_rank_that_nccl_ended_is_a_timeout_with_its_cause() -> None:
    failure = crash(-6, "measure", ("loading", WATCHDOG, "terminate called"))
    assert failure.kind == "timeout"
    assert failure.message.startswith("a collective of NCCL did not end")
    assert failure.message.endswith("(the process was ended by SIGABRT during measure)")
    assert crash(-6, "measure", ("terminate called",)).kind == "crashed"


# --- a machine that is suspended --------------------------------------------------------------------------


def test_time_in_suspension_is_the_difference_of_two_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {"running": 100.0, "all": 100.0}
    monkeypatch.setattr(time, "CLOCK_BOOTTIME", "all", raising=False)
    monkeypatch.setattr(time, "CLOCK_MONOTONIC", "running")
    monkeypatch.setattr(time, "clock_gettime", clocks.__getitem__)
    watch = load.Suspension()
    clocks.update(running=101.0, all=131.0)
    assert watch.seconds() == pytest.approx(30.0)
    monkeypatch.delattr(time, "CLOCK_BOOTTIME")
    monkeypatch.delattr(time, "CLOCK_UPTIME_RAW", raising=False)
    assert load.Suspension().seconds() is None


def test_this_machine_was_not_suspended_just_now() -> None:
    watch = load.Suspension()
    assert watch.seconds() in (None, pytest.approx(0.0, abs=0.01))


# --- an NVML that answers nonsense ------------------------------------------------------------------------


class Fault(Exception):
    pass


def fake_nvml(**answers: Any) -> SimpleNamespace:
    def answering(value: Any) -> Callable[..., Any]:
        def answer(*arguments: object) -> Any:
            if isinstance(value, Exception):
                raise value
            return value

        return answer

    usual: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetHandleByUUID": 1,
        "nvmlSystemGetDriverVersion": "580.1",
        "nvmlDeviceGetClockInfo": 1980,
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetTemperature": 40,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0,
        "nvmlDeviceGetComputeRunningProcesses": [],
    }
    made = {name: answering(value) for name, value in (usual | answers).items()}
    return SimpleNamespace(NVMLError=Fault, NVML_CLOCK_SM=0, NVML_CLOCK_MEM=1, NVML_TEMPERATURE_GPU=0, **made)


@pytest.mark.parametrize("clock_mhz", [-5, 0, 0xFFFFFFFF, 10**30, float("nan"), None, "fast"])
def test_a_clock_that_cannot_be_is_not_recorded(monkeypatch: pytest.MonkeyPatch, clock_mhz: object) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", fake_nvml(nvmlDeviceGetClockInfo=clock_mhz))
    reading = nvml.read("GPU-1")
    assert isinstance(reading, nvml.Reading)
    assert (reading.sm_clock_hz, reading.memory_clock_hz) == (None, None)
    assert (reading.power_limit_w, reading.temperature_c) == (700.0, 40.0)


@pytest.mark.parametrize(
    "answers",
    [
        {"nvmlDeviceGetHandleByUUID": Fault("GPU is lost")},
        {"nvmlInit": OSError("libnvidia-ml.so.1: cannot open")},
        {"nvmlSystemGetDriverVersion": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")},
        {"nvmlDeviceGetHandleByUUID": Fault("GPU is lost"), "nvmlShutdown": Fault("uninitialized")},
    ],
)
def test_an_nvml_that_fails_in_mid_run_says_why_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, Exception]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", fake_nvml(**answers))
    found = nvml.read("GPU-1")
    assert isinstance(found, str)
    assert "\n" not in found


def test_reasons_and_processes_that_make_no_sense_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    nonsense: Sequence[object] = [None, "many", Fault("GPU is lost"), -1.5]
    for value in nonsense:
        answers = {"nvmlDeviceGetCurrentClocksThrottleReasons": value, "nvmlDeviceGetComputeRunningProcesses": value}
        monkeypatch.setitem(__import__("sys").modules, "pynvml", fake_nvml(**answers))
        reading = nvml.read("GPU-1")
        assert isinstance(reading, nvml.Reading)
        assert (reading.clock_limits, reading.other_processes) == (None, None)


def test_a_meter_has_the_energy_between_two_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    millijoules, held_ns = iter((5_000, 1_405_000)), iter((0, 500_000_000))
    answers: dict[str, Any] = {
        "nvmlDeviceGetTotalEnergyConsumption": lambda handle: next(millijoules),
        "nvmlDeviceGetViolationStatus": lambda handle, policy: SimpleNamespace(violationTime=next(held_ns)),
    }
    monkeypatch.setitem(__import__("sys").modules, "pynvml", with_counters(answers))
    monkeypatch.setattr(nvml, "perf_counter", iter((10.0, 12.0)).__next__)
    meter = nvml.Meter("GPU-1")
    meter.start()
    energy = meter.stop(20)
    assert energy is not None
    assert (energy.joules, energy.per_step_j, energy.mean_power_w) == (1400.0, 70.0, 700.0)
    assert energy.limited_share == 0.25


@pytest.mark.parametrize(
    ("answers", "lasted_s"),
    [
        ({}, 2.0),  # nothing is reported
        ({"nvmlDeviceGetTotalEnergyConsumption": lambda handle: 5_000}, 2.0),  # a counter that stands still
        ({"nvmlDeviceGetTotalEnergyConsumption": lambda handle, mj=[630_000, 0]: mj.pop()}, 0.9),  # too short
        ({"nvmlInit": OSError("libnvidia-ml.so.1: cannot open")}, 2.0),
    ],
)
def test_energy_that_is_not_counted_is_absent(
    answers: dict[str, Any], lasted_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", with_counters(answers))
    monkeypatch.setattr(nvml, "perf_counter", iter((10.0, 10.0 + lasted_s)).__next__)
    meter = nvml.Meter("GPU-1")
    meter.start()
    assert meter.stop(20) is None


def with_counters(answers: dict[str, Any]) -> SimpleNamespace:
    made = fake_nvml(**{name: answer for name, answer in answers.items() if not callable(answer)})
    counters = {name: answer for name, answer in answers.items() if callable(answer)}
    return SimpleNamespace(**vars(made) | counters, NVML_PERF_POLICY_POWER=0)
