import dataclasses
import gc
import itertools
import time
from statistics import median

import pytest
import torch

from steplab.errors import Unsupported
from steplab.measurement import compat
from steplab.measurement.clock import Phase, run_back_to_back
from steplab.measurement.machine.device import open_device
from steplab.measurement.observer import Observer
from steplab.measurement.step.step import ModelStep
from steplab.measurement.step_job import measure_here
from steplab.model.build import build_workload
from steplab.ops.attention.api import attention
from steplab.records.run import Run
from steplab.records.timing import find_phase
from steplab.specs.hardware import find_hardware
from steplab.specs.resolve import resolve_step


def measured(**fields: object) -> Run:
    gc.collect()  # what an earlier test in this process made would count towards the peak
    given = {"model": "tiny", "context": 128, "warmup": 3, "steps": 5} | fields
    return measure_here(resolve_step(given), Observer())


def test_event_times_tile_the_loop_that_the_host_clock_measured() -> None:
    run = measured(model="small", context=512)
    assert run.timing is not None
    assert run.timing.back_to_back_host_s is not None
    step = run.timing.phase("step")
    assert step is not None
    assert step.device_s is not None
    assert step.host_s is None
    # The host's clock holds the same steps, plus one synchronisation and the way to it.
    assert sum(step.device_s) == pytest.approx(run.timing.back_to_back_host_s, rel=0.02)


def test_the_host_is_ahead_by_what_it_has_given_the_device() -> None:
    """A spinning kernel, launched at once, and a host that sleeps before a short one."""
    device = open_device("cuda")
    sleep_s = 0.02
    spin = Phase(name="spin", run=lambda: torch.cuda._sleep(100_000_000))  # clocks: some 50 ms

    def late() -> None:
        torch.cuda.synchronize()
        time.sleep(sleep_s)
        torch.cuda._sleep(1000)

    spin.run()  # its first time it is loaded
    (spinning, *_), _ = run_back_to_back([spin], device, 3, lambda step: None)
    assert spinning.lead_s is not None
    assert spinning.device_s is not None
    # The first lead is one kernel's length; each further one adds a kernel.
    totals = list(itertools.accumulate(spinning.device_s))
    assert spinning.lead_s == pytest.approx(totals, rel=0.1)
    (waiting, *_), _ = run_back_to_back([Phase(name="late", run=late)], device, 3, lambda step: None)
    assert waiting.lead_s is not None
    assert max(waiting.lead_s) < sleep_s / 10


def test_a_device_is_held_for_as_long_as_was_said_and_the_host_goes_on() -> None:
    device = open_device("cuda")
    device.hold(1e-3)  # times the spinning once
    for seconds in (0.005, 0.05):
        device.synchronize()
        started = time.perf_counter()
        start = device.mark()
        device.hold(seconds)
        end = device.mark()
        assert time.perf_counter() - started < 0.005
        device.synchronize()
        assert device.seconds_between(start, end) == pytest.approx(seconds, rel=0.2)  # clocks change


def test_a_phase_alone_takes_no_longer_on_the_device_than_on_the_host() -> None:
    run = measured(model="small", context=512)
    assert run.timing is not None
    for phase in run.timing.synchronised:
        assert phase.device_s is not None
        assert phase.host_s is not None
        assert median(phase.device_s) <= median(phase.host_s)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "bf16_master", "bf16_pure"])
@pytest.mark.parametrize("pass_name", ["forward", "forward_backward", "train"])
def test_every_precision_runs_every_pass(precision: str, pass_name: str) -> None:
    optimizer = "adamw_triton" if precision == "bf16_master" else "adamw_fused"
    run = measured(precision=precision, optimizer=optimizer, **{"pass": pass_name})
    assert run.failure is None
    assert run.memory is not None
    peak = run.memory.peak("step")
    assert peak is not None
    assert 0 < peak.peak_allocated_bytes <= peak.peak_reserved_bytes


@pytest.mark.parametrize("loss", ["plain", "fused"])
@pytest.mark.parametrize("compile", ["off", "block", "reduce-overhead"])
def test_weights_with_masters_train_as_autocast_does(compile: str, loss: str) -> None:
    """Eager to the bit. A compiler may skip one rounding, a relative 2^-8, in either step."""
    device = torch.device("cuda")
    losses: dict[str, list[float]] = {"bf16": [], "bf16_master": []}
    for precision, found in losses.items():
        spec = resolve_step(
            {"model": "tiny", "compile": compile, "loss": loss, "precision": precision, "optimizer": "adamw_triton"}
        )
        step = ModelStep(build_workload(spec, device), spec, device)
        for _ in range(5):  # graphs are recorded in the second
            step.forward()
            assert step.loss is not None
            found.append(float(step.loss.detach()))
            step.backward()
            step.optimizer_step()
    expected, found = losses.values()
    assert found[-1] < found[0]
    assert found == (expected if compile == "off" else pytest.approx(expected, rel=2**-8))


@pytest.mark.parametrize("compile", ["off", "block", "default", "reduce-overhead"])
def test_micro_steps_accumulate_in_every_way_of_compiling(compile: str) -> None:
    spec = resolve_step(
        {"model": "tiny", "pass": "forward_backward", "compile": compile, "accumulation": 3, "batch": 2}
    )
    device = torch.device("cuda")
    step = ModelStep(build_workload(spec, device), spec, device)
    step.batches = [step.batches[0]] * 3
    found: list[list[torch.Tensor]] = []

    def see() -> None:
        found.append([p.grad.clone() for p in step.module.parameters() if p.grad is not None])

    step.on_gradients = see
    for _ in range(4):  # graphs are recorded in the second
        step.run()
    once = dataclasses.replace(spec, accumulation=1, compile="off")
    alone = ModelStep(build_workload(once, device), once, device)
    alone.batches = step.batches
    alone.on_gradients = lambda: found.append([p.grad.clone() for p in alone.module.parameters() if p.grad is not None])
    alone.run()
    *of_steps, expected = found
    for gradients in of_steps:  # three times a third of the same
        for gradient, one in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, one, rtol=1e-4, atol=1e-5 * float(one.abs().max()))


def test_a_pass_holds_no_more_than_its_parts_explain() -> None:
    """fp32 training: weights, gradients and two moments are at least four times the parameters at the step's peak."""
    gc.collect()
    before_bytes = torch.cuda.memory_allocated()  # what other tests of this process keep, as CUDA graphs do
    run = measured(model="small", context=16, batch=1)
    assert run.model is not None
    assert run.memory is not None
    peak = run.memory.peak("step")
    assert peak is not None
    parameters_bytes = 4 * run.model.num_parameters
    assert 4 * parameters_bytes <= peak.peak_allocated_bytes - before_bytes <= 4.5 * parameters_bytes


def test_out_of_memory_is_a_record_with_the_exact_request() -> None:
    compat.watch_refused_allocations()
    run = measured(**{"model.vocab_size": 2**30})
    assert run.failure is not None
    assert run.failure.kind == "out_of_memory"
    assert run.failure.requested_bytes == 2**30 * 128 * 4  # whole units of 2 MiB, in which the driver is asked
    assert run.failure.phase == "build"


SHAPES = [(2, 4, 128, 64), (1, 2, 77, 64), (1, 1, 1, 64)]
ATTENTIONS = ["sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math", "sdpa"]
CASES = [
    (name, shape)
    for name, shape in itertools.product(ATTENTIONS, SHAPES)
    if (name, shape) != ("sdpa_cudnn", (1, 1, 1, 64))  # cuDNN has no kernel for a single position
]


@pytest.mark.parametrize(("implementation", "shape"), CASES)
def test_attention_errs_at_most_twice_as_much_as_plain(implementation: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    exact = attention(q.double(), k.double(), v.double(), causal=True)

    def error(name: str) -> float:
        return float((attention(q, k, v, causal=True, implementation=name).double() - exact).norm())

    assert error(implementation) <= 2 * error("plain")


def test_an_attention_without_a_kernel_says_what_to_choose() -> None:
    with pytest.raises(Unsupported, match="takes bf16 and fp16 alone, not fp32; use --attention sdpa"):
        measured(attention="sdpa_flash", precision="fp32")


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile_time_is_its_own_number(mode: str) -> None:
    run = measured(compile=mode, precision="bf16", attention="sdpa")
    assert run.failure is None
    assert run.timing is not None
    assert run.timing.first_step_s is not None
    warmup = find_phase(run.timing.warmup, "step")
    assert warmup is not None
    assert max(warmup.best_s) < run.timing.first_step_s


def test_the_environment_knows_this_gpu() -> None:
    device = open_device("auto").torch_device
    run = measured()
    assert run.environment is not None
    info = run.environment.device
    assert info.name == torch.cuda.get_device_name(device)
    assert info.uuid == str(torch.cuda.get_device_properties(device).uuid)
    assert info.sm_clock_hz or run.environment.gaps
    if "H200" in info.name:
        assert find_hardware(info.name) is not None
