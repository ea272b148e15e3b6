"""The table that `auto` chooses by, from benchmarks of attention.

    steplab attention --grid choice --pass both --no-errors --repeats 10 --store STORE --name choice
    python -m benchmarks.attention_choice STORE TABLE [RECORD ...]          (from the root of the checkout)

TABLE is src/steplab/ops/attention/attention_choice.toml, which is changed in place: what the records (without any, the
newest) have of a GPU, type, head dimension and causality takes the place of what it had, unless the record was cut off
before it had as many lengths. Every time is a median. What
keeps the scores is left out, as fast as it may be: who asks for `auto` does not expect memory by the square.
"""

import json
import math
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

from steplab.records.attention import AttentionRun
from steplab.store.database import Store

HEAD = """# Measured times of attention implementations, from which `auto` chooses (choice.py). Written by
# benchmarks/attention_choice.py; a GPU that is not here gets `sdpa`, and so does a larger head dimension.
#
# One [[measured]] a GPU, type, head dimension and causality. A row: tokens of a sequence, then milliseconds of forward
# and backward together, in the order of the implementations; inf: not run.
"""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
KEEPING_SCORES = {"plain", "sdpa_math"}
Entry = Mapping[str, object]


def entries(run: AttentionRun) -> list[Entry]:
    """A benchmark's times as entries of the table."""
    assert run.environment is not None
    environment = run.environment
    times: dict[tuple[str, int, bool], dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for cell in run.cells:
        spec, samples = cell.spec, cell.samples("both")
        square = spec.queries == spec.keys and spec.heads == spec.kv_heads
        wanted = spec.compile == "off" and spec.dtype in DTYPES and spec.implementation not in KEEPING_SCORES
        if samples and square and wanted:
            key = DTYPES[spec.dtype], spec.dim, spec.causal
            times[key][spec.queries][spec.implementation] = 1e3 * median(samples)
    source = f"steplab attention of {run.created_utc[:10]}, torch {environment.torch}, Triton {environment.triton}"
    found: list[Entry] = []
    for (dtype, head_dim, causal), rows in times.items():
        names = list(dict.fromkeys(name for row in rows.values() for name in row))
        ordered = [[tokens, *(row.get(name, math.inf) for name in names)] for tokens, row in sorted(rows.items())]
        found.append(
            {
                "gpu": environment.device.name,
                "dtype": dtype,
                "head_dim": head_dim,
                "causal": causal,
                "source": source,
                "implementations": names,
                "rows": ordered,
            }
        )
    return found


def of_what(entry: Entry) -> tuple[object, ...]:
    return entry["gpu"], entry["dtype"], entry["head_dim"], entry["causal"]


def lengths(entry: Entry) -> set[object]:
    rows = entry["rows"]
    assert isinstance(rows, list)
    return {row[0] for row in rows}


def text(table: Iterable[Entry]) -> str:
    """The table in TOML."""
    blocks = [HEAD]
    for entry in table:
        rows = entry["rows"]
        assert isinstance(rows, list)
        lines = ["[[measured]]", *(f"{name} = {plain(value)}" for name, value in entry.items() if name != "rows")]
        lines += ["rows = [", *(f"  [{', '.join(map(number, row))}]," for row in rows), "]", ""]
        blocks.append("\n".join(lines))
    return "\n".join(blocks)


def plain(value: object) -> str:
    """JSON's texts, numbers and truth values are TOML's too."""
    return json.dumps(value, ensure_ascii=False)


def number(value: float) -> str:
    """Tokens as they are, milliseconds to four digits, inf as TOML spells it."""
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def records(store_path: str, ids: list[str]) -> list[AttentionRun]:
    """Those that are named, oldest first; else the newest."""
    with Store.open(Path(store_path), write=False) as store:
        named = ids or [str(row["id"]) for row in list(store.rows(kind="attention"))[:1]]
        runs = [run for run in map(store.get, named) if isinstance(run, AttentionRun) and run.environment]
    return sorted(runs, key=lambda run: run.created_utc)


def main() -> None:
    store, path, *ids = sys.argv[1:]
    table = {of_what(entry): entry for entry in tomllib.loads(Path(path).read_text(encoding="utf-8"))["measured"]}
    runs = records(store, ids)
    if not runs:
        sys.exit(f"no benchmark of attention in {store}")
    for run in runs:
        for entry in entries(run):
            before = table.get(of_what(entry))
            if before is None or lengths(before) <= lengths(entry):
                table[of_what(entry)] = entry
    Path(path).write_text(text(table.values()), encoding="utf-8")


if __name__ == "__main__":
    main()
