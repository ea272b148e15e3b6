"""Makes the chapter docs/walk.md and its pictures from the records of walks on an H200.

    python docs/walk/make.py                        # from the committed records
    python docs/walk/make.py STORE [STORE ...]      # first add the walks of stores to those; commit both

Of each model and context the newest walk counts, with the records that it names and the newest profiles of its first
and its fastest step (by `steplab advise` and `steplab profile`). Every figure of the chapter is from a
record.
"""

import dataclasses
import gzip
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from steplab import units
from steplab.costs.parameters import num_parameters
from steplab.lab.keeping import open_store
from steplab.records.advice import Advice, Tried
from steplab.records.codec import decode, encode
from steplab.records.record import Record
from steplab.records.run import Run
from steplab.report.advice.document import advice_document, advice_verdict
from steplab.report.advice.waterfall import waterfall
from steplab.report.kit.document import Chart, Column, Section, Table
from steplab.report.kit.markup import escape_markdown, markdown_table
from steplab.report.kit.quantities import BYTES, LABEL, PERCENT, TEXT, TIME
from steplab.report.profile.figures import whole
from steplab.report.profile.roofline import roofline
from steplab.specs.attention_kernels import chosen_by_auto
from steplab.specs.hardware import find_hardware
from steplab.specs.own_loop import own_loop, own_model
from steplab.specs.resolve import command
from steplab.specs.step import StepSpec, describe

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
RECORDS = REPOSITORY / "benchmarks" / "results" / "walk_h200_202611.jsonl.gz"
PLAIN = REPOSITORY / "tests" / "golden" / "step_h200_202611.jsonl.gz"
"""Has the plain steps in fp32, where a walk began later."""
CHAPTER = HERE.parent / "walk.md"
TOLD = ("2.7b", 512)
"""Model and context of the walk that the chapter tells; the others are in its last table."""

WHY = {
    "precision bf16": "Matrix products run on tensor cores: autocast hands them bf16, while weights, sums and the "
    "optimizer stay in fp32 ([precision.md](precision.md)).",
    "compile block": "What lies between two products becomes few kernels, each of which reads and writes its tensors "
    "once ([plan_time.md](plan_time.md)). Equal blocks are compiled once.",
    "compile default": "What lies between two products becomes few kernels, each of which reads and writes its tensors "
    "once ([plan_time.md](plan_time.md)).",
    "attention auto": "The scores are never written to memory; which kernel does it follows "
    "measurements ([attention.md](attention.md)).",
    "attention sdpa_cudnn": "The scores are never written to memory ([attention.md](attention.md)).",
    "attention flash_triton": "The scores are never written to memory; the kernels are Triton's, made for such GPUs "
    "([attention.md](attention.md)).",
    "optimizer adamw_triton": "AdamW is bound by its 28 bytes per parameter; one kernel over all tensors reaches "
    "more of the memory's bandwidth than torch's fused one (ops/adamw).",
    "precision bf16_master": "Linear layers hold bf16 weights, and the optimizer their fp32 masters, so that no step "
    "casts weights and gradients ([precision.md](precision.md)).",
    "cuda_graph step": "Each phase is recorded once and replayed by one launch, so that the host's launches no longer "
    "decide the step ([measure.md](measure.md)).",
    "compile reduce-overhead": "Each pass is one CUDA graph, launched by one call "
    "([explain.md](explain.md#launch_bound)).",
    "projections merged": "Queries, keys and values come from one product, gate and up from another: larger products "
    "fill the multiprocessors better.",
    "block_ops triton": "What lies between two products of a block is one kernel of this repository each "
    "([block_ops.md](block_ops.md)).",
    "update overlapped": "A block's parameters are updated, which memory bounds, while the backward pass of others "
    "computes ([cross_entropy.md](cross_entropy.md)).",
    "loss fused": "Logits are made in chunks that are never all in memory ([cross_entropy.md](cross_entropy.md)).",
}
"""Why a change saves time, for those that may be kept."""


# --- records ------------------------------------------------------------------------------------------------------


def take(stores: Sequence[str]) -> None:
    """Add the walks of some stores to the committed records, in place of older ones of the same model and context."""
    records = read(RECORDS)
    for store in stores:
        with open_store(store, write=False) as opened:
            records += opened.iterate()
    chosen: dict[str, Record] = {}
    for walk in walks(records):
        ids = {walk.start_id, walk.best_id, *(i for tried in walk.tried for i in (tried.run_id, tried.base_id))}
        chosen |= {record.id: record for record in records if record.id in ids} | {walk.id: walk}
        for spec in (walk.spec, walk.best):
            if found := profile_of(spec, records):
                chosen[found.id] = found
    lines = [encode(record) for record in sorted(chosen.values(), key=lambda record: (record.created_utc, record.id))]
    RECORDS.write_bytes(gzip.compress(b"\n".join(lines) + b"\n", mtime=0))


def read(path: Path) -> list[Record]:
    """The records of a committed file."""
    return [decode(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def walks(records: Sequence[Record]) -> list[Advice]:
    """The newest walk of each model and context."""
    found: dict[tuple[str, int], Advice] = {}
    for record in sorted(records, key=lambda record: record.created_utc):
        if isinstance(record, Advice) and record.spec and record.best:
            found[record.spec.model.label, record.spec.context] = record
    return list(found.values())


def profile_of(spec: StepSpec | None, records: Sequence[Record]) -> Run | None:
    """The newest profile of a step; `auto` is the implementation that it chooses."""
    found = [
        record
        for record in records
        if isinstance(record, Run) and record.profile and record.spec and spec and _same(record, spec)
    ]
    return max(found, key=lambda run: run.created_utc, default=None)


def _same(run: Run, spec: StepSpec) -> bool:
    def compared(each: StepSpec) -> StepSpec:
        attention = each.attention
        if attention == "auto" and each.model.shape:
            attention = chosen_by_auto(each, each.model.shape, run.device_name or "").implementation
        return dataclasses.replace(each, attention=attention, steps=1, warmup=0, device="auto")

    assert run.spec is not None
    return compared(run.spec) == compared(spec)


def plain_step(walk: Advice) -> Run | None:
    """The same step in fp32, where the walk began with another precision."""
    if walk.spec is None or walk.spec.precision == "fp32":
        return None
    plain = dataclasses.replace(walk.spec, precision="fp32")
    found = (record for record in read(PLAIN) if isinstance(record, Run) and record.spec and not record.failure)
    return next((run for run in found if _same(run, plain)), None)


# --- the chapter --------------------------------------------------------------------------------------------------


def chapter(records: Sequence[Record], pictures: dict[str, str]) -> str:
    """The text of docs/walk.md; `pictures` gets the content of those that it shows, by their paths in docs."""
    runs = {record.id: record for record in records if isinstance(record, Run)}
    [walk] = [walk for walk in walks(records) if walk.spec and (walk.spec.model.label, walk.spec.context) == TOLD]
    assert walk.spec is not None
    assert walk.best is not None
    first = plain_step(walk)
    steps = [*([first] if first else []), runs[str(walk.start_id)], *(runs[str(tried.run_id)] for tried in walk.kept)]
    before_s, after_s = _step_s(steps[0]), _step_s(steps[-1])
    ends = [(words, run) for words, spec in (("first", walk.spec), ("fastest", walk.best))
            if (run := profile_of(spec, records))]  # fmt: skip
    parts = [
        f"# From {units.format_time(before_s)} to {units.format_time(after_s)}",
        "<!-- made by docs/walk/make.py from the records of benchmarks/results; change that, and not this file -->",
        _opening(walk, before_s, after_s),
        _code([f"steplab advise --model {walk.spec.model.label} --context {walk.spec.context}"]),
        "## The steps of the walk",
        markdown_table(_stations(steps, walk)),
        *_whys(walk, steps, first),
        "## What was tried",
        "Each change was predicted first, and then measured. Those that do not pay are in the table too.",
        markdown_table(_tried_table(walk)),
        _picture(pictures, waterfall(walk), "walk/waterfall.svg", "What each change saves, predicted and measured"),
        *(escape_markdown(sentence) for sentence in advice_verdict(walk).sentences[1:]),
        *_where(ends, pictures),
        *_what_is_left(steps[-1]),
        "## The same by hand",
        "This command measures the fastest step:",
        _code([command(walk.best)]),
        "The same in a model of your own:",
        _code(own_model(walk.best), "text"),  # excerpts, not a module that could be formatted
        "And in its training loop:",
        _code(own_loop(walk.best), "text"),
        *_others([each for each in walks(records) if each is not walk]),
        "## The records",
        _origin(walk, first),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _opening(walk: Advice, before_s: float, after_s: float) -> str:
    assert walk.spec is not None
    model = f"`--model {walk.spec.model.label}`, batch {walk.spec.batch}, context {walk.spec.context}"
    parameters, before, after = _parameters(walk.spec) / 1e9, *map(units.format_time, (before_s, after_s))
    return (
        f"A training step of a Transformer with {parameters:.1f}e9 parameters ({model}) takes {before} on "
        f"one {walk.device_name} as plain fp32 code, and {after} at the end of this page: {before_s / after_s:.1f} "
        "times as fast, with the same model, batch and optimizer. `steplab advise` found the way by itself: it "
        "predicts what each change of its table saves, measures it in turns with the fastest step until then, and "
        "keeps what pays ([advise.md](advise.md)). To walk so on your GPU:"
    )


def _origin(walk: Advice, first: Run | None) -> str:
    plain = f", and of the plain step in [{PLAIN.name}](../tests/golden/{PLAIN.name})" if first else ""
    return (
        f"All figures are medians of records in [{RECORDS.name}](../benchmarks/results/{RECORDS.name}){plain}; torch "
        f"{_software(walk)}. `steplab advise` makes such records, and "
        "[docs/walk/make.py](walk/make.py) makes this page of them."
    )


def _stations(steps: Sequence[Run], walk: Advice) -> Table:
    """One row for each step of the way."""
    changes = ["", *(tried.words for tried in walk.kept)]
    changes = [""] * (len(steps) - len(changes)) + changes
    rows = []
    for run, change in zip(steps, changes, strict=True):
        assert run.spec is not None
        peak = run.memory.peak("step") if run.memory else None
        mfu = next((u.value for u in run.utilizations if u.kind == "mfu" and u.convention == "causal"), None)
        rows.append(
            {
                "step": change or describe(run.spec),
                "step_s": _step_s(run),
                **{f"{phase}_s": run.phase_s(phase) for phase in ("forward", "backward", "optimizer")},
                "mfu": mfu,
                "peak_bytes": peak.peak_allocated_bytes if peak else None,
                "record": run.id,
            }
        )
    return Table(
        name="steps",
        columns=(
            Column(key="step", header="step, then with", quantity=TEXT),
            Column(key="step_s", header="step time", quantity=TIME),
            *(Column(key=f"{p}_s", header=p, quantity=TIME) for p in ("forward", "backward", "optimizer")),
            Column(key="mfu", header="MFU (causal)", quantity=PERCENT),
            Column(key="peak_bytes", header="peak memory", quantity=BYTES),
            Column(key="record", header="record", quantity=LABEL),
        ),
        rows=tuple(rows),
        caption="Medians of the measured steps of each record. MFU is of the dense peak of the number format of the "
        "products, by the causal convention.",
    )


def _whys(walk: Advice, steps: Sequence[Run], first: Run | None) -> Iterator[str]:
    if first is not None:
        was, now = (_step_s(step) for step in steps[:2])
        yield (
            f"- **precision bf16** {units.format_time(was)} → {units.format_time(now)}. {WHY['precision bf16']} "
            "The two records are of different days; the walk begins with the second."
        )
    for tried in walk.kept:
        assert tried.ratio is not None
        after = tried.ratio.a * tried.ratio.ratio
        told = f"- **{escape_markdown(tried.words)}** {units.format_time(tried.ratio.a)} → {units.format_time(after)}"
        why = " ".join(WHY[words] for words in tried.all_words if words in WHY)
        yield f"{told}{_expected(tried)}. {why}".rstrip()


def _expected(tried: Tried) -> str:
    if tried.predicted_share is None or tried.ratio is None:
        return ""
    saved = tried.ratio.a * (1 - tried.ratio.ratio)
    predicted = tried.predicted_share * tried.ratio.a
    return f", {units.format_time(saved)} saved, for {units.format_time(predicted)} predicted"


def _tried_table(walk: Advice) -> Table:
    """The table of the command's own report, without its narrower columns."""
    table = next(
        block
        for section in advice_document(walk).sections
        for block in section.blocks
        if isinstance(section, Section) and isinstance(block, Table)
    )
    shown = ("change", "predicted_s", "saved_s", "least_saved_s", "most_saved_s", "after_s", "result")
    columns = tuple(column for column in table.columns if column.key in shown)
    return dataclasses.replace(table, columns=columns, caption=table.caption.partition(" Peak memory")[0])


def _where(ends: Sequence[tuple[str, Run]], pictures: dict[str, str]) -> Iterator[str]:
    """Where the time of the first and of the last step goes."""
    if not ends:
        return
    yield "## Where the time goes"
    yield markdown_table(_categories(ends))
    if any(run.spec and run.spec.updates_in_backward for _, run in ends):
        yield "Kernels that run at once share the time: the update runs beside products of the backward pass."
    drawn = [
        _picture(pictures, chart, f"walk/roofline_{words}.svg", f"Roofline of the {words} step")
        for words, run in ends
        if run.profile and (chart := roofline(run, run.profile)) is not None
    ]
    if drawn:
        yield (
            "In a roofline ([profile.md](profile.md)) a point is an operator with inputs of one shape, its area its "
            "time, and the lines are what the GPU's memory and tensor cores can do at most."
        )
        yield from drawn


def _categories(ends: Sequence[tuple[str, Run]]) -> Table:
    found = {words: whole(run, run.profile) for words, run in ends if run.profile}
    names = {name for span in found.values() for name in span.categories if (span.share(name) or 0.0) >= _LEAST_SHARE}
    order = sorted(names, key=lambda name: -max(span.categories.get(name, 0.0) for span in found.values()))
    columns = [Column(key="category", header="kernels", quantity=TEXT)]
    for words in found:
        columns.append(Column(key=f"{words}_s", header=f"{words} step", quantity=TIME))
        columns.append(Column(key=f"{words}_share", header="of its busy time", quantity=PERCENT))
    rows = [
        {"category": name}
        | {f"{words}_s": span.categories.get(name, 0.0) for words, span in found.items()}
        | {f"{words}_share": span.share(name) for words, span in found.items()}
        for name in order
    ]
    from_records = ", ".join(f"{words} step: record {run.id}" for words, run in ends)
    caption = (
        f"Device time by category of kernels, under the profiler; those below {units.format_percent(_LEAST_SHARE)} "
    )
    caption += f"are left out. {from_records[0].upper()}{from_records[1:]}."
    if unnamed := _uncategorised([run for _, run in ends]):
        caption += f" Uncategorised: {', '.join(unnamed)}."
    return Table(name="categories", columns=tuple(columns), rows=tuple(rows), caption=caption)


def _uncategorised(runs: Sequence[Run]) -> list[str]:
    """The longest kernels that no rule on names knew when these were profiled."""
    kernels = [kernel for run in runs if run.profile for kernel in run.profile.kernels]
    of_none = sorted((k for k in kernels if k.category == "uncategorised"), key=lambda k: -k.total_s)
    return list(dict.fromkeys(kernel.name for kernel in of_none))[:4]


def _what_is_left(run: Run) -> Iterator[str]:
    """What the stated peak and bandwidth would need for the products and the optimizer of a step."""
    used = next((u for u in run.utilizations if u.kind == "mfu" and u.convention == "causal"), None)
    known = find_hardware(run.device_name or "")
    if used is None or used.flops is None or used.peak_flops_per_s is None or known is None or run.spec is None:
        return
    products_s = used.flops / used.peak_flops_per_s
    bandwidth = known.memory_bandwidth_bytes_per_s
    optimizer_s = ADAMW_BYTES * _parameters(run.spec) / bandwidth
    yield "## What is left"
    yield (
        f"At the stated dense peak ({units.format_rate(used.peak_flops_per_s, 'FLOP/s')}) the step's FLOPs, by the "
        f"causal convention, take {units.format_time(products_s)} ([mfu.md](mfu.md)), and at the stated bandwidth "
        f"({units.format_rate(bandwidth, 'B/s')}) AdamW's {ADAMW_BYTES} bytes per parameter take "
        f"{units.format_time(optimizer_s)} ([explain.md](explain.md#optimizer_not_fused)): together "
        f"{units.format_time(products_s + optimizer_s)} of the {units.format_time(_step_s(run))} that the fastest step "
        "takes. The rest is what kernels of these sizes do not reach of the two figures, and what lies between the "
        "products."
    )


ADAMW_BYTES = 28
"""Bytes that an update of AdamW reads and writes of each fp32 parameter."""
_LEAST_SHARE = 0.005


def _parameters(spec: StepSpec) -> int:
    assert spec.model.shape is not None
    return num_parameters(spec.model.shape)


def _others(others: Sequence[Advice]) -> Iterator[str]:
    if not others:
        return
    rows = [
        {
            "step": describe(walk.spec) if walk.spec else "",
            "start_s": walk.start_s,
            "best_s": walk.best_s,
            "ratio": f"{walk.overall.ratio:.3f}" if walk.overall else "–",
            "kept": ", ".join(tried.words for tried in walk.kept),
            "untried": ", ".join(walk.untried),
            "made": walk.created_utc[:16].replace("T", " "),
        }
        for walk in others
    ]
    columns = (
        Column(key="step", header="step", quantity=TEXT),
        Column(key="start_s", header="as given", quantity=TIME),
        Column(key="best_s", header="fastest", quantity=TIME),
        Column(key="ratio", header="times as long", quantity=LABEL),
        Column(key="kept", header="kept", quantity=TEXT),
        Column(key="untried", header="not reached", quantity=TEXT),
        Column(key="made", header="made (UTC)", quantity=TEXT),
    )
    yield "## Other walks"
    yield markdown_table(Table(name="others", columns=columns, rows=tuple(rows)))


def _step_s(run: Run) -> float:
    seconds = run.phase_s("step")
    assert seconds is not None
    return seconds


def _software(walk: Advice) -> str:
    found = walk.environment
    return f"{found.torch}, Triton {found.triton}, {walk.created_utc[:10]}" if found else ""


def _code(lines: Sequence[str], language: str = "sh") -> str:
    return "\n".join((f"```{language}", *lines, "```"))


# --- pictures -----------------------------------------------------------------------------------------------------


def _picture(pictures: dict[str, str], chart: Chart | None, path: str, words: str) -> str:
    """Add a chart as a file of its own, and give the line that shows it, with its note."""
    if chart is None:
        return ""
    pictures[path] = standalone(chart)
    return f"![{words}]({path})\n\n{escape_markdown(chart.note)}"


def standalone(chart: Chart) -> str:
    """The chart's one picture with the colours of a light page and its legend below, for files outside of pages."""
    [picture] = chart.pictures
    box = re.search(r'viewBox="0 0 (\d+) (\d+)"', picture.svg)
    assert box is not None
    width, height = int(box[1]), int(box[2])
    colors = files("steplab.report.kit").joinpath("page.css").read_text(encoding="utf-8").split("}")[0].split("{")[1]
    legend, x = [], 12
    for color, glyph, label in chart.legend:
        legend.append(f'<text x="{x}" y="{height + 18}" font-size="11" style="fill: var(--c{color})">{glyph}</text>')
        legend.append(f'<text x="{x + 13}" y="{height + 18}" font-size="11" style="fill: var(--ink)">{label}</text>')
        x += 30 + 6 * len(label)
    style = f"<style>svg {{{colors}}} text {{font-family: sans-serif}}</style>"
    paper = f'<rect width="{width}" height="{height + 28}" style="fill: var(--paper)"/>'
    opening, _, rest = picture.svg.partition(">")
    opening = opening.replace(box[0], f'viewBox="0 0 {width} {height + 28}"')
    opening = opening.replace('width="100%"', f'width="{width}"')
    return _numbered(f"{opening}>{style}{paper}{rest.removesuffix('</svg>')}{''.join(legend)}</svg>\n")


def _numbered(svg: str) -> str:
    """The same picture with names that do not change from one making to the next."""
    names = dict.fromkeys(re.findall(r'id="([^"]+)"', svg))
    for number, name in enumerate(names):
        svg = svg.replace(f'id="{name}"', f'id="n{number}"').replace(f"#{name})", f"#n{number})")
        svg = svg.replace(f'href="#{name}"', f'href="#n{number}"')
    return svg


if __name__ == "__main__":
    if sys.argv[1:]:
        take(sys.argv[1:])
    drawn: dict[str, str] = {}
    CHAPTER.write_text(chapter(read(RECORDS), drawn), encoding="utf-8")
    for path, svg in drawn.items():
        (HERE.parent / path).write_text(svg, encoding="utf-8")
