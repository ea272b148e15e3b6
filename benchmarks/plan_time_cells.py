"""Steps that predictions of time are checked against and never fitted to: a size, contexts and precisions of their own.

    python -m benchmarks.plan_time_cells STORE [SECONDS]          (from the root of the checkout)

The size has heads of 128 and a vocabulary of 32,000; the contexts are 384, 768 and 1536; tf32, fp16 and weights in bf16
are in no other record whose device never waits. Eager cells take about 10 s each on one GPU, compiled ones up to a
minute. With several GPUs the cells are shared out. It stops by itself after SECONDS (default: 240); run again, it
continues with what is missing.
"""

import sys

from benchmarks.workers import run_all

SIZE = {"d-model": 2048, "d-ff": 5632, "num-layers": 16, "num-heads": 16, "vocab-size": 32000}
"""A size between large and 2.7b, with wider heads."""
CELLS = (
    {"precision": "bf16_pure", "context": 768},
    {"precision": "tf32", "context": 768},
    {"precision": "bf16", "context": 768, "compile": "default", "attention": "sdpa"},
    {"precision": "bf16_pure", "context": 1536, "attention": "sdpa_flash"},
    {"precision": "fp16", "context": 768},
    {"precision": "bf16_pure", "context": 768, "compile": "default"},
    {"precision": "bf16", "context": 1536, "attention": "sdpa_cudnn"},
    {"precision": "tf32", "context": 384, "compile": "default"},
    {"precision": "bf16", "context": 1536, "checkpointing": "full", "attention": "sdpa_flash"},
    {"precision": "bf16", "context": 768, "compile": "block", "attention": "sdpa_cudnn"},
    {"precision": "bf16", "context": 384, "accumulation": 4},
    {"precision": "bf16", "context": 1536, "compile": "default", "attention": "flash_triton"},
)
"""The most telling first."""


def command(cell: dict[str, object], store: str) -> list[str]:
    """A sweep of one cell, which a second run of this script leaves out."""
    fields = {"model": "medium", **{f"model.{name}": size for name, size in SIZE.items()}, "batch": 8, **cell}
    options = [text for name, value in fields.items() for text in (f"--{name}", str(value))]
    named = ["--name", "plan-time", "--steps", "10", "--warmup", "3", "--store", store, "--resume"]
    return [sys.executable, "-m", "steplab", "sweep", *options, *named]


def main(store: str, seconds: str = "240") -> None:
    run_all([command(cell, store) for cell in CELLS], store, float(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
