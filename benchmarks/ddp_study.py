"""The data-parallel study on GPUs: xl, context 512, batch 4 a GPU, bf16, eager and with each block compiled.

    python -m benchmarks.ddp_study STORE --gpus N [--transport collectives,...] [PIECE ...]   (from the checkout's root)

A piece is a call of `steplab ddp`, and a record in STORE; without any, all are run. Each takes some three minutes on
four H200s: the step without communication, bucketed at several sizes and the sharded optimizer over NCCL and by peer
copies, torch's DDP at several sizes, FSDP2 and, eager, the simpler strategies in a piece of their own; `updates` has
AdamW in one kernel, after the gradients and overlapped with their arrival. A short table of
all that STORE holds is printed last, and pages of them lie beside STORE.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from steplab.records.ddp import DdpRun
from steplab.report.ddp.rows import ddp_rows
from steplab.store.database import Store
from steplab.units import format_time

STEP = ["--model", "xl", "--context", "512", "--batch", "4", "--precision", "bf16", "--warmup", "3", "--steps", "10"]
PIECES = {
    "updates": [
        *["--compile", "block", "--optimizer", "adamw_triton", "--update", "after,overlapped", "--variants"],
        "bucketed:200,torch_ddp:400,bucketed:400,bucketed:100,sharded:100",
    ],
    "compiled": [
        *["--compile", "block", "--variants"],
        "bucketed:100,bucketed:200,bucketed:400,sharded:100,torch_ddp:25,torch_ddp:400,torch_ddp:1000,fsdp2",
    ],
    "eager": ["--variants", "bucketed:100,bucketed:400,sharded:100,torch_ddp:25,torch_ddp:400,fsdp2"],
    "strategies": ["--variants", "bucketed:10,bucketed:1000,overlap,flat,naive,torch_ddp:100"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=", ".join(PIECES))
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--transport", default="collectives,peer_copy", help="a list, as of steplab ddp")
    options = parser.parse_intermixed_args()  # pieces may follow the options
    if unknown := set(options.pieces) - set(PIECES):
        parser.error(f"no piece {min(unknown)}; there are {', '.join(PIECES)}")
    for piece in options.pieces or PIECES:
        print(piece, flush=True)
        command = [sys.executable, "-m", "steplab", "ddp", "--gpus", str(options.gpus), *STEP, *PIECES[piece]]
        command += ["--transport", options.transport, "--profiled-steps", "1"]
        command += ["--name", f"{piece}, {options.gpus} GPUs", "--store", str(options.store), "--format", "md"]
        command += ["--output", str(options.store.with_name(f"ddp_{piece}_{options.gpus}.md"))]
        subprocess.run(command, check=False)  # a study in which a contender fails is a result as well
    with Store.open(options.store, write=False) as store:
        runs = [run for run in store.iterate(kind="ddp") if isinstance(run, DdpRun)]
    for run in runs:
        page = options.store.with_name(f"ddp_{run.id}.html")
        command = [sys.executable, "-m", "steplab", "report", run.id, "--store", str(options.store)]
        subprocess.run([*command, "--title", run.name, "--output", str(page)], check=False)
    print("\n| study | contender | step | exposed | of torch DDP's best | alone | exposed in trace |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for run in runs:
        for row in ddp_rows(run):
            print(f"| {run.name} | {row['contender']} | {' | '.join(_figures(row))} |")


def _figures(row: dict[str, str | int | float | None]) -> list[str]:
    if row["status"] != "ok":
        return [str(row["status"]), "", "", "", ""]
    ratio = row["of_best_ddp"]
    times = [row[key] for key in ("step_s", "exposed_s", "alone_s", "traced_exposed_s")]
    step, exposed, alone, traced = (format_time(time) if isinstance(time, float) else "" for time in times)
    return [step, exposed, f"{ratio:.2f}" if isinstance(ratio, float) else "", alone, traced]


if __name__ == "__main__":
    main()
