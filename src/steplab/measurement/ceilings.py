"""The ceilings of a device, measured: large matmuls in each data type, and a large copy.

On random data: a GPU multiplies zeros faster than numbers, because its clock depends on the power drawn.
"""

from collections.abc import Callable, Iterator

import torch

from steplab import __version__
from steplab.measurement.device import Device, has_tf32, open_device
from steplab.measurement.environment import read_clocks, read_environment
from steplab.records.ceilings import Ceiling, Ceilings
from steplab.records.codec import new_id, now_utc
from steplab.units import GIB, MIB

_SMALLEST, _LARGEST = 256, 8192
"""Least and greatest n of an n x n x n matmul."""
_LONG_ENOUGH_S = 0.02
"""n is doubled until one product takes this long: large enough to fill the device, short enough to repeat."""
_COPY_BYTES = {"cuda": 4 * GIB, "mps": GIB, "cpu": 256 * MIB}
_DTYPES = (
    ("fp32", torch.float32),
    ("tf32", torch.float32),
    ("bf16", torch.bfloat16),
    ("fp16", torch.float16),
)
_WARMUP, _REPEATS = 3, 10


def measure_ceilings_here(device_name: str, on_stage: Callable[[str, int], None]) -> Ceilings:
    """Measure in this process; raises Unsupported for a device that is not there."""
    device = open_device(device_name)
    environment = read_environment(device.torch_device)
    ceilings = tuple(_measure(device, on_stage))
    return Ceilings(
        id=new_id(),
        created_utc=now_utc(),
        steplab_version=__version__,
        environment=read_clocks(environment, device.torch_device),
        ceilings=ceilings,
    )


def _measure(device: Device, on_stage: Callable[[str, int], None]) -> Iterator[Ceiling]:
    where = device.torch_device
    torch.manual_seed(0)
    for name, dtype in _DTYPES:
        if name == "tf32" and not has_tf32(where):
            continue
        on_stage(f"{name} matmul", 0)
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        n = _SMALLEST
        while n < _LARGEST and min(_matmul_s(device, n, dtype, repeats=2)) < _LONG_ENOUGH_S:
            n *= 2
        seconds = _matmul_s(device, n, dtype, repeats=_REPEATS)
        yield Ceiling(name="matmul", dtype=name, unit="FLOP/s", work=2.0 * n**3, seconds=seconds)
    on_stage("copy", 0)
    source = torch.randint(256, (_COPY_BYTES[where.type],), dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    seconds = _repeat(device, lambda: target.copy_(source), _REPEATS)
    yield Ceiling(name="copy", dtype=None, unit="B/s", work=2.0 * source.numel(), seconds=seconds)


def _matmul_s(device: Device, n: int, dtype: torch.dtype, repeats: int) -> tuple[float, ...]:
    """Times of the fastest of the three layouts in which a linear layer multiplies: forward, and for the gradients
    of its input and of its weight. A CPU without bf16 instructions is twenty times faster in one than in another.
    """
    a, b = (torch.randn(n, n, device=device.torch_device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    layouts = ((a, b.T), (a, b), (a.T, b))
    timed = (_repeat(device, lambda x=x, y=y: torch.mm(x, y, out=out), repeats) for x, y in layouts)  # type: ignore[misc]
    return min(timed, key=min)


def _repeat(device: Device, work: Callable[[], object], repeats: int) -> tuple[float, ...]:
    for _ in range(_WARMUP if repeats > _WARMUP else 1):
        work()
    spans = []
    device.synchronize()
    for _ in range(repeats):
        start = device.mark()
        work()
        spans.append((start, device.mark()))
    device.synchronize()
    return tuple(device.seconds_between(start, end) for start, end in spans)
