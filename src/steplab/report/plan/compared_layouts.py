"""Compares numbers and kinds of GPU, networks and steps for one job, each with its fastest layout."""

from collections.abc import Iterator, Sequence

from steplab import units
from steplab.records.layout_plan import LayoutCandidate, LayoutPlan
from steplab.records.rows import Row
from steplab.report.kit.document import MOST_ROWS, Column, Document, Section, Table, Verdict, row_of
from steplab.report.kit.quantities import COUNT, DIGITS, NUMBER, PERCENT
from steplab.report.plan.layouts import network_words, time_words, training_days
from steplab.specs.study import in_common, labels


def compared_layouts_document(plans: Sequence[LayoutPlan]) -> Document:
    names = _names(plans)
    table = _table(plans, names)
    return Document(
        title=f"Layouts of {units.counted(len(plans), 'alternative')}",
        subtitle=_shared(plans),
        verdict=Verdict(sentences=tuple(_verdict(plans, names))),
        sections=(
            Section.of("Best layout of each", table),
            Section.notes(dict.fromkeys(note for plan in plans for note in plan.notes)),
            Section.notes(dict.fromkeys(source for plan in plans for source in plan.sources), "Sources"),
        ),
        data=table.rows,
    )


def _names(plans: Sequence[LayoutPlan]) -> list[str]:
    steps = labels([plan.spec for plan in plans]) if len({plan.spec for plan in plans}) > 1 else [""] * len(plans)
    networks = [f"{_network(plan)} between nodes" for plan in plans]
    batches = [units.counted(plan.global_batch, "sequence") for plan in plans]
    telling = [[f"{plan.gpus} × {plan.gpu}" for plan in plans]]
    if len({(plan.gpu, network) for plan, network in zip(plans, networks, strict=True)}) > len({p.gpu for p in plans}):
        telling.append(networks)  # they do not follow from the GPU
    if len(set(batches)) > 1:
        telling.append(batches)
    return [" · ".join(filter(None, (*words, step))) for *words, step in zip(*telling, steps, strict=True)]


def _network(plan: LayoutPlan) -> str:
    stated, reached = plan.network_stated_bytes_per_s, plan.network_bytes_per_s
    if stated:
        return f"{8 * stated / 1e9:g} Gb/s"
    return units.format_rate(reached, "B/s") if reached else "unknown network"


def _shared(plans: Sequence[LayoutPlan]) -> str:
    words = [word for word in in_common([plan.spec for plan in plans]) if not word.startswith("batch ")]
    if len({plan.global_batch for plan in plans}) == 1:
        words.append(f"global batch of {units.counted(plans[0].global_batch, 'sequence')}")
    return " · ".join(words)


def _best(plan: LayoutPlan) -> LayoutCandidate | None:
    first = plan.candidates[0] if plan.candidates else None
    return first if first and first.time else None


def _verdict(plans: Sequence[LayoutPlan], names: Sequence[str]) -> Iterator[str]:
    found = [(name, plan, best) for name, plan in zip(names, plans, strict=True) if (best := _best(plan))]
    timed = [(plan.tokens_per_step / best.time.seconds, name, plan, best) for name, plan, best in found if best.time]
    if timed:
        rate, name, _, best = max(timed, key=lambda one: one[0])
        assert best.time is not None
        yield (
            f"Most tokens/s: {name}, with {best.options}: {units.format_count(rate)} tokens/s, a step in about "
            f"{time_words(best.time)}."
        )
        each, who = max((rate / plan.gpus, name) for rate, name, plan, _ in timed)
        if who != name:
            yield f"Most for each GPU: {who}, {units.three_digits(each)} tokens/s."
    if assumed := dict.fromkeys(network_words(plan) for _, plan, _ in found if plan.between_nodes):
        yield f"Times between nodes are assumed, not measured: each GPU sends {units.listed(list(assumed))}."
    if without := [name for name, plan in zip(names, plans, strict=True) if not _best(plan)]:
        yield f"No layout with a known time fits for {units.listed(without)}."


def _table(plans: Sequence[LayoutPlan], names: Sequence[str]) -> Table:
    return Table(
        name="alternatives",
        columns=(
            Column(key="alternative", wraps_from=18),
            Column(key="options", header="best layout", wraps_from=30),
            Column(key="step_s", header="step"),
            Column(key="low_s", header="at least", rank=1),
            Column(key="high_s", header="at most", rank=1),
            Column(key="tokens_per_s", header="tokens/s"),
            Column(key="tokens_per_s_per_gpu", header="per GPU", quantity=DIGITS),
            Column(key="mfu", header="MFU", quantity=PERCENT),
            Column(key="days", quantity=DIGITS),
            Column(key="gpu_hours", header="GPU-hours", quantity=COUNT),
            Column(key="reserved_bytes", header="reserved"),
            Column(key="verdict", header="memory", rank=2),
            Column(key="num_fitting", header="fitting", quantity=NUMBER, rank=3),
        ),
        rows=tuple(_row(name, plan) for name, plan in zip(names, plans, strict=True)),
        caption="The fastest layout of each alternative that fits, by the step time of its slowest ranks, with a 90 % "
        "interval. MFU counts causal FLOPs. Memory is of the ranks that need most; fitting is the number of layouts "
        "that fit for certain. Alternatives on one kind of GPU share most of their error, so their order is surer than "
        "the intervals suggest. `steplab plan layout` with one value for each option ranks all layouts of one of them.",
        first=MOST_ROWS,
    )


def _row(name: str, plan: LayoutPlan) -> Row:
    best = _best(plan)
    row: Row = {"alternative": name, **row_of(plan, "gpus", "gpu", "global_batch", "network_bytes_per_s")}
    row |= dict.fromkeys(("options", "step_s", "low_s", "high_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu"))
    row |= dict.fromkeys(("days", "gpu_hours", "reserved_bytes", "verdict"))
    row |= {"num_fitting": sum(each.verdict == "fits" for each in plan.candidates)}
    if best is None or best.time is None:
        closest = plan.candidates[0] if plan.candidates else None
        return row | {"options": f"{closest.layout}: {closest.reason}" if closest else None, "verdict": "does not fit"}
    rate = plan.tokens_per_step / best.time.seconds
    row |= {"options": best.options, "step_s": best.time.seconds, **row_of(best.time, "low_s", "high_s")}
    row |= {"tokens_per_s": round(rate), "tokens_per_s_per_gpu": rate / plan.gpus}
    row |= {"mfu": next((used.value for used in plan.utilizations if used.convention == "causal"), None)}
    if plan.tokens:
        days = training_days(plan, plan.tokens, best.time.seconds)
        row |= {"days": days, "gpu_hours": 24 * days * plan.gpus}
    return row | row_of(best, "reserved_bytes", "verdict")
