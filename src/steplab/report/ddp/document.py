"""Reports a data-parallel study: step time with and without communication, bucket sizes, memory."""

from collections import Counter
from collections.abc import Iterator, Sequence

from steplab import units
from steplab.records.ddp import CATEGORIES, MOMENTS, DdpCell, DdpRun, StateMemory
from steplab.records.figure import Figure
from steplab.records.rows import Row
from steplab.report.ddp import figures
from steplab.report.ddp.curve import bucket_curve
from steplab.report.ddp.timelines import timelines
from steplab.report.kit import document
from steplab.report.kit.grouping import told_once
from steplab.report.kit.quantities import BYTES, SHARE, TIME
from steplab.report.kit.text import dotted, interruption, made, quoted_name, why_failed
from steplab.report.report import RecordReport, extremes


def asked(run: DdpRun) -> str:
    step = run.study.step
    parts = [step.model.label, f"context {step.context}", f"batch {step.batch} per rank", step.precision]
    parts += [f"{step.micro_steps} micro-steps"] if step.micro_steps > 1 else []
    parts += ["each block compiled"] if step.compile == "block" else []
    return ", ".join(parts)


def ranks_words(run: DdpRun) -> str:
    """Example: '2 ranks, NVIDIA H200, nccl'; hosts are named if there are several."""
    facts = run.facts
    if facts is None:
        return units.counted(run.study.processes, "rank")
    devices = ", ".join(dict.fromkeys(place.device for place in facts.places))
    hosts = Counter(place.host for place in facts.places)
    over = " on " + ", ".join(f"{host} ({count})" for host, count in hosts.items()) if len(hosts) > 1 else ""
    return f"{units.counted(len(facts.places), 'rank')}{over}, {devices}, {facts.backend}"


def facts(run: DdpRun) -> Iterator[str]:
    if found := run.facts:
        yield (
            f"{units.format_count(found.num_parameters)} parameters in {found.num_tensors} tensors: "
            f"{units.format_bytes(found.gradient_bytes)} of gradients per rank and step."
        )
    if held := [rank.held_s for cell in run.cells for rank in cell.ranks if rank.held_s]:
        yield (
            f"Before each step the GPUs were held idle for {units.format_time(min(held))} to "
            f"{units.format_time(max(held))}, so that Python had launched ahead and no GPU waited for it."
        )
    elif run.facts and run.facts.backend == "nccl":
        yield "The record does not say whether Python had launched ahead before each step."
    if uncounted := [cell.contender.label for cell in run.cells if any(rank.baseline_freed for rank in cell.ranks)]:
        yield (
            f"Other memory and the peak are not known for {'; '.join(uncounted)}: an earlier variant's memory was "
            "freed during the measurement."
        )


def model_words(run: DdpRun) -> Iterator[str]:
    model = run.model
    if model is None:
        return
    best = figures.best(cell for cell in run.cells if cell.contender.kind == "bucketed") or figures.best_ddp(run.cells)
    found = best.contender if best else None
    measured = f", the best measured {found.bucket_size_mb:g} MB ({found.family})" if found else ""
    yield (
        "Model: s bytes of gradients in n buckets, with bandwidth w and overhead o per call, take n·o + s/w alone. "
        "Overheads and the last bucket are exposed: n·o + s/(n·w), least for buckets of sqrt(s·w·o). Here s = "
        f"{units.format_message(model.gradient_bytes)}, w = {units.format_rate(model.bytes_per_s, 'B/s')}, "
        f"o = {units.format_time(model.call_s)}: the model's best bucket is {model.best_bucket_mb:.3g} MB{measured}."
    )


def notes_of(run: DdpRun) -> list[str]:
    """List each distinct note once, with the variants that have it."""
    found = told_once((cell.contender.label, note) for cell in run.cells for note in cell.notes)
    return [*run.notes, *(f"{note} ({'; '.join(labels)})" for note, labels in found.items())]


EXPOSED_COLOR = 2
_WORDS = {"optimizer": "optimizer state"}


def exposed_bars(run: DdpRun) -> document.Bars | None:
    """Draw exposed communication by variant, shortest first; the fastest step and torch DDP's fastest stand out."""
    timed = [(added_s, cell) for cell in run.cells if (added_s := figures.exposed_s(cell)) is not None]
    if not timed:
        return None
    cells = [cell for _, cell in timed]
    winner, theirs = figures.best(cells), figures.best_ddp(cells)
    bars = [_exposed_bar(cell, added_s, winner, theirs) for added_s, cell in sorted(timed, key=lambda pair: pair[0])]
    bars += [
        document.Bar(label=cell.contender.label, figure=why_failed(cell.failure), bad=True)
        for cell in run.cells
        if cell.failure
    ]
    note = (
        "Exposed communication: the median step of the slowest rank minus the same step without communication, "
        "alternating. In brackets: bounds from the 95 % interval of the ratio of both."
    )
    return document.Bars(bars=tuple(bars), note=note)


def _exposed_bar(cell: DdpCell, added_s: float, winner: DdpCell | None, theirs: DdpCell | None) -> document.Bar:
    show, bounds, name = units.format_time, figures.exposed_range_s(cell), cell.contender.label
    between = f" ({show(bounds[0])} to {show(bounds[1])})" if bounds else ""
    told = [f"step {show(figures.step_s(cell) or 0.0)}"]
    told += ["shortest step"] if cell is winner else []
    told += ["fastest torch DDP"] if cell is theirs else []
    told += ["doubtful: wide interval"] if figures.is_vague(cell) else []
    tip = f"{name}: {show(added_s)} exposed{between}"
    return document.Bar(
        label=name,
        figure=f"{show(added_s)}{between}",
        segments=(document.Segment(value=added_s, color=EXPOSED_COLOR, tip=tip),),
        detail=", ".join(told),
        strong=cell is winner or cell is theirs,
    )


def memory_bars(run: DdpRun) -> document.Bars | None:
    held = [(cell, memory) for cell in run.cells if (memory := figures.memory_at(cell, MOMENTS[-1]))]
    if not held:
        return None
    kinds = [kind for kind in CATEGORIES if any(_bytes(memory, kind) for _, memory in held)]
    note = (
        "Memory of the rank that holds most, after the first update, which creates the optimizer state. The stroke "
        "marks the formulas' parameters, gradients and optimizer state."
    )
    if any(memory.other_bytes is None for _, memory in held):
        note += " Other memory is unknown without the allocator's count, and where an earlier variant's memory "
        note += "was freed in between."
    return document.Bars(
        bars=tuple(_memory_bar(cell, memory) for cell, memory in held),
        legend=tuple((CATEGORIES.index(kind) + 1, "■", _WORDS.get(kind, kind)) for kind in kinds),
        note=note,
    )


def _memory_bar(cell: DdpCell, memory: StateMemory) -> document.Bar:
    name, expected = cell.contender.label, figures.expected_at(cell, memory.moment)
    parts = [(_WORDS.get(kind, kind), number, _bytes(memory, kind)) for number, kind in enumerate(CATEGORIES, start=1)]
    return document.Bar.of(
        name,
        parts,
        units.format_bytes,
        figure=units.format_bytes(memory.known_bytes + (memory.other_bytes or 0)),
        mark=expected.known_bytes if expected and expected.known_bytes else None,
        mark_tip=f"{name}, by formula: {units.format_bytes(expected.known_bytes)}" if expected else "",
    )


def _bytes(memory: StateMemory, kind: str) -> int:
    size: int | None = getattr(memory, f"{kind}_bytes")
    return size or 0


_STEADY = 1.05
"""Largest ratio between repeats of one step on an undisturbed machine."""
_MOSTLY = 0.5
_APART = 0.5
"""Smallest deviation of parameters (DdpCell.deviation) that rounding does not explain."""


def ddp_verdict(run: DdpRun) -> document.Verdict:
    return document.Verdict(sentences=tuple(_sentences(run)), cautions=tuple(_cautions(run)))


def _sentences(run: DdpRun) -> Iterator[str]:
    compared = [cell for cell in figures.timed(run) if figures.exposed_s(cell) is not None]
    winner, theirs = figures.best(compared), figures.best_ddp(compared)
    if winner is None:
        if first := figures.best(run.cells):
            took = units.format_time(figures.step_s(first) or 0.0)
            if len(figures.timed(run)) > 1:
                yield f"{first.contender.label} has the shortest step, {took}."
            else:
                yield f"Only one variant was measured: {first.contender.label}, {took}."
        return
    next_best = figures.best(c for c in compared if c.contender.kind not in ("torch_ddp", winner.contender.kind))
    verb = "has the shortest step and adds"
    if (ratio := figures.step_ratio(winner)) and ratio.decision == "lower":
        yield _saved(winner)
        winner, verb = next_best or winner, "adds"
    yield _adds(winner, verb)
    if theirs and theirs is not winner:
        yield _against(winner, theirs, compared)
    if theirs is winner and next_best:
        yield f"Next best: {next_best.contender.label} adds {_added(next_best)}."
    yield from _hidden(winner)


def _saved(cell: DdpCell) -> str:
    without_s, shorter_s = figures.baseline_s(cell) or 0.0, -(figures.exposed_s(cell) or 0.0)
    why = ", because each rank updates only a part of the parameters" if cell.contender.kind == "sharded" else ""
    return (
        f"A step with {cell.contender.label} takes {units.format_time(without_s - shorter_s)}, "
        f"{units.format_time(shorter_s)} less than one without communication{why}."
    )


def _adds(cell: DdpCell, verb: str) -> str:
    without = units.format_time(figures.baseline_s(cell) or 0.0)
    if (figures.exposed_s(cell) or 0.0) <= 0:
        return f"{cell.contender.label} {verb} no exposed communication above the noise to a step of {without}."
    return f"{cell.contender.label} {verb} {_added(cell)} of exposed communication to a step of {without}."


def _added(cell: DdpCell) -> str:
    added_s, bounds = figures.exposed_s(cell) or 0.0, figures.exposed_range_s(cell)
    if added_s <= 0:
        return "nothing above the noise"
    between = f" (95 % interval {units.format_time(bounds[0])} to {units.format_time(bounds[1])})" if bounds else ""
    return f"{units.format_time(added_s)}{between}"


def _against(winner: DdpCell, theirs: DdpCell, compared: Sequence[DdpCell]) -> str:
    """Example: 'That is 30.0 % of the 17.1 ms (95 % interval …) that …', or a remark that the intervals overlap."""
    sizes = sum(cell.contender.kind == "torch_ddp" for cell in compared)
    at = f"at {'its best bucket size, ' if sizes > 1 else ''}{theirs.contender.bucket_size_mb:g} MB"
    added_s, theirs_s = figures.exposed_s(winner) or 0.0, figures.exposed_s(theirs) or 0.0
    own, other = figures.exposed_range_s(winner), figures.exposed_range_s(theirs)
    if added_s <= 0 or theirs_s <= 0:
        return f"torch DDP adds {_added(theirs)} {at}."
    if own and other and own[1] >= other[0]:
        return f"That is within the uncertainty of the {_added(theirs)} that torch DDP adds {at}."
    return f"That is {units.format_percent(added_s / theirs_s)} of the {_added(theirs)} that torch DDP adds {at}."


def _hidden(cell: DdpCell) -> Iterator[str]:
    hidden, alone_s = figures.hidden(cell), figures.alone_s(cell)
    if hidden is None or alone_s is None:
        return
    alone = units.format_time(alone_s)
    if hidden < 0:
        yield (
            f"All of it is exposed: the same messages take {alone} alone, and in the step they slow the computation as "
            "well."
        )
    elif hidden < _MOSTLY:
        yield (
            f"Most of the communication is exposed: only {units.format_percent(hidden)} of the {alone} that the "
            "messages take alone is hidden behind computation."
        )
    else:
        yield (
            f"{units.format_percent(hidden)} of the {alone} that the messages take alone is hidden behind computation."
        )


def _cautions(run: DdpRun) -> Iterator[str]:
    yield from interruption(run, "variant")
    least, most = figures.baseline_range_s(run) or (0.0, 0.0)
    if most > _STEADY * least:
        yield (
            f"Warning: the step without communication took {units.format_time(least)} next to one variant and "
            f"{units.format_time(most)} next to another: unstable, so exposed times are unreliable."
        )
    if late := [cell.contender.label for cell in figures.timed(run) if figures.waits_for_host(cell)]:
        yield (
            f"Warning: the GPU may wait for Python, which is less than 1 % of a step ahead: {'; '.join(late)}. Exposed "
            "communication there may include these waits."
        )
    if vague := [cell.contender.label for cell in figures.timed(run) if figures.is_vague(cell)]:
        yield f"Warning: doubtful, with intervals wider than half the messages' time alone: {'; '.join(vague)}."
    if apart := [cell.contender.label for cell in run.cells if (cell.deviation or 0.0) > _APART]:
        yield (
            f"Warning: parameters differ from one process's: {'; '.join(apart)}. Wrong gradients or updates do that, "
            "and gradients of rounding alone, dropout, or batches without a seed."
        )
    for cell in run.cells:
        if cell.failure:
            yield f"{cell.contender.label} failed: {why_failed(cell.failure)}."


TERMS = (
    (
        "without communication",
        "The same step on the same ranks without messages, alternating with each variant: some steps of one, then "
        "some of the other. If noted, the device is held idle before each step until the host is ahead. The figures of "
        "the step without communication are the medians of these turns.",
    ),
    (
        "exposed communication",
        "Time that communication adds to a step: the step minus the same step without communication, from "
        "alternating turns. It includes the slowdown of concurrent computation. Its bounds come from the 95 % interval "
        "of the ratio of both steps, compared pair by pair.",
    ),
    (
        "bucket",
        "Gradients that are sent together, in one collective, once the last of them is there. 1 MB is 1,000,000 bytes.",
    ),
    (
        "by formula",
        "P parameters of e bytes, with an optimizer that keeps k values for each, on N ranks: eP bytes of parameters, "
        "eP of gradients and keP of optimizer state on every rank. The sharded optimizer has keP/N of the state (ZeRO "
        "stage 1) and by peer copies eP/N of the gradients (stage 2), and FSDP2 the N-th part of all three (stage 3).",
    ),
)


def ddp_cell_line(cell: DdpCell) -> str:
    if cell.failure:
        return f"{cell.contender.label}: {why_failed(cell.failure)}"
    step_s, added_s = figures.step_s(cell), figures.exposed_s(cell)
    told = [f"{units.format_time(step_s)} per step"] if step_s is not None else []
    told += [f"{units.format_time(added_s)} of it exposed"] if added_s is not None and added_s > 0 else []
    return f"{cell.contender.label}: {', '.join(told)}"


def _sections(run: DdpRun) -> Iterator[document.Section]:
    yield document.Section.of("Exposed communication", exposed_bars(run), document.Sentences.of(facts(run), "note"))
    rows = figures.ddp_rows(run)
    copies = " peer_copy: steplab's copies between GPUs." * any(row["transport"] == "peer_copy" for row in rows)
    yield document.Section.of(
        "Time and communication",
        _table("time", figures.time_figures(run), rows, f"Medians of the slowest rank.{copies}", document.RESULT),
    )
    yield document.Section.of("Bucket size", document.later(bucket_curve, run), document.Sentences.of(model_words(run)))
    held = [row for row in rows if row[f"{MOMENTS[-1]}_bytes"] is not None]
    no_moment = " Overlapped updates have no moment before the update." * any(r["update"] == "overlapped" for r in held)
    yield document.Section.of(
        "Memory per rank", memory_bars(run), _table("memory", figures.MEMORY, held, _MEMORY_CAPTION + no_moment)
    )
    yield document.Section.of("One step of each strategy", document.later(timelines, run))
    yield document.Section.notes(notes_of(run))


def _tiles(run: DdpRun) -> Iterator[document.Fact]:
    added = [row for row in figures.ddp_rows(run) if row["exposed_s"] is not None]
    yield from extremes(
        added,
        ("variant",),
        ("step_s", min, TIME, "shortest step with communication"),
        ("exposed_s", max, TIME, "most exposed communication"),
        ("hidden", max, SHARE, "largest share of communication hidden"),
        ("peak_bytes", min, BYTES, "least peak of a rank"),
    )


_VARIANT = document.Column(key="variant")
_MEMORY_CAPTION = (
    "Memory of the rank that holds most, in the first step: its update creates the optimizer state. Parameters, "
    "gradients, optimizer state and other: after the update."
)


def _table(
    name: str, shown: Sequence[Figure[DdpCell]], rows: Sequence[Row], caption: str, *last: document.Column
) -> document.Table:
    return document.Table(
        name=name, columns=(_VARIANT, *document.Column.of(shown), *last), rows=tuple(rows), caption=caption
    )


REPORT = RecordReport(
    chapter="Data parallelism",
    anchor="ddp",
    title=lambda run: f"Data parallelism: {asked(run)}",
    subtitle=lambda run: dotted(ranks_words(run), made(run, "study"), quoted_name(run)),
    called=lambda run: run.name or asked(run),
    answer=ddp_verdict,
    sections=_sections,
    tiles=_tiles,
    rows=figures.ddp_rows,
    terms=TERMS,
)
