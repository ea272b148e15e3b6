"""The memory of a step: sizes, contexts, passes, precisions, eager and compiled, checkpointing, attention, optimizers.

    python -m benchmarks.memory_study STORE [SECONDS [KEPT [MB]]]     (from the root of the checkout)

One worker a GPU, each cell alone on its GPU, the longest first; after SECONDS what runs is interrupted. Every cell
leaves its record, its snapshot and its marks in STORE.cells; with KEPT, as much of that as fits in MB million bytes is
packed into tar files in that folder, from which memory_again.py digests all of it again. Run it again and it measures
anew.
"""

import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from benchmarks.memory_cells import pack, records
from benchmarks.workers import run_all

from steplab.errors import Unsupported
from steplab.plan.memory import predict_memory
from steplab.records.run import Run
from steplab.specs.model import MODEL_SIZES
from steplab.units import GIB

Fields = dict[str, object]
CELL = (sys.executable, "-m", "benchmarks.memory_cell")
OFTEN: Fields = {"warmup": 2, "steps": 3}
SIZES = [("2.7b", 512), ("2.7b", 256), ("2.7b", 128), ("2.7b", 1024), *((m, 512) for m in ("xl", "large", "small"))]
CHECKPOINTING = ("full", "every_2", "every_4", "selective")
ATTENTION = ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa_math")
OPTIMIZERS = ("adamw_fused", "adamw_foreach", "adamw_loop", "sgd")


def cells() -> list[Fields]:
    """Fields of each cell, the longest first."""
    eager = itertools.product(SIZES, ("bf16", "fp32"), ("train", "forward"))
    compiled = itertools.product(SIZES, ("train", "forward"))
    xl: Fields = {"model": "xl", "context": 512, "precision": "bf16"}
    small: Fields = {"model": "small", "context": 512}
    wide: Fields = {"model": "2.7b", "context": 512, "precision": "bf16"}
    found: list[Fields] = [
        *({"model": m, "context": c, "precision": p, "pass": name} for (m, c), p, name in eager),
        *({"model": m, "context": c, "precision": "bf16", "pass": n, "compile": "default"} for (m, c), n in compiled),
        *(xl | {"checkpointing": how} for how in CHECKPOINTING),
        xl | {"checkpointing": "full", "compile": "default"},
        xl | {"checkpointing": "full", "precision": "fp32"},
        *(wide | {"attention": kernel} for kernel in ATTENTION),
        *(small | {"precision": p, "optimizer": o} for p, o in itertools.product(("fp16", "bf16_pure"), OPTIMIZERS)),
        *(small | {"precision": "fp32", "optimizer": o} for o in OPTIMIZERS[1:]),
    ]
    return sorted(found, key=expected_s, reverse=True)


def expected_s(fields: Fields) -> float:
    """About how long a cell takes on an H200: the start of its processes, its weights, and the seconds a layer that
    compiling it takes, which backward doubles and recomputation adds to."""
    shape = MODEL_SIZES[str(fields["model"])]
    a_layer_s = 0.8 if fields.get("pass") == "forward" else 2.1 if "checkpointing" in fields else 1.7
    compile_s = a_layer_s * shape.num_layers if "compile" in fields else 0.0
    return 9 + shape.d_model / 1000 + compile_s


def named(fields: Fields) -> str:
    """2.7b-512-train-bf16-sdpa_flash: what a cell is called."""
    told = {"model": "", "context": "", "pass": "train", "precision": "fp32"} | fields
    return "-".join(map(str, told.values()))


def table(runs: Iterable[Run]) -> Iterator[str]:
    """A line a cell: its peak, the error of its prediction, and whether all that counted it agree."""
    for run in sorted(runs, key=lambda run: run.name):
        memory = run.memory_profile
        if memory is None or run.spec is None:
            yield f"{run.name:44} {run.failure.message if run.failure else '; '.join(run.notes)}"
            continue
        error = "no formula"
        with suppress(Unsupported):
            error = f"{100 * (predict_memory(run.spec).peak_bytes / memory.peak_bytes - 1):+.3f} %"
        counts = {
            memory.peak_bytes,
            sum(memory.at_peak.values()),
            memory.counted_peak_bytes,
            memory.unwatched_peak_bytes,
        }
        agree = "all agree" if len(counts) == 1 else f"{sorted(map(str, counts))}"
        yield f"{run.name:44} {memory.peak_bytes / GIB:7.2f} GiB  {error:>12}  {agree}"


def main(store: str, seconds: str = "3600", kept: str | None = None, megabytes: str = "56") -> None:
    folder = Path(f"{store}.cells")
    commands = [[*CELL, store, named(fields), json.dumps(OFTEN | fields, separators=(",", ":"))] for fields in cells()]
    run_all(commands, store, float(seconds))
    runs = list(records(folder))
    if kept:
        logs = sorted(Path(store).parent.glob(f"{Path(store).name}.gpu*.log"))
        for line in pack(folder, logs, Path(kept), int(float(megabytes) * 1e6)):
            print(line)
    print("\n".join(table(runs)))
    print(f"{len(runs)} of {len(commands)} cells have a record")


if __name__ == "__main__":
    main(*sys.argv[1:])
