"""The tables of the 8b step on two GPUs, from what eight_b_study.py recorded, its traces and a walk.

The steps are in benchmarks/results/eight_b_h200_202611.json. The walk and the profiles are in its .jsonl.gz; the latter
are the traces, imported by `steplab import-trace TRACE.json.gz --name ours`.
"""

import json
from collections import defaultdict
from statistics import median
from typing import Any

from benchmarks.page_tables import RESULTS, Kind, read, table_of_texts
from benchmarks.tables_fast import MATMUL_FLOPS_PER_S
from examples.eight_b import CONTEXT, FF, LAYERS, VOCABULARY, WIDTH

from steplab.lab.outlook import step_s
from steplab.records.advice import Advice
from steplab.records.run import Run
from steplab.report.kit.document import Table
from steplab.report.kit.markup import markdown_table

COLLECTIVES = "communication"
PARTS = ("matmul", "attention", COLLECTIVES)
"""Categories of kernels with a row of their own."""
NAMES = {"ours": "examples/eight_b.py", "peer": "of torch's own parts"}


def written() -> str:
    """The tables as they stand in the page."""
    tables = walk(*stored(Advice)), steps(recorded()), parts(profiles())
    return "\n\n".join(markdown_table(table) for table in tables)


def recorded() -> list[dict[str, Any]]:
    """The runs of which each step's time is known, in the order of time."""
    runs: list[dict[str, Any]] = json.loads((RESULTS / "eight_b_h200_202611.json").read_text(encoding="utf-8"))
    return [run for run in runs if "step_s" in run]


def profiles() -> dict[str, Run]:
    """The imported traces by name."""
    return {run.name: run for run in stored(Run) if run.profile}


def stored(kind: type[Kind]) -> list[Kind]:
    """The records of a kind."""
    return read(RESULTS / "eight_b_h200_202611.jsonl.gz", kind)


def walk(advice: Advice) -> Table:
    """What each change of a walk was predicted to save, what it saved, and the step and its memory with it."""
    rows, runs = [], {run.id: run for run in stored(Run)}
    for tried in advice.tried:
        ratio, peak = tried.ratio, tried.peak_bytes or 0
        saved = "–", "–"
        if ratio:
            saved = f"{(tried.predicted_share or 0) * ratio.a:.2f}", f"{ratio.a - ratio.b:.2f}"
        rows.append((tried.words, *saved, f"{step_s(runs[tried.run_id or '']) or 0:.2f}", f"{peak / 1e9:.1f}"))
    headers = ("change", "predicted", "saved", "step", "allocated")
    caption = (
        "Seconds; GB (1e9 bytes) of the first rank at the peak. Predicted is the share that the plan says, of the step "
        "as measured. The step as given runs out of memory. "
        f"Record {advice.id} of {advice.created_utc[:10]}."
    )
    return table_of_texts("walk", headers, rows, numeric=[False, *[True] * 4], caption=caption)


def flops() -> dict[str, float]:
    """FLOPs that a GPU needs for a step, a multiply-add being two: products outside of attention, forward and backward,
    of all parameters but the embedding's; of attention two products forward and five backward, under the mask."""
    block = 4 * WIDTH**2 + 3 * WIDTH * FF
    linear = LAYERS * block + VOCABULARY * WIDTH
    return {"matmul": 6.0 * CONTEXT * linear, "attention": 7.0 * WIDTH * CONTEXT**2 * LAYERS}


def steps(runs: list[dict[str, Any]]) -> Table:
    """Seconds and memory of each run."""
    needed = sum(flops().values())
    rows = []
    for run in runs:
        median_s = median(run["step_s"])
        rows.append(
            (
                *(run["created_utc"][:16].replace("T", " "), _named(run["what"]), str(len(run["step_s"]))),
                *(f"{median_s:.3f}", f"{min(run['step_s']):.3f} to {max(run['step_s']):.3f}"),
                f"{needed / MATMUL_FLOPS_PER_S / median_s:.0%}",
                *(f"{run[f'peak_{kind}_bytes'] / 1e9:.1f}" for kind in ("allocated", "reserved")),
            )
        )
    headers = ("UTC", "what", "steps", "step", "range", "of the bound", "allocated", "reserved")
    caption = (
        "Seconds from barrier to barrier by the host's clock of the first rank, medians; GB (1e9 bytes) at the peak. "
        f"The bound is the time of the needed FLOPs ({needed:.3g} a GPU) at {MATMUL_FLOPS_PER_S / 1e12:.0f} TFLOP/s, "
        "which a product of 8192³ reaches."
    )
    return table_of_texts("steps", headers, rows, numeric=[h not in ("UTC", "what") for h in headers], caption=caption)


def parts(found: dict[str, Run]) -> Table:
    """Where the time of a profiled step goes, beside what its FLOPs take at the rate of a large product."""
    needed, rows = flops(), []
    lasted = {name: _lasted_s(run) for name, run in found.items()}
    for part in PARTS[:2]:
        cells = [f"{lasted[name][part]:.2f} ({needed[part] / lasted[name][part] / 1e12:.0f})" for name in found]
        rows.append((_WORDS[part], f"{needed[part]:.3g}", f"{needed[part] / MATMUL_FLOPS_PER_S:.2f}", *cells))
    rest = {name: sum(s for part, s in lasted[name].items() if part not in PARTS) for name in found}
    rows.append(("other kernels", "–", "–", *(f"{rest[name]:.2f}" for name in found)))
    rows.append((_WORDS[COLLECTIVES], "–", "–", *(f"{lasted[name][COLLECTIVES]:.2f}" for name in found)))
    shared = [f"{sum(lasted[name].values()) - _busy_s(run):.2f}" for name, run in found.items()]
    rows.append(("at once, counted twice above", "–", "–", *shared))
    rows.append(("no kernel", "–", "–", *(f"{_idle_s(run):.3f}" for run in found.values())))
    headers = ("part", "FLOPs", "at 790", *map(_named, found))
    caption = (
        "Seconds of the first rank in a profiled step, and in brackets TFLOP/s of the FLOPs that are needed: what is "
        "computed again is not among them. At 790: their seconds at 790 TFLOP/s. "
        f"Records: {', '.join(run.id for run in found.values())}."
    )
    return table_of_texts("parts", headers, rows, numeric=[False, *[True] * (len(headers) - 1)], caption=caption)


def _named(what: str) -> str:
    return NAMES.get(what, what)


_WORDS = {"matmul": "products", "attention": "attention", COLLECTIVES: "collectives"}


def _lasted_s(run: Run) -> dict[str, float]:
    assert run.profile is not None
    lasted = defaultdict[str, float](float)
    for kernel in run.profile.kernels:
        lasted[kernel.category] += kernel.total_s / run.profile.num_steps
    return lasted


def _busy_s(run: Run) -> float:
    assert run.profile is not None
    return run.profile.busy_s / run.profile.num_steps


def _idle_s(run: Run) -> float:
    assert run.profile is not None
    return sum(phase.idle_s + phase.host_bound_s for phase in run.profile.phases) / run.profile.num_steps
