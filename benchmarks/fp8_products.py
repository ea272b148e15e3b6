"""Linear layers in fp8 on a GPU: their products alone, the layer with its casts, and the casts alone.

    python -m benchmarks.fp8_products fp8.json       # 90 seconds on an H200

All of a layer alternates, on random data, in CUDA graphs of 30 ms; printed are medians over turns, with the clock and
the power in that time. A cell that fails prints why, the others go on.

Not timed any more, since it did not pay on an H200 (TFLOP/s, torch 2.11): scales of 1x128 blocks, 1,050 forward and 780
in the weight gradient, where one scale a tensor gives 1,250 to 1,330; scales of rows, as fast as one a tensor with fast
accumulation and 5 to 10 % slower without; gradients in e4m3, as fast as in e5m2; other tiles of the casts, within 2 %.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from steplab.ops.fp8.casts import E5M2, amax, cast, cast_both
from steplab.ops.fp8.linear import fp8_linear, product

LAYERS = (8192, 2560, 10240), (8192, 10240, 2560), (32768, 4096, 11008)
"""Tokens, inputs, outputs."""
TURNS, PIECE_S = 11, 0.03
BF16 = torch.bfloat16
Cells = dict[str, Callable[[], object]]
Row = dict[str, Any]


def made(*sizes: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*sizes, device="cuda", dtype=BF16) * scale


def cells_of(tokens: int, inputs: int, outputs: int) -> Iterator[tuple[str, Callable[[], Callable[[], object]]]]:
    """Name of each cell, and what makes its call."""
    x, weight, dy = made(tokens, inputs), made(outputs, inputs, scale=0.02), made(tokens, outputs, scale=1e-4)
    x_amax, w_amax, dy_amax = amax(x), amax(weight), amax(dy)
    (x8, x8_T), (w8, w8_T) = cast_both(x, x_amax), cast_both(weight, w_amax)
    yield "bf16 y", lambda: lambda: linear(x, weight)
    yield "bf16 dx", lambda: lambda: dy @ weight
    yield "bf16 dw", lambda: lambda: dy.t() @ x
    dy8, dy8_T = cast_both(dy, dy_amax, E5M2)
    for name, a, b in (("y", x8, w8), ("dx", dy8, w8_T), ("dw", dy8_T, x8_T)):
        for fast in (True, False):
            call = partial(product, a, b, BF16, fast=fast)
            yield f"fp8 {'fast' if fast else 'exact'} {name}", lambda call=call: call  # type: ignore[misc]

    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()

    def layer(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(*leaves), leaves, dy)

    def torchao() -> Callable[[], object]:
        from torchao.float8 import convert_to_float8_training  # type: ignore[import-not-found]

        one = torch.nn.Sequential(torch.nn.Linear(inputs, outputs, bias=False, device="cuda", dtype=BF16))
        converted: Callable[[Tensor], Tensor] = torch.compile(convert_to_float8_training(one), dynamic=False)
        return lambda: torch.autograd.grad(converted(leaves[0]), (leaves[0], *one.parameters()), dy)

    yield "layer bf16", lambda: layer(linear)
    yield "layer fp8_linear", lambda: layer(fp8_linear)
    yield "layer fp8_linear, dw bf16", lambda: layer(lambda x, w: fp8_linear(x, w, weight_gradient="bf16"))
    yield "layer torchao", torchao
    yield "cast copy", lambda: dy.clone
    yield "cast amax", lambda: lambda: amax(dy)
    yield "cast rows", lambda: lambda: cast(dy, dy_amax, E5M2)
    yield "cast both", lambda: lambda: cast_both(dy, dy_amax, E5M2)


def gauges() -> Callable[[], tuple[int, float] | None]:
    """Reads MHz and watts, or nothing where NVML is not there."""
    with suppress(Exception):
        torch.cuda.clock_rate(), torch.cuda.power_draw()
        return lambda: (torch.cuda.clock_rate(), torch.cuda.power_draw() / 1e3)
    return lambda: None


class Graphed:
    """So many calls as one CUDA graph, or by Python if they cannot be recorded."""

    def __init__(self, call: Callable[[], object], pool: Any) -> None:
        for _ in range(2):
            self.ms, self.python_ms = timed(call)
        self.calls = max(2, min(100, int(1e3 * PIECE_S / self.ms)))
        self.run: Callable[[], object] = lambda: [call() for _ in range(self.calls)]
        self.graphed = False
        with suppress(RuntimeError):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self.run()
            self.run, self.graphed = graph.replay, True
        torch.cuda.synchronize()


def timed(call: Callable[[], object], read: Callable[[], object] = lambda: None) -> tuple[float, float]:
    """Milliseconds until the GPU is done, and until Python is."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    begin.record()
    start = time.perf_counter()
    call()
    python_ms = 1e3 * (time.perf_counter() - start)
    end.record()
    read()
    end.synchronize()
    return begin.elapsed_time(end), python_ms


def turns_of(cells: Cells, read: Callable[[], tuple[int, float] | None]) -> dict[str, Row]:
    """Milliseconds of a call by turn, what Python takes of one, clock and power, by cell."""
    pool = torch.cuda.graph_pool_handle()
    graphs = {name: Graphed(call, pool) for name, call in cells.items()}
    found: dict[str, Row] = {name: {"ms": [], "gauges": []} for name in graphs}
    for turn in range(TURNS + 1):
        for name, each in graphs.items():
            found[name] |= {"python_ms": each.python_ms, "graphed": each.graphed}
            gauged: list[Any] = []
            ms, _ = timed(each.run, lambda gauged=gauged: gauged.append(read()))  # type: ignore[misc]
            if turn:  # the first warms up
                found[name]["ms"].append(ms / each.calls)
                found[name]["gauges"] += gauged
    return found


def rate(name: str, ms: float, tokens: int, inputs: int, outputs: int) -> str:
    if name.startswith("cast"):
        num_bytes = {"copy": 4, "amax": 2, "rows": 3, "both": 4}[name.split()[1]]
        return f"{num_bytes * tokens * outputs / ms / 1e9:.2f} TB/s"
    products = 3 if name.startswith("layer") else 1
    return f"{2 * products * tokens * inputs * outputs / ms / 1e9:.0f} TFLOP/s"


def built(cells: Iterator[tuple[str, Callable[[], Callable[[], object]]]]) -> Cells:
    """Those cells whose call works, each of them called once."""
    found: Cells = {}
    for name, make in cells:
        try:
            call = make()
            call()
            torch.cuda.synchronize()
            found[name] = call
        except Exception as error:  # the other cells are worth having
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return found


def shown(name: str, row: Row, amount: str = "") -> str:
    """A line of the table: ms, amount, ms of Python without a graph, MHz, W."""
    gauged = [state for state in row["gauges"] if state]
    beside = " ".join(f"{median(column):.0f}" for column in zip(*gauged, strict=True))
    python = f"{row['python_ms']:6.3f}" if row["graphed"] else "in it"
    return f"  {name:32}{median(row['ms']):8.3f} {amount:>12} {python:>6} {beside}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    print(f"{about}\nms, rate, ms of Python without a graph, MHz, W")
    found: dict[str, dict[str, Row]] = {}
    for layer in LAYERS:
        print(layer, flush=True)
        rows = found["x".join(map(str, layer))] = turns_of(built(cells_of(*layer)), gauges())
        print("\n".join(shown(name, row, rate(name, median(row["ms"]), *layer)) for name, row in rows.items()))
        options.output.write_text(json.dumps(about | {"layers": found}))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
