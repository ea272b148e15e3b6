"""The measured ceilings of a device: large matmuls in each data type, and a large copy.

The data are random: a GPU multiplies zeros faster, because its clock depends on the power drawn.
"""

import dataclasses
from collections.abc import Callable, Iterator

import torch

from steplab.measurement.clock import Phase, run_back_to_back
from steplab.measurement.machine.device import Device, has_tf32, open_device
from steplab.measurement.machine.environment import read_clocks, read_environment
from steplab.measurement.machine.load import OtherProcesses
from steplab.measurement.machine.world import World
from steplab.measurement.observer import Observer
from steplab.ops.attention.triton_tuning import hopper_kernels_on
from steplab.records.ceilings import Ceiling, Ceilings
from steplab.records.codec import new_head
from steplab.units import GIB, MIB

_SMALLEST, _LARGEST = 256, 8192
_LONG_ENOUGH_S = 0.02
"""n is doubled until one product takes this long: large enough to fill the device, short enough to repeat."""
_FULL_AFTER_S, _FULL_BELOW = 0.005, 1.25
"""Stop doubling n once a product takes the first, and reaches less than the second times the FLOP/s at n/2: the device
is full.
"""
_COPY_BYTES = {"cuda": 4 * GIB, "mps": GIB, "cpu": 256 * MIB}
_DTYPES = (("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16))
_WARMUP, _REPEATS = 3, 10
_LAYOUTS: tuple[str, ...] = ("NT", "NN", "TN")
"""Operands of a linear layer's products, T if transposed: forward, its input's gradient, its weight's gradient."""
_FAR_BEHIND = 2.0
_CLOSE = 1.1
"""Ratios of a layout's time to the fastest layout's: beyond _FAR_BEHIND it is not tried at the next size, beyond _CLOSE
it is not timed at length.
"""


def measure_ceilings(device_name: str, observer: Observer, world: World | None = None) -> Ceilings:
    """Measure the ceilings, for `doctor`. Raises Unsupported for an absent device."""
    device = open_device(device_name)
    environment = read_environment(device.torch_device)
    others = OtherProcesses()
    if environment.device.kind == "cuda" and environment.triton:
        observer.on_stage("flash_triton", 0)
        hopper_kernels_on(device.torch_device)  # an untested Triton is tried
    ceilings = tuple(_measure(device, observer.on_stage))
    environment = dataclasses.replace(environment, other_cpus=others.mean_cpus())
    return Ceilings(**new_head(), environment=read_clocks(environment, device.torch_device), ceilings=ceilings)


def _measure(device: Device, on_stage: Callable[[str, int], None]) -> Iterator[Ceiling]:
    where = device.torch_device
    torch.manual_seed(0)
    for name, dtype in _DTYPES:
        if name == "tf32" and not has_tf32(where):
            continue
        on_stage(f"{name} matmul", 0)
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        n, seconds = _matmul(device, dtype)
        yield Ceiling(name="matmul", dtype=name, unit="FLOP/s", work=2.0 * n**3, seconds=seconds)
    on_stage("copy", 0)
    numbers = torch.randint(-(2**62), 2**62, (_COPY_BYTES[where.type] // 8,), device=where)
    source = numbers.view(torch.uint8)  # drawn as bytes they take eight times as long
    target = torch.empty_like(source)
    seconds = _repeat(device, lambda: target.copy_(source), _REPEATS)
    yield Ceiling(name="copy", dtype=None, unit="B/s", work=2.0 * source.numel(), seconds=seconds)


def _matmul(device: Device, dtype: torch.dtype) -> tuple[int, tuple[float, ...]]:
    """Size and times of the largest product tried, in the fastest of a linear layer's layouts.

    Slow layouts are not tried further: without bf16 instructions a CPU is twenty times slower in one than in another.
    """
    n, layouts, smaller_s = _SMALLEST, _LAYOUTS, 0.0
    while True:
        tried = {layout: min(_matmul_s(device, n, dtype, layout, repeats=2)) for layout in layouts}
        fastest_s = min(tried.values())
        full = fastest_s >= _FULL_AFTER_S and 8 * smaller_s < _FULL_BELOW * fastest_s
        if n >= _LARGEST or fastest_s >= _LONG_ENOUGH_S or full:
            close = (layout for layout, seconds in tried.items() if seconds <= _CLOSE * fastest_s)
            return n, min((_matmul_s(device, n, dtype, layout, _REPEATS) for layout in close), key=min)
        layouts = tuple(layout for layout, seconds in tried.items() if seconds <= _FAR_BEHIND * fastest_s)
        n, smaller_s = 2 * n, fastest_s


def _matmul_s(device: Device, n: int, dtype: torch.dtype, layout: str, repeats: int) -> tuple[float, ...]:
    a, b = (torch.randn(n, n, device=device.torch_device).to(dtype) for _ in range(2))
    x, y = (a.T if layout[0] == "T" else a), (b.T if layout[1] == "T" else b)
    out = torch.empty_like(a)
    return _repeat(device, lambda: torch.mm(x, y, out=out), repeats)


def _repeat(device: Device, work: Callable[[], object], repeats: int) -> tuple[float, ...]:
    for _ in range(_WARMUP if repeats > _WARMUP else 1):
        work()
    (samples,), _ = run_back_to_back([Phase(name="step", run=work)], device, repeats, lambda repeat: None)
    return samples.best_s
