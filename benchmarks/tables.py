"""The tables of pages in docs and benchmarks/results, from the committed records.

    python -m benchmarks.tables                     # writes all of them into their pages
    python -m benchmarks.tables steps memory        # some of them

Each table stands between two comments with its name.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from statistics import mean, median

from benchmarks import tables_attention, tables_eight_b, tables_fast
from benchmarks.page_tables import GOLDEN, RESULTS, ROOT, read, table_of_texts, write_between_marks

from steplab.plan.dry_run.machine import Gathering
from steplab.plan.layout.memory import memory_by_rank
from steplab.plan.memory import HOPPER_WORKSPACE, predict_memory
from steplab.records.memory_profile import MEMORY_CATEGORIES
from steplab.records.run import Run
from steplab.report.kit.markup import markdown_table
from steplab.specs.step import StepSpec
from steplab.units import GIB

SIZES = ("small", "medium", "large", "xl", "2.7b")


def markdown(headers: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int) -> str:
    """A table whose first columns are texts, and the others figures."""
    numeric = [place >= texts for place in range(len(headers))]
    return markdown_table(table_of_texts("table", headers, rows, numeric=numeric))


# --- training steps -----------------------------------------------------------------------------------------------


def steps() -> str:
    """Step times of every size, beside transformers, and by the number of warm-up steps."""
    runs = [run for run in read(GOLDEN / "step_h200_202611.jsonl.gz", Run) if run.spec]
    titled = {
        "Eager, scores materialised": _grid(runs, "sizes"),
        "Compiled, scores materialised": _grid(runs, "compiled"),
        "Beside transformers, compiled, bf16, context 512, both with torch's scaled_dot_product_attention": _peers(
            [run for run in runs if run.spec and run.spec.attention == "sdpa"]
        ),
        "0, 1, 2 and 5 warm-up steps: mean of the ten steps that follow, milliseconds": _warmup(
            [run for run in runs if run.name == "warmup"]
        ),
    }
    return "\n\n".join(f"## {title}\n\n{table}" for title, table in titled.items())


def _grid(runs: Sequence[Run], name: str) -> str:
    cells: dict[tuple[str, int, str], dict[str, Run]] = defaultdict(dict)
    for run in runs:
        if run.name == name and run.spec and run.spec.attention == "plain":
            cells[run.spec.model.label, run.spec.context, run.spec.precision][run.spec.pass_name] = run
    rows = []
    for key in sorted(cells, key=lambda key: (SIZES.index(key[0]), key[1], key[2] != "fp32")):
        train = cells[key].get("train")
        mfu = train.utilization("mfu", "causal") if train else None
        peak = train.memory.peak("step") if train and train.memory else None
        times = (_milliseconds(cells[key].get(name)) for name in ("forward", "forward_backward", "train"))
        share = f"{100 * mfu.value:.1f} %" if mfu and mfu.value else "–"
        rows.append((*map(str, key), *times, share, f"{peak.peak_allocated_bytes / GIB:.1f}" if peak else "–"))
    times_of = ("forward ms", "forward + backward ms", "train ms")
    return markdown(("model", "context", "precision", *times_of, "MFU (causal)", "peak GiB"), rows, texts=3)


def _peers(runs: Iterable[Run]) -> str:
    """All processes of a row on one GPU, one after the other; the median of all samples."""
    found: dict[tuple[str, bool], list[tuple[float, ...]]] = defaultdict(list)
    for run in runs:
        assert run.spec
        size = "small" if "small" in run.spec.model.name else "2.7b"
        found[size, run.spec.model.kind == "hf"].append(_step(run))
    rows = []
    for size in ("small", "2.7b"):
        both = found[size, False], found[size, True]
        ours, theirs = (median(chain.from_iterable(processes)) for processes in both)
        each = "; ".join(", ".join(f"{median(one) * 1e3:.2f}" for one in processes) for processes in both)
        rows.append((size, each, f"{ours * 1e3:.2f}", f"{theirs * 1e3:.2f}", f"{ours / theirs:.3f}"))
    headers = ("model", "processes: steplab; transformers", "steplab ms", "transformers ms", "steplab / transformers")
    return markdown(headers, rows, texts=2)


def _warmup(runs: Iterable[Run]) -> str:
    means: dict[str, dict[int, str]] = defaultdict(dict)
    for run in runs:
        assert run.spec
        means[run.spec.model.label][run.spec.warmup] = f"{mean(_step(run)) * 1e3:.1f}"
    counts = (0, 1, 2, 5)
    rows = [(model, *(found[count] for count in counts)) for model, found in means.items()]
    return markdown(("model", *map(str, counts)), rows, texts=1)


def _step(run: Run) -> tuple[float, ...]:
    step = run.timing.phase("step") if run.timing else None
    return step.best_s if step else ()


def _milliseconds(run: Run | None) -> str:
    return f"{median(_step(run)) * 1e3:.1f}" if run and _step(run) else "–"


# --- memory -------------------------------------------------------------------------------------------------------


def memory() -> str:
    """Peaks by the allocator, as predicted, and what they are made of."""
    fields = ("model", "context", "pass", "precision", "attention", "optimizer", "compile", "checkpointing")
    rows, errors = list[tuple[str, ...]](), dict[str, list[float]]({"Eager": [], "Compiled": []})
    for run in read(GOLDEN / "memory_h200_202611.jsonl.xz", Run):
        spec, watched = run.spec, run.memory_profile
        if spec is None or watched is None:
            continue
        predicted = predict_memory(spec).peak_bytes
        error = predicted / watched.peak_bytes - 1
        errors["Eager" if spec.compile == "off" else "Compiled"].append(abs(error))
        rows.append(
            (
                *(spec.model.name, str(spec.context), spec.pass_name, spec.precision, spec.attention, spec.optimizer),
                *(spec.compile, spec.checkpointing, f"{watched.peak_bytes:,}", f"{watched.peak_bytes / GIB:.2f}"),
                *(f"{predicted:,}", f"{100 * error:+.3f} %"),
                *(f"{watched.at_peak.get(category, 0) / GIB:.3f}" for category in MEMORY_CATEGORIES),
            )
        )
    rows.sort(key=lambda row: (row[6], row[0], int(row[1]), *row[2:8]))
    figures = ("peak, bytes", "GiB", "predicted, bytes", "error", *(c.replace("_", " ") for c in MEMORY_CATEGORIES))
    verdicts = (
        f"{kind}: {len(off)} cells, median error {100 * median(off):.4f} %, worst {100 * max(off):.3f} %."
        for kind, off in errors.items()
    )
    return "\n".join([markdown((*fields, *figures), rows, texts=len(fields)), "", *verdicts])


def layouts() -> str:
    """Peaks of every kind of rank of a layout, measured and predicted."""
    rows = []
    for run in read(RESULTS / "layout_h200_202611.jsonl.gz", Run):
        assert run.spec is not None
        # torch 2.11 composes norms of a stream in fp32 with weights in bf16.
        gathering = Gathering(fused_norms=run.environment is None or not run.environment.torch.startswith("2.11"))
        for rank in memory_by_rank(run.spec, HOPPER_WORKSPACE.value, gathering=gathering):
            samples = run.ranks[rank.first_rank]
            (peak,) = [each for each in samples.peaks if each.phase == "step"]
            (step,) = [each for each in samples.back_to_back if each.phase == "step"]
            of_both = (peak.peak_allocated_bytes, rank.peak_bytes), (peak.peak_reserved_bytes, rank.reserved_bytes)
            figures = (
                (f"{real / GIB:.2f} GiB", f"{predicted / GIB:.2f} GiB", f"{100 * (predicted / real - 1):+.2f} %")
                for real, predicted in of_both
            )
            time = f"{1e3 * median(step.best_s):.1f} ms"
            rows.append((_layout_words(run.spec), rank.ranks, time, *chain.from_iterable(figures)))
    headers = ("layout", "ranks", "step", "allocated", "predicted", "error", "reserved", "predicted", "error")
    return markdown(headers, rows, texts=2)


def _layout_words(spec: StepSpec) -> str:
    usual = {"reshard_after_forward": "auto", "accumulation": 1, "checkpointing": "none", "compile": "off"}
    usual = {"pipeline_schedule": "1f1b", **usual}
    told = {name: getattr(spec, name) for name, value in usual.items() if getattr(spec, name) != value}
    return " ".join([str(spec.layout), *(f"--{name.replace('_', '-')} {value}" for name, value in told.items())])


TABLES: dict[str, tuple[Callable[[], str], Path]] = {
    "steps": (steps, RESULTS / "step_h200_202611.md"),
    "fast": (tables_fast.written, RESULTS / "fast_h200_202611.md"),
    "eight_b": (tables_eight_b.written, ROOT / "docs/layout.md"),
    "attention": (tables_attention.written, ROOT / "docs/attention.md"),
    "memory": (memory, RESULTS / "memory_h200_202611.md"),
    "layouts": (layouts, RESULTS / "layout_h200_202611.md"),
}
"""Name -> what makes a table, and the page that it stands in."""


def main() -> None:
    for name in sys.argv[1:] or TABLES:
        written, page = TABLES[name]
        write_between_marks(page, name, written())


if __name__ == "__main__":
    main()
