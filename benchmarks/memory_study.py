"""The memory of a step: sizes, contexts, passes and precisions, eager and compiled, and checkpointing on xl.

    python benchmarks/memory_study.py STORE [SECONDS]     (from the root of the checkout)

One worker a GPU, each cell alone on its GPU; run it again and it measures all anew.
"""

import itertools
import subprocess
import sys

from workers import run_all

STEPLAB = [sys.executable, "-m", "steplab"]
SIZES = [
    ("2.7b", "512"),
    ("2.7b", "256"),
    ("2.7b", "128"),
    ("2.7b", "1024"),
    *((m, "512") for m in ("xl", "large", "small")),
]
CHECKPOINTING = ("full", "every_2", "every_4", "selective")


def cells() -> list[list[str]]:
    """Fields of each cell: eager first, then checkpointing, then what has to be compiled, the longest first."""
    eager = itertools.product(SIZES, ("bf16", "fp32"), ("train", "forward"))
    compiled = itertools.product(SIZES, ("train", "forward"))
    return [
        *(fields(model, context, precision, pass_name) for (model, context), precision, pass_name in eager),
        *([*fields("xl", "512", "bf16", "train"), "--checkpointing", how] for how in CHECKPOINTING),
        [*fields("xl", "512", "fp32", "train"), "--checkpointing", "full"],
        *([*fields(model, context, "bf16", name), "--compile", "default"] for (model, context), name in compiled),
    ]


def fields(model: str, context: str, precision: str, pass_name: str) -> list[str]:
    return ["--model", model, "--context", context, "--precision", precision, "--pass", pass_name]


def main(store: str, seconds: str = "3600") -> None:
    often = ["--warmup", "2", "--steps", "3", "--name", "memory", "--store", store, "--timeout", "5min"]
    run_all([[*STEPLAB, "memory", *cell, *often] for cell in cells()], store, float(seconds))
    subprocess.run([*STEPLAB, "list", "--limit", "80", "--store", store], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
