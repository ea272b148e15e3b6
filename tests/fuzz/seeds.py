import functools
import json
import lzma
import pickle
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.attention_records import make_benchmark
from tests.comm_records import make_comm
from tests.ddp_records import make_ddp_run
from tests.profiles import cpu_run, imported_run, launch_bound_run
from tests.runs import make_run, out_of_memory, recorder_run
from tests.unit.allocator_model import MIB, CachingAllocator
from tests.unit.memory_records import imported_snapshot, watched_run
from tests.unit.test_nsys import export
from tests.unit.test_report_sections import EXAMPLES

from steplab.records.codec import encode
from steplab.records.record import Record
from steplab.store.database import Store

GOLDEN = Path(__file__).parents[1] / "golden"
FRAMES = ({"filename": "/home/u/train.py", "line": 12, "name": "forward"},)


@functools.cache
def records() -> dict[str, Record]:
    made = {
        "run": make_run(), "out of memory": out_of_memory(), "recorder": recorder_run(), "profile": launch_bound_run(),
        "profile of a CPU": cpu_run(), "trace": imported_run(), "memory": watched_run(),
        "snapshot": imported_snapshot(), "attention": make_benchmark(), "comm": make_comm(), "ddp": make_ddp_run(),
        "numerics": EXAMPLES["numerics"], "ceilings": EXAMPLES["ceilings"],
    }  # fmt: skip
    precision = (GOLDEN / "precision_h200_202611.jsonl.xz").read_bytes()
    return made | {"audit": _decoded(lzma.decompress(precision).splitlines()[0])}


def _decoded(line: bytes) -> Record:
    from steplab.records.codec import decode

    return decode(line)


@functools.cache
def record_texts() -> dict[str, bytes]:
    return {name: encode(record) for name, record in records().items()}


@functools.cache
def trace() -> dict[str, Any]:
    whole = json.loads(lzma.decompress((GOLDEN / "excerpt_ddp_2gpu.json.xz").read_bytes()))
    seen: dict[str, int] = {}
    kept = list[Any]()
    for event in whole["traceEvents"]:
        category = event.get("cat", "")
        seen[category] = seen.get(category, 0) + 1
        if seen[category] <= 40:
            kept.append(event)
    return {**{key: value for key, value in whole.items() if key != "traceEvents"}, "traceEvents": kept}


@functools.cache
def snapshot() -> dict[str, Any]:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(size, frames=FRAMES) for size in (3 * MIB, 700, 40 * MIB, 12 * MIB, 512)]
    for block in blocks[1:4]:
        allocator.free(block)
    for size in (5 * MIB, 9000):
        allocator.malloc(size)
    return allocator.snapshot()


@functools.cache
def pickles() -> Sequence[bytes]:
    recorded = lzma.decompress((GOLDEN / "memory_small_512_bf16_selective.pickle.xz").read_bytes())
    return (*(pickle.dumps(snapshot(), protocol) for protocol in (2, 3, 4, 5)), recorded)


def write_nsys(path: Path) -> Path:
    return export(path)


def write_store(path: Path) -> bytes:
    with Store.open(path, write=True) as opened:
        for name in ("run", "trace", "attention", "comm", "ddp", "numerics", "ceilings"):
            opened.add(records()[name])
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA journal_mode = DELETE")
        raw.execute("VACUUM")
    return path.read_bytes()


CONFIGURATION = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
STUDY = """description = "how far does bf16 carry?"
gpus = 0
include = ["quick"]
[[grid]]
model = ["tiny"]
context = [8, 16]
precision = ["fp32", "bf16"]
"model.num_layers" = 1
[[profile]]
model = "tiny"
[[comm]]
collective = "all_reduce"
device = "cpu"
[[attention]]
batch = 1
"""
