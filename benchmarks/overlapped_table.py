"""The table of updates in the backward pass, from the samples of overlapped_update_h200_202611.json.

    python -m benchmarks.overlapped_table [--into benchmarks/results/overlapped_update_h200_202611.md]

With --into, it replaces what stands between the marks in a page. At the end is the share of an update that the backward
pass hides, the median of the models, which `plan time` uses (`hidden_update` in src/steplab/costs/rates.toml).
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.page_tables import table_of_texts, write_between_marks

from steplab.report.kit.markup import markdown_table

SAMPLES = Path(__file__).parent / "results" / "overlapped_update_h200_202611.json"
Row = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path)
    options = parser.parse_args()
    rows: list[Row] = json.loads(SAMPLES.read_text(encoding="utf-8"))["rows"]
    text = f"{table(rows)}\n\n{hidden(rows)}"
    if options.into:
        write_between_marks(options.into, "overlapped_table.py", text)
    else:
        print(text)


def table(rows: Sequence[Row]) -> str:
    """Each way of launching the update, over the updates afterwards of the same process."""
    found = []
    for row in rows:
        after_s = median(step for other in _after(rows, row) for step in other["steps_ms"])
        step, phases = median(row["steps_ms"]), row["median_ms"]
        found.append(
            (
                *(row["model"], str(row["context"]), row["update"], words(row), f"{step:.2f}", f"{step / after_s:.3f}"),
                *(f"{phases[name]:.2f}" if name in phases else "–" for name in ("forward", "backward", "optimizer")),
            )
        )
    headers = ("model", "context", "update", "programs", "step", "over after", "forward", "backward", "update alone")
    caption = "Milliseconds, medians; over after: the step over that of all updates afterwards in the same process."
    numeric = [header not in headers[:4] for header in headers]
    return markdown_table(table_of_texts("steps", headers, found, numeric=numeric, caption=caption))


def words(row: Row) -> str:
    """How the programs of an update are launched."""
    said = [f"of {row['elements_a_program']}"]
    limit = row["shared_bytes_reserved"]
    if limit:
        said.append(f"at most {228 * 1024 // (limit + 1024)} a multiprocessor")
    if row["programs_a_launch"]:
        said.append(f"{row['programs_a_launch']} a launch")
    if (row["blocks_a_part"] or 1) > 1:
        said.append(f"{row['blocks_a_part']} blocks at a time")
    if row["same_priority"]:
        said.append("priority of the step")
    return ", ".join(said)


def hidden(rows: Sequence[Row]) -> str:
    """The share of the update that is hidden where nothing limits its programs, of each model and context."""
    shares: dict[str, float] = {}
    for row in rows:
        plain = not row["shared_bytes_reserved"] and not row["programs_a_launch"] and row["blocks_a_part"] == 1
        if row["update"] == "overlapped" and plain and not row["same_priority"]:
            after = _after(rows, row)
            after_ms = median(step for other in after for step in other["steps_ms"])
            update_ms = median(other["median_ms"]["optimizer"] for other in after)
            key = f"{row['model']} at {row['context']}"
            if row["elements_a_program"] == 512 or key not in shares:
                shares[key] = (after_ms - median(row["steps_ms"])) / update_ms
    told = ", ".join(f"{key} {share:.3f}" for key, share in shares.items())
    what = "Share of the update that is hidden, by programs of 512 (2.7b at 512: of 1024)"
    return f"{what}: {told}; median {median(shares.values()):.5g}."


def _after(rows: Sequence[Row], row: Row) -> list[Row]:
    """The updates afterwards by programs without a limit, of the same model and process."""
    key = ("model", "context", "session")
    return [
        other
        for other in rows
        if other["update"] == "after" and not other["shared_bytes_reserved"] and all(other[k] == row[k] for k in key)
    ]


if __name__ == "__main__":
    main()
