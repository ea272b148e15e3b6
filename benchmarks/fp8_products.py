"""Linear layers in fp8 on a GPU: their products alone, the layer with its casts, and the casts alone.

    python -m benchmarks.fp8_products fp8.json [--tune]       # 3 minutes on an H200

All of a layer takes turns, on random data, in CUDA graphs of 30 ms; given is the median over turns, and beside it the
clock and the power in that time. --tune: tiles of the casts instead. A part that fails prints why, the rest goes on.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from steplab.ops.fp8 import casts
from steplab.ops.fp8.casts import E4M3, E5M2, Operand, amax, cast, cast_both
from steplab.ops.fp8.linear import fp8_linear, product
from steplab.ops.fp8.reference import plain_amax, plain_cast, plain_cast_both

LAYERS = (
    (8192, 2560, 10240), (8192, 2560, 7680), (8192, 10240, 2560), (32768, 4096, 12288), (32768, 4096, 11008)
)  # fmt: skip
"""Tokens, inputs, outputs."""
TURNS, PIECE_S, BLOCK = 11, 0.03, 128
BF16 = torch.bfloat16
Cells = dict[str, Callable[[], object]]
Row = dict[str, Any]
TILES = [(64, 64, 4), (64, 64, 8), (128, 64, 4), (64, 128, 4), (64, 128, 8), (128, 128, 8), (128, 128, 4), (32, 128, 4),
         (128, 64, 8), (32, 64, 4), (32, 256, 4), (256, 64, 8)]  # fmt: skip


def made(*sizes: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*sizes, device="cuda", dtype=BF16) * scale


class CompiledCasts(torch.autograd.Function):
    """What torchao does for one scale a tensor, by operators of torch that torch.compile fuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        x8, w8 = (Operand(*plain_cast(each, plain_amax(each), E4M3)) for each in (x, weight))
        return product(x8, w8, x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rows, columns, inverse = plain_cast_both(dy, plain_amax(dy), E5M2)
        x8, w8 = (Operand(*plain_cast_both(each, plain_amax(each), E4M3)[1:]) for each in (x, weight))
        return product(Operand(rows, inverse), w8, dy.dtype), product(Operand(columns, inverse), x8, dy.dtype)


def compiled_casts(x: Tensor, weight: Tensor) -> Tensor:
    y: Tensor = CompiledCasts.apply(x, weight)  # type: ignore[no-untyped-call]
    return y


def blocks_of(a: Operand, b: Operand, b_by_squares: bool) -> Callable[[], Tensor]:
    """A product with a scale for each 1 x 128 of a, and of b or each 128 x 128 of b; the scales are random."""
    from torch.nn.functional import ScalingType, scaled_mm

    (num_rows, width), num_columns = a.values.shape, b.values.shape[0]
    scales_a, scales_b = (torch.rand(width // BLOCK, size, device="cuda").t() for size in (num_rows, num_columns))
    kind = ScalingType.BlockWise1x128
    if b_by_squares:
        kind = ScalingType.BlockWise128x128
        scales_b = torch.rand(num_columns // BLOCK, -(-width // BLOCK // 4) * 4, device="cuda").t()
    return lambda: scaled_mm(
        a.values, b.values.t(), scales_a, ScalingType.BlockWise1x128, scales_b, kind, output_dtype=BF16
    )


def rows_of(a: Operand, b: Operand, fast: bool) -> Callable[[], Tensor]:
    """A product with a scale for each row of a and of b."""
    scales_a, scales_b = (torch.rand(each.values.shape[0], 1, device="cuda") for each in (a, b))
    return lambda: product(Operand(a.values, scales_a), Operand(b.values, scales_b.t()), BF16, fast=fast)


def cells_of(tokens: int, inputs: int, outputs: int) -> Iterator[tuple[str, Callable[[], Callable[[], object]]]]:
    """Name of each cell, and what makes its call."""
    x, weight, dy = made(tokens, inputs), made(outputs, inputs, scale=0.02), made(tokens, outputs, scale=1e-4)
    x_amax, w_amax, dy_amax = amax(x), amax(weight), amax(dy)
    (x8, x8_T), (w8, w8_T) = cast_both(x, x_amax), cast_both(weight, w_amax)
    wide = {"y": lambda: linear(x, weight), "dx": lambda: dy @ weight, "dw": lambda: dy.t() @ x}
    for name, call in wide.items():
        yield f"bf16 {name}", lambda call=call: call  # type: ignore[misc]
    for gradients in (E5M2, E4M3):
        dy8, dy8_T = cast_both(dy, dy_amax, gradients)
        for name, a, b in (("y", x8, w8), ("dx", dy8, w8_T), ("dw", dy8_T, x8_T)):
            for fast in (True, False):
                sums = "fast" if fast else "exact"
                if gradients == E5M2:
                    yield f"tensor {sums} {name}", lambda a=a, b=b, f=fast: lambda: product(a, b, BF16, fast=f)  # type: ignore[misc]
                else:
                    yield f"rows {sums} {name}", lambda a=a, b=b, f=fast: rows_of(a, b, f)  # type: ignore[misc]
            if gradients == E4M3:
                yield f"blocks {name}", lambda a=a, b=b, name=name: blocks_of(a, b, name != "dw")  # type: ignore[misc]

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
    yield "layer fp8_linear, dy e4m3", lambda: layer(lambda x, w: fp8_linear(x, w, gradients=E4M3))
    yield "layer fp8_linear, dw bf16", lambda: layer(lambda x, w: fp8_linear(x, w, weight_gradient="bf16"))
    yield "layer compiled casts", lambda: layer(torch.compile(compiled_casts, dynamic=False))
    yield "layer torchao", torchao
    copy = torch.empty_like(dy)
    yield "cast copy", lambda: lambda: copy.copy_(dy)
    yield "cast amax", lambda: lambda: amax(dy)
    yield "cast rows", lambda: lambda: cast(dy, dy_amax, E5M2)
    yield "cast both", lambda: lambda: cast_both(dy, dy_amax, E5M2)


def tiles_of(tokens: int, inputs: int, outputs: int) -> Iterator[tuple[str, Callable[[], Callable[[], object]]]]:
    """The casts of x by other tiles."""
    x = made(tokens, inputs)
    largest, copy = amax(x), torch.empty_like(x)

    def with_(call: Callable[[], object], **constants: int) -> Callable[[], Callable[[], object]]:
        def run() -> object:
            vars(casts).update(constants)
            return call()

        return lambda: run

    yield "cast copy", lambda: lambda: copy.copy_(x)
    for rows, columns, warps in TILES:
        call = with_(lambda: cast_both(x, largest), ROWS=rows, COLUMNS=columns, WARPS=warps)
        yield f"cast both {rows} x {columns}, {warps} warps", call
    for block, programs, warps in (
        (8192, 8, 8),
        (8192, 4, 8),
        (4096, 8, 4),
        (4096, 16, 4),
        (8192, 16, 4),
        (16384, 4, 8),
    ):
        constants = {"AMAX_BLOCK": block, "AMAX_PROGRAMS": 132 * programs, "AMAX_WARPS": warps}
        yield f"cast amax {block}, {programs} an SM, {warps} warps", with_(lambda: amax(x), **constants)
    for block, warps in ((4096, 4), (8192, 8), (8192, 4), (2048, 4)):
        call = with_(lambda: cast(x, largest), CAST_BLOCK=block, CAST_WARPS=warps)
        yield f"cast rows {block}, {warps} warps", call


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
        self.run = lambda: [call() for _ in range(self.calls)]
        self.graphed = False
        with suppress(RuntimeError):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                for _ in range(self.calls):
                    call()
            self.run, self.graphed = graph.replay, True  # type: ignore[assignment]
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
    found: dict[str, Row] = {
        name: {"ms": [], "gauges": [], "python_ms": each.python_ms, "graphed": each.graphed}
        for name, each in graphs.items()
    }
    for turn in range(TURNS + 1):
        for name, each in graphs.items():
            gauged: list[Any] = []
            ms, _ = timed(each.run, lambda gauged=gauged: gauged.append(read()))  # type: ignore[misc]
            if turn:  # the first warms up
                found[name]["ms"].append(ms / each.calls)
                found[name]["gauges"] += gauged
    return found


def rate(name: str, ms: float, tokens: int, inputs: int, outputs: int, tune: bool) -> str:
    if name.startswith("cast"):
        elements = tokens * (inputs if tune else outputs)
        num_bytes = elements * {"copy": 4, "amax": 2, "rows": 3, "both": 4}[name.split()[1]]
        return f"{num_bytes / ms / 1e9:.2f} TB/s"
    products = 3 if name.startswith("layer") else 1
    return f"{2 * products * tokens * inputs * outputs / ms / 1e9:.0f} TFLOP/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seconds", type=float, default=230, help="no layer is begun after this")
    options = parser.parse_args()
    read, started = gauges(), time.monotonic()
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    found: dict[str, dict[str, Row]] = {}
    errors: dict[str, str] = {}
    for layer in LAYERS[::-1]:
        if time.monotonic() - started > options.seconds:
            print(f"{layer}: not begun")
            continue
        cells: Cells = {}
        for name, make in (tiles_of if options.tune else cells_of)(*layer):
            try:
                cells[name] = make()
                cells[name]()
                torch.cuda.synchronize()
            except Exception as error:  # the other cells are worth having
                cells.pop(name, None)
                errors[f"{layer} {name}"] = str(error)[:600]
                print(f"{layer} {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        found["x".join(map(str, layer))] = turns_of(cells, read)
        options.output.write_text(json.dumps(about | {"layers": found, "errors": errors}))
        del cells
        torch.cuda.empty_cache()
    print(f"{about}, {time.monotonic() - started:.0f} s\nms, rate, ms of Python without a graph, MHz, W")
    for layer in LAYERS:
        rows = found.get("x".join(map(str, layer)), {})
        sums = {"bf16", *(name.rpartition(" ")[0] for name in rows if name.split()[-1] in ("y", "dx", "dw"))}
        print(f"{layer}: " + ", ".join(
            f"{kind} {sum(median(rows[f'{kind} {name}']['ms']) for name in ('y', 'dx', 'dw')):.3f}"
            for kind in sorted(sums) if all(f"{kind} {name}" in rows for name in ("y", "dx", "dw"))
        ))  # fmt: skip
        for name, row in rows.items():
            ms = median(row["ms"])
            gauged = [state for state in row["gauges"] if state]
            beside = [f"{median(column):.0f}" for column in zip(*gauged, strict=True)]
            python = f"{row['python_ms']:6.3f}" if row["graphed"] else "in it"
            shown = rate(name, ms, *layer, options.tune)
            print(f"  {name:32}{ms:8.3f} {shown:>12} {python:>6} {' '.join(beside)}")


if __name__ == "__main__":
    main()
