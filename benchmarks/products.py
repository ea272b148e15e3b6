"""The matrix products of a training step, each by itself on a GPU: rates by shape, and their sum over a step by what
torch may be told.

    python -m benchmarks.products --output products.json       # 25 s on a GPU
    python -m benchmarks.products --read benchmarks/results/products_h200_202611.json \\
        --into benchmarks/results/fast_h200_202611.md          # the sums

Of each linear layer, with projections separate and merged, there are three products: forward, the input's gradient and
the weight's. Each is timed by each choice in turns, on as many copies of its operands as the L2 cache cannot hold, and
the median over turns is kept. Choices are cuBLAS (torch's own), cuBLASLt, weights stored as [in, out], sums of split
products in fp32, and both gradients at once on two streams, which takes their place in the sum.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.page_tables import table_of_texts, write_between_marks
from torch import Tensor

from steplab.report.kit.markup import markdown_table
from steplab.specs.model import MODEL_SIZES, TransformerShape

MODELS, TOKENS = ("large", "xl", "2.7b"), (2048, 8192)
CHOICES = ("cublas", "cublaslt", "weights [in, out]", "sums in fp32", "two streams")
KINDS = ("forward", "gradient of the input", "gradient of the weight")
BOTH = "both gradients"
WAYS = ("separate", "merged")
L2_BYTES, MOST_COPIES = 150e6, 16
"""What an H200's cache of 50 MB cannot hold, and copies at most."""
TURNS, CALLS_S, RATE = 7, 1.5e-3, 6e14
"""Turns of each choice, and the seconds of a turn at about the rate that is expected."""

Row = dict[str, Any]


def layers(shape: TransformerShape) -> Iterator[tuple[str, int, int, dict[str, int]]]:
    """Name, inputs, outputs, and how many a step has with separate and with merged projections."""
    width, inner, blocks = shape.d_model, shape.d_ff, shape.num_layers
    yield "query, key, value or output", width, width, {"separate": 4 * blocks, "merged": blocks}
    yield "query, key and value", width, 3 * width, {"merged": blocks}
    yield "gate or up", width, inner, {"separate": 2 * blocks}
    yield "gate and up", width, 2 * inner, {"merged": blocks}
    yield "down", inner, width, {"separate": blocks, "merged": blocks}
    yield "head", width, shape.vocab_size, {"separate": 1, "merged": 1}


class Products:
    """The three products of a linear layer, on copies of their operands in turn."""

    def __init__(self, tokens: int, inputs: int, outputs: int) -> None:
        bytes_of_one = 2 * (tokens * inputs + inputs * outputs + tokens * outputs)
        self.copies = max(1, min(MOST_COPIES, int(-(-L2_BYTES // bytes_of_one))))
        self.x, self.weight, self.turned, self.gradient = (
            [torch.randn(*size, device="cuda", dtype=torch.bfloat16) for _ in range(self.copies)]
            for size in ((tokens, inputs), (outputs, inputs), (inputs, outputs), (tokens, outputs))
        )
        self.beside = torch.cuda.Stream()

    def run(self, kind: str, choice: str, call: int) -> Tensor:
        """One product; its operands are those of the call's number."""
        x, gradient = self.x[call % self.copies], self.gradient[call % self.copies]
        if choice == "weights [in, out]":
            weight = self.turned[call % self.copies]
            return x @ weight if kind == KINDS[0] else gradient @ weight.t() if kind == KINDS[1] else x.t() @ gradient
        weight = self.weight[call % self.copies]
        return x @ weight.t() if kind == KINDS[0] else gradient @ weight if kind == KINDS[1] else gradient.t() @ x

    def run_both(self, choice: str, call: int) -> None:
        """Both gradients: the weight's after the input's, or beside it."""
        here = torch.cuda.current_stream()
        if choice != "two streams":
            self.run(KINDS[1], choice, call)
            self.run(KINDS[2], choice, call)
            return
        self.beside.wait_stream(here)
        with torch.cuda.stream(self.beside):
            self.run(KINDS[2], choice, call)
        self.run(KINDS[1], choice, call)
        here.wait_stream(self.beside)


def seconds(run: Callable[[int], object], calls: int) -> float:
    """Seconds of a call, of several without a pause between them."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(600_000)  # 0.3 ms, in which Python gets ahead of the device
    begin.record()
    for call in range(calls):
        run(call)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def choose(choice: str) -> None:
    """Tell torch; any other choice than these two is its own library and its own sums."""
    torch.backends.cuda.preferred_blas_library("cublaslt" if choice == "cublaslt" else "cublas")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = choice != "sums in fp32"


def measure() -> Iterator[Row]:
    """One row for each product and choice."""
    for tokens, model in ((tokens, model) for tokens in TOKENS for model in MODELS):
        for name, inputs, outputs, counts in layers(MODEL_SIZES[model]):
            products, flops = Products(tokens, inputs, outputs), 2 * tokens * inputs * outputs
            calls = max(2, min(24, int(CALLS_S * RATE / flops)))
            cells = [(kind, choice) for choice in CHOICES[:-1] for kind in KINDS]
            cells += [(BOTH, choice) for choice in (CHOICES[0], CHOICES[-1])]
            found: dict[tuple[str, str], list[float]] = defaultdict(list)
            for turn in range(TURNS + 1):
                for kind, choice in cells:
                    choose(choice)
                    one = (lambda call: products.run_both(choice, call)) if kind == BOTH else (  # noqa: B023
                        lambda call: products.run(kind, choice, call))  # noqa: B023  # fmt: skip
                    seconds(one, 1)
                    if turn:  # the first warms up
                        found[kind, choice].append(seconds(one, calls))
            of = {
                "model": model,
                "tokens": tokens,
                "layer": name,
                "inputs": inputs,
                "outputs": outputs,
                "counts": counts,
            }
            for (kind, choice), turns in found.items():
                yield of | {"kind": kind, "choice": choice, "s": statistics.median(turns), "least_s": min(turns)}


def step_ms(rows: list[Row], choice: str, way: str) -> float:
    """The products of a step."""
    by_kind = {KINDS[0]: "cublas", BOTH: choice} if choice == "two streams" else dict.fromkeys(KINDS, choice)
    return 1e3 * sum(row["s"] * row["counts"].get(way, 0) for row in rows if by_kind.get(row["kind"]) == row["choice"])


def sums(rows: list[Row]) -> str:
    """The products of a step, by choice."""
    groups: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["model"], row["tokens"]].append(row)
    lines = [
        (model, f"{tokens:,}", way, *(f"{step_ms(of, choice, way):.2f}" for choice in CHOICES))
        for (model, tokens), of in groups.items()
        for way in WAYS
    ]
    caption = "Milliseconds: the products of a training step, each by itself, by what torch is told."
    headers = ("model", "tokens", "projections", *CHOICES)
    numeric = [header not in ("model", "projections") for header in headers]
    return markdown_table(table_of_texts("sums", headers, lines, numeric=numeric, caption=caption))


def rates(rows: list[Row]) -> str:
    """What each product reaches by torch's own choice."""
    found: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row["choice"] == "cublas" and row["kind"] in KINDS:
            key = row["model"], f"{row['tokens']:,}", row["layer"], f"{row['inputs']} x {row['outputs']}"
            found[key][row["kind"]] = 2 * row["tokens"] * row["inputs"] * row["outputs"] / row["s"] / 1e12
    lines = [(*key, *(f"{of[kind]:.0f}" for kind in KINDS)) for key, of in found.items()]
    headers = ("model", "tokens", "layer", "inputs x outputs", *KINDS)
    numeric = [False, True, False, False, True, True, True]
    return markdown_table(table_of_texts("rates", headers, lines, numeric=numeric, caption="TFLOP/s."))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--read", type=Path)
    parser.add_argument("--into", type=Path, help="a page for the sums")
    options = parser.parse_args()
    rows = json.loads(options.read.read_text())["rows"] if options.read else list(measure())
    if options.output:
        about = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        options.output.write_text(json.dumps({"about": about, "rows": rows}))
    if options.into:
        write_between_marks(options.into, "products.py", sums(rows))
    else:
        print(f"{sums(rows)}\n\n{rates(rows)}")


if __name__ == "__main__":
    main()
