"""The layouts of N GPUs side by side: step time, tokens a second, peak memory. A few minutes.

python benchmarks/layout_study.py 4 [--store layouts.db] [STEP OPTIONS ...]     (from the root of the checkout)

Each is measured by `steplab run`, in processes of its own, and stored; a table comes last. Step options that are given
replace the defaults: --model 2.7b --context 2048 --batch 4 --precision bf16 --compile default --attention sdpa.
"""

import json
import subprocess
import sys
from typing import Any

LAYOUTS = {
    2: ["dp=2", "fsdp=2", "fsdp=2 --reshard-after-forward never", "tp=2", "pp=2", "fsdp=2 --checkpointing full"],
    4: ["dp=4", "fsdp=4", "dp=2,fsdp=2", "tp=4", "tp=2,fsdp=2", "pp=4", "pp=2,fsdp=2", "pp=2,tp=2"],
}
DEFAULTS = [
    *("--model", "2.7b", "--context", "2048", "--batch", "4", "--precision", "bf16"),
    *("--compile", "default", "--attention", "sdpa"),
]


def measured(num_gpus: int, layout: str, options: list[str]) -> dict[str, Any]:
    """The record's row, or what was said instead."""
    command = [sys.executable, "-m", "steplab", "run", *options, "--gpus", str(num_gpus), "--layout", *layout.split()]
    finished = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=False)
    if not finished.stdout.strip():
        said = finished.stderr.strip().splitlines() or ["nothing was said"]
        return {"failure": said[-1]}
    row: dict[str, Any] = json.loads(finished.stdout)[0]
    return row


def main() -> None:
    num_gpus, given = int(sys.argv[1]), sys.argv[2:]
    options = list(DEFAULTS)
    for name, value in zip(given[::2], given[1::2], strict=True):
        if name in options:
            options[options.index(name) + 1] = value
        else:
            options += [name, value]
    rows = []
    for layout in LAYOUTS[num_gpus]:
        print(f"{layout} ...", file=sys.stderr, flush=True)
        rows.append((layout, measured(num_gpus, layout, options)))
    print(" ".join(options))
    print(f"{'layout':42} {'step ms':>9} {'tokens/s':>9} {'MFU %':>6} {'GiB, rank 0':>11}")
    for layout, row in rows:
        print(f"{layout:42} {shown(row)}")


def shown(row: dict[str, Any]) -> str:
    """Figures of a row, or its failure."""
    if row["failure"] is not None:
        return str(row["failure"])
    mfu, peak = row["mfu"], row["peak_allocated_bytes"]
    figures = [f"{row['step_time_s'] * 1e3:9.1f}", f"{row['tokens_per_s']:9.0f}"]
    figures += [f"{mfu * 100:6.1f}" if mfu else f"{'–':>6}", f"{peak / 2**30:11.1f}" if peak else f"{'–':>11}"]
    return " ".join(figures)


if __name__ == "__main__":
    main()
