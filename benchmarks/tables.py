"""Tables of pages in docs and benchmarks/results, from committed records.

    python -m benchmarks.tables                     # writes all into their pages
    python -m benchmarks.tables steps memory        # writes some

Each table is between two comments with its name. Every figure is computed from samples in the records.
"""

import gzip
import lzma
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from statistics import mean, median
from typing import TypeVar

from steplab.plan.dry_run.machine import Gathering
from steplab.plan.layout.memory import memory_by_rank
from steplab.plan.layout.sharing import sharing_of
from steplab.plan.memory import HOPPER_WORKSPACE, predict_memory
from steplab.records.codec import decode
from steplab.records.memory_profile import MEMORY_CATEGORIES
from steplab.records.record import Record
from steplab.records.run import Run
from steplab.report.kit.document import Column, Table
from steplab.report.kit.markup import markdown_table
from steplab.report.kit.quantities import LABEL, TEXT
from steplab.specs.step import StepSpec
from steplab.units import GIB

ROOT = Path(__file__).parents[1]
RESULTS, GOLDEN = ROOT / "benchmarks/results", ROOT / "tests/golden"
SIZES = ("small", "medium", "large", "xl", "2.7b")
Kind = TypeVar("Kind", bound=Record)


def read(path: Path, kind: type[Kind]) -> list[Kind]:
    """Records of a kind in a file, oldest first."""
    unpack = lzma.decompress if path.suffix == ".xz" else gzip.decompress
    found = [record for record in map(decode, unpack(path.read_bytes()).splitlines()) if isinstance(record, kind)]
    return sorted(found, key=lambda record: record.created_utc)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], texts: Sequence[str], caption: str = "") -> Table:
    """A table of texts; `texts` are headers of columns without figures."""
    columns = tuple(
        Column(key=str(place), header=header, quantity=TEXT if header in texts else LABEL)
        for place, header in enumerate(headers)
    )
    cells = tuple({str(place): text for place, text in enumerate(row)} for row in rows)
    return Table(name="table", columns=columns, rows=cells, caption=caption)


def markdown(parts: Iterable[str | Table]) -> str:
    """Titles and tables as in a page."""
    return "\n\n".join(part if isinstance(part, str) else markdown_table(part) for part in parts)


def between_marks(page: Path, name: str) -> str:
    """Tables of this name in a page. Raises ValueError without its marks."""
    _, begin, rest = page.read_text(encoding="utf-8").partition(f"<!-- begin: benchmarks/tables.py {name} -->")
    text, end, _ = rest.partition(f"<!-- end: benchmarks/tables.py {name} -->")
    if not begin or not end:
        raise ValueError(f"{page} has no marks of {name}")
    return text.strip()


# --- training steps -----------------------------------------------------------------------------------------------


def steps() -> Iterator[str | Table]:
    """Step times of every size, against transformers, and by warm-up steps."""
    runs = [run for run in read(GOLDEN / "step_h200_202611.jsonl.gz", Run) if run.spec]
    yield "## Eager, scores materialised"
    yield _grid(runs, "sizes")
    yield "## Compiled, scores materialised"
    yield _grid(runs, "compiled")
    yield "## Beside transformers, compiled, bf16, context 512, both with torch's scaled_dot_product_attention"
    yield _peers(run for run in runs if run.spec and run.spec.attention == "sdpa")
    yield "## 0, 1, 2 and 5 warm-up steps: mean of the ten steps that follow, milliseconds"
    means: dict[str, list[str]] = defaultdict(list)
    for run in sorted(
        (run for run in runs if run.name == "warmup"), key=lambda run: run.spec.warmup if run.spec else 0
    ):
        assert run.spec
        means[run.spec.model.label].append(f"{mean(run.samples_s) * 1e3:.1f}")
    rows = [(model, *means[model]) for model in sorted(means, key=SIZES.index)]
    yield table(("model", "0", "1", "2", "5"), rows, ("model",))


def _grid(runs: Sequence[Run], name: str) -> Table:
    cells: dict[tuple[str, int, str], dict[str, Run]] = defaultdict(dict)
    for run in runs:
        if run.name == name and run.spec and run.spec.attention == "plain":
            cells[run.spec.model.label, run.spec.context, run.spec.precision][run.spec.pass_name] = run
    rows = []
    for key in sorted(cells, key=lambda key: (SIZES.index(key[0]), key[1], key[2] != "fp32")):
        train, passes = cells[key]["train"], ("forward", "forward_backward", "train")
        mfu, peak = train.utilization("mfu", "causal"), train.memory and train.memory.peak("step")
        assert mfu is not None
        assert mfu.value is not None
        assert peak
        times = (f"{median(cells[key][each].samples_s) * 1e3:.1f}" for each in passes)
        rows.append((*map(str, key), *times, f"{100 * mfu.value:.1f} %", f"{peak.peak_allocated_bytes / GIB:.1f}"))
    texts = ("model", "context", "precision")
    headers = (*texts, "forward ms", "forward + backward ms", "train ms", "MFU (causal)", "peak GiB")
    return table(headers, rows, texts)


def _peers(runs: Iterable[Run]) -> Table:
    """A row's processes ran consecutively on one GPU; the median is over all samples."""
    found: dict[tuple[str, bool], list[tuple[float, ...]]] = defaultdict(list)
    for run in runs:
        assert run.spec
        found["small" if "small" in run.spec.model.name else "2.7b", run.spec.model.kind == "hf"].append(run.samples_s)
    rows = []
    for size in ("small", "2.7b"):
        both = found[size, False], found[size, True]
        ours, theirs = (median(chain.from_iterable(processes)) for processes in both)
        each = "; ".join(", ".join(f"{median(one) * 1e3:.2f}" for one in processes) for processes in both)
        rows.append((size, each, f"{ours * 1e3:.2f}", f"{theirs * 1e3:.2f}", f"{ours / theirs:.3f}"))
    texts = ("model", "processes: steplab; transformers")
    return table((*texts, "steplab ms", "transformers ms", "steplab / transformers"), rows, texts)


# --- memory -------------------------------------------------------------------------------------------------------


def memory() -> Iterator[str | Table]:
    """Allocator peaks, predictions, and categories."""
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
    yield table((*fields, *figures), rows, fields)
    yield "\n".join(
        f"{kind}: {len(off)} cells, median error {100 * median(off):.4f} %, worst {100 * max(off):.3f} %."
        for kind, off in errors.items()
    )


def layouts() -> Iterator[Table]:
    """Peaks of every kind of rank of a layout, measured and predicted."""
    rows = []
    for run in read(RESULTS / "layout_h200_202611.jsonl.gz", Run):
        assert run.spec is not None
        # torch 2.11 composes norms of an fp32 stream with bf16 weights.
        gathering = Gathering(fused_norms=run.environment is None or not run.environment.torch.startswith("2.11"))
        for rank in memory_by_rank(run.spec, HOPPER_WORKSPACE.value, sharing_of(run.spec, None, gathering)):
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
    yield table(headers, rows, ("layout", "ranks"))


def _layout_words(spec: StepSpec) -> str:
    usual = {"pipeline_schedule": "1f1b", "reshard_after_forward": "auto", "accumulation": 1, "checkpointing": "none"}
    usual |= {"compile": "off"}
    told = {name: getattr(spec, name) for name, value in usual.items() if getattr(spec, name) != value}
    return " ".join([str(spec.layout), *(f"--{name.replace('_', '-')} {value}" for name, value in told.items())])


def tables() -> dict[str, tuple[Callable[[], Iterable[str | Table]], Path]]:
    """Name -> function for its parts, and its page."""
    from benchmarks import tables_attention, tables_fast  # which take `table` and `read` from here

    return {
        "steps": (steps, RESULTS / "step_h200_202611.md"),
        "fast": (tables_fast.fast, RESULTS / "fast_h200_202611.md"),
        "eight_b": (tables_fast.eight_b, RESULTS / "eight_b_h200_202611.md"),
        "attention": (tables_attention.attention, ROOT / "docs/attention.md"),
        "attention_bounds": (tables_attention.attention_bounds, RESULTS / "attention_h200_202611.md"),
        "memory": (memory, RESULTS / "memory_h200_202611.md"),
        "layouts": (layouts, RESULTS / "layout_h200_202611.md"),
    }


def main() -> None:
    for name in sys.argv[1:] or tables():
        make, page = tables()[name]
        content, before = page.read_text(encoding="utf-8"), between_marks(page, name)
        page.write_text(content.replace(before, markdown(make())), encoding="utf-8")


if __name__ == "__main__":
    main()
