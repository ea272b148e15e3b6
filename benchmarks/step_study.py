"""The table of a training step: every size, context, precision and pass, eager and compiled, beside transformers.

    python -m benchmarks.step_study STORE [SECONDS]          (from the root of the checkout)
    python -m benchmarks.step_study STORE SECONDS peers      (the comparison with transformers alone, on one GPU)

Runs the preset studies (sizes, compiled, warmup) and a cell that cannot fit, as sweeps that share one store: one
worker a GPU, each with that GPU alone to itself; the comparison with transformers has the machine to itself. It stops
by itself after SECONDS (default: an hour); run it again and it continues with what is missing.
"""

import subprocess
import sys

from benchmarks.workers import run_all

EXAMPLES = "examples/hf"
CONTEXTS = (1024, 512, 256, 128)


def sweeps() -> list[list[str]]:
    """The work, longest first, in pieces small enough to share out."""
    pieces = [["compiled", "--model", model, "--context", c] for model in ("xl", "2.7b") for c in ("512", "256")]
    pieces += [["sizes", "--model", "2.7b", "--precision", "fp32", "--context", str(c)] for c in CONTEXTS[:2]]
    pieces += [["sizes", "--model", "xl", "--precision", "fp32", "--context", str(c)] for c in CONTEXTS[:2]]
    pieces += [["compiled", "--model", model] for model in ("large", "medium", "small")]
    pieces += [["sizes", "--model", m, "--precision", "fp32", "--context", "256,128"] for m in ("2.7b", "xl")]
    pieces += [["sizes", "--model", m, "--precision", "fp32"] for m in ("large", "medium", "small")]
    pieces += [["sizes", "--model", m, "--precision", "bf16"] for m in ("2.7b", "xl", "large", "medium", "small")]
    pieces += [["warmup"], ["too-large", "--model", "2.7b", "--context", "8192,128", "--precision", "bf16"]]
    return pieces


def peers() -> list[list[str]]:
    """steplab's model beside transformers', four times each in the order ABBA ABBA, so that a drift of the machine
    favours neither; the seed makes a new cell of the same step."""
    fast = ["--attention", "sdpa", "--compile", "default", "--precision", "bf16", "--context", "512", "--steps", "30"]
    pieces = []
    for size in ("small", "2.7b"):
        ours, theirs = size, f"hf:{EXAMPLES}/llama-{size}.json"
        for seed in range(4):
            pair = f"{ours},{theirs}" if seed % 2 == 0 else f"{theirs},{ours}"
            pieces.append(["peers", "--model", pair, "--seed", str(seed), *fast])
    return pieces


def command(piece: list[str], store: str) -> list[str]:
    """A study by preset name, or, for the names that are no preset, a sweep over the fields alone."""
    study = ["study", piece[0]] if piece[0] in ("sizes", "compiled", "warmup") else ["sweep", "--name", piece[0]]
    return [
        sys.executable,
        "-m",
        "steplab",
        *study,
        *piece[1:],
        "--store",
        store,
        "--resume",
        "--timeout",
        "5min",
    ]


def main(store: str, seconds: str = "3600", what: str = "all") -> None:
    alone = what == "peers"
    pieces = peers() if alone else sweeps()
    run_all([command(piece, store) for piece in pieces], store, float(seconds), num_workers=1 if alone else None)
    subprocess.run(
        [sys.executable, "-m", "steplab", "list", "--kind", "study", "--limit", "100", "--store", store], check=True
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
