from collections import Counter
from collections.abc import Iterator

from steplab import units
from steplab.records.layout_plan import LayoutCandidate, LayoutPlan, LayoutTime
from steplab.records.rows import Row
from steplab.report.kit.document import Bar, Bars, Column, Document, Section, Table, Verdict, even, row_of
from steplab.report.kit.quantities import LABEL, MESSAGE, NUMBER
from steplab.report.plan.document import parameter_words
from steplab.report.plan.time import mfu_words
from steplab.specs.step import describe

_FIRST = 12
_PARTS = (
    ("compute_s", "computation", 1),
    ("waiting_s", "waiting for the host", 7),
    ("optimizer_s", "optimizer", 6),
    ("copies_s", "copies of messages", 4),
    ("exposed_s", "exposed communication", 2),
    ("bubble_s", "pipeline fills and drains", 8),
)
"""Field of the predicted time, label, colour number."""
_MEMORY = (("allocated", 1), ("also reserved", 3), ("room to be sure", 5))


def layouts_document(plan: LayoutPlan) -> Document:
    fitting = [each for each in plan.candidates if each.time]
    return Document(
        title=f"Layouts on {units.counted(plan.gpus, 'GPU')}, {plan.gpu}",
        subtitle=_subtitle(plan),
        verdict=Verdict(sentences=tuple(_verdict(plan, fitting))),
        sections=tuple(_sections(plan, fitting)),
        data=layout_rows(plan),
    )


def _subtitle(plan: LayoutPlan) -> str:
    step = describe(plan.spec).replace(f" batch {plan.spec.batch} ·", "")
    return f"{step}{parameter_words(plan.model)} · global batch of {units.counted(plan.global_batch, 'sequence')}"


def _verdict(plan: LayoutPlan, fitting: list[LayoutCandidate]) -> Iterator[str]:
    number = len(plan.candidates)
    if not fitting or fitting[0].time is None:
        yield _nothing_found(plan)
        return
    best, time = fitting[0], fitting[0].time
    if number == 1:
        known = {"fits": "fits", "does not fit": f"does not fit: {best.reason}; the time is for enough memory"}
        fits = known.get(best.verdict, "is too tight to promise")
        yield f"A step takes about {time_words(time)}; {best.options} {fits}."
    else:
        yield f"{_how_many_fit(fitting, number)} Fastest: {best.options}, about {time_words(time)} a step."
    tokens = plan.tokens_per_step / time.seconds
    each = f", {units.format_rate(tokens / plan.gpus, ' tokens/s')} on each GPU" if plan.gpus > 1 else ""
    yield f"That is {units.format_rate(tokens, ' tokens/s')}{each}{mfu_words(plan.utilizations)}."
    if faster := _faster_but_tight(fitting):
        yield faster
    if plan.num_as_fast > 1:
        yield f"The first {plan.num_as_fast} are too close to call."
    if plan.tokens:
        yield f"{units.format_count(plan.tokens)} tokens {_training(plan, plan.tokens, time)}."
    if plan.between_nodes:
        yield f"Times between nodes are assumed, not measured: each GPU sends {network_words(plan)}."
    if _may_recompute(plan):
        yield "--checkpointing auto also tries what recomputation lets fit."
    if slow := [option for field, value, option in _SLOW if getattr(plan.spec, field) == value]:
        lists = "; options take lists, as --attention plain,sdpa, and then the best layouts stand side by side"
        yield f"Steps are mostly faster with {' '.join(slow)}{lists if number > 1 else ''}."


def _how_many_fit(fitting: list[LayoutCandidate], number: int) -> str:
    fit = sum(each.verdict == "fits" for each in fitting)
    tight = len(fitting) - fit
    layouts = units.counted(number, "layout")
    of_all = f"{fit} of {layouts} {'fits' if fit == 1 else 'fit'}" if fit else f"None of {layouts} is known to fit"
    return f"{of_all}; {tight} {_VERDICTS['too tight to promise'][tight > 1]}." if tight else f"{of_all}."


def _faster_but_tight(fitting: list[LayoutCandidate]) -> str | None:
    """States the fastest layout that may lack memory, if it is faster than the best that certainly fits."""
    best = fitting[0]
    tight = [(each.time.seconds, each.options) for each in fitting if each.time and each.verdict != "fits"]
    if best.verdict != "fits" or best.time is None or not tight or min(tight)[0] >= best.time.seconds:
        return None
    seconds, options = min(tight)
    return f"Faster, if its memory is enough, is {options}, about {units.format_time(seconds)} a step."


_SLOW = (
    ("precision", "fp32", "--precision bf16"),
    ("attention", "plain", "--attention sdpa"),
    ("compile", "off", "--compile block"),
)


def network_words(plan: LayoutPlan) -> str:
    reached = units.format_rate(plan.network_bytes_per_s or 0.0, "B/s")
    stated = plan.network_stated_bytes_per_s
    if stated is None:
        return f"{reached} ({plan.network}, as given)"
    share = units.three_digits((plan.network_bytes_per_s or 0.0) / stated)
    return f"{reached} ({share} of the {8 * stated / 1e9:g} Gb/s of {plan.network})"


def _training(plan: LayoutPlan, tokens: float, time: LayoutTime) -> str:
    days, low, high = (training_days(plan, tokens, each) for each in (time.seconds, time.low_s, time.high_s))
    show = units.three_digits
    hours = units.format_count(24 * days * plan.gpus)
    return f"take about {show(days)} days ({show(low)} to {show(high)}), {hours} GPU-hours"


def training_days(plan: LayoutPlan, tokens: float, step_s: float) -> float:
    return tokens / plan.tokens_per_step * step_s / 86_400


def _may_recompute(plan: LayoutPlan) -> bool:
    return plan.spec.checkpointing == "none" and any(each.verdict == "does not fit" for each in plan.candidates)


def _nothing_found(plan: LayoutPlan) -> str:
    if len(plan.candidates) == 1:
        (only,) = plan.candidates
        hint = " --checkpointing auto recomputes enough." if _may_recompute(plan) else ""
        return f"Layout {only.layout} {_VERDICTS[only.verdict][0]}: {only.reason}.{hint}"
    number = units.counted(len(plan.candidates), "layout")
    untimed = sum(each.verdict == "fits" for each in plan.candidates)
    if untimed:
        return (
            f"{untimed} of {number} fit, but none has a known time: the bandwidth between nodes is not known. "
            "Give the bandwidth that one GPU reaches, as in --link network=45 (GB/s), or its adapter's, as in "
            "--link network=400Gb/s."
        )
    if _may_recompute(plan):
        return f"None of {number} fits. Plan again with --checkpointing auto, a shorter --context or more GPUs."
    if all(each.verdict == "not possible" for each in plan.candidates):
        return f"None of {number} is possible; the table says why.{_batch_that_divides(plan)}"
    return f"None of {number} fits; the table says why."


def _batch_that_divides(plan: LayoutPlan) -> str:
    over = plan.global_batch % plan.gpus
    if not over:
        return ""
    more = plan.global_batch - over + plan.gpus
    batches = f"{more - plan.gpus} or {more}" if more > plan.gpus else f"{more}"
    return f" --global-batch {batches} gives each of {units.counted(plan.gpus, 'GPU')} as many sequences as any other."


def time_words(time: LayoutTime) -> str:
    show = units.format_time
    return f"{show(time.seconds)} ({show(time.low_s)} to {show(time.high_s)} with a probability of 90 %)"


def _sections(plan: LayoutPlan, fitting: list[LayoutCandidate]) -> Iterator[Section]:
    if fitting:
        fits = fitting[0].verdict != "does not fit"
        yield Section.of("Layouts that fit" if fits else "The layout", _ranking(plan, fitting))
        yield Section.of("Time of a step", _time_bars(fitting[:_FIRST]))
        yield Section.of("Memory of the ranks that need most", _memory_bars(plan, fitting[:_FIRST]))
        yield Section.of("Communication of the fastest", _traffic(fitting[0]))
    others = [each for each in plan.candidates if not each.time]
    untimed = any(each.verdict not in ("does not fit", "not possible") for each in others)
    yield Section.of("Other layouts" if untimed else "Layouts that do not fit", _failing(others))
    yield Section.notes(plan.notes)
    yield Section.notes(plan.sources, "Sources")


def _ranking(plan: LayoutPlan, fitting: list[LayoutCandidate]) -> Table:
    return Table(
        name="fitting",
        columns=(
            Column(key="number", header="", quantity=LABEL),
            Column(key="options", wraps_from=30),
            Column(key="step_s", header="step"),
            Column(key="low_s", header="at least", rank=2),
            Column(key="high_s", header="at most", rank=2),
            Column(key="tokens_per_s", header="tokens/s", rank=1),
            Column(key="compute_s", header="computation", rank=4),
            Column(key="waiting_s", header="waiting", rank=3),
            Column(key="exposed_s", header="exposed", rank=3),
            Column(key="bubble_s", header="bubble", rank=3),
            Column(key="peak_bytes", header="allocated", rank=5),
            Column(key="reserved_bytes", header="reserved"),
            Column(key="verdict", header="memory", rank=1),
        ),
        rows=tuple(_row(plan, number, each) for number, each in enumerate(fitting, start=1)),
        caption="Those that fit first, each by the step time of its slowest ranks, with a 90 % interval. waiting: "
        "GPU idle, Python launches too slowly (eager steps, tensors that tp splits). exposed: added by communication. "
        "bubble: a pipeline fills and drains. Memory is of the ranks that need most. `steplab run` takes the options.",
        first=_FIRST,
    )


def _row(plan: LayoutPlan, number: int, each: LayoutCandidate) -> Row:
    time = each.time
    row: Row = {
        "number": number,
        **row_of(each, "layout", "options", "verdict", "reason"),
        **row_of(each, "peak_bytes", "reserved_bytes", "device_bytes", "worst_rank"),
    }
    if time is None:
        return row
    return row | {
        "step_s": time.seconds,
        **row_of(time, "low_s", "high_s"),
        "tokens_per_s": round(plan.tokens_per_step / time.seconds),
        **row_of(time, *(name for name, _, _ in _PARTS)),
        "as_fast": number <= plan.num_as_fast,
        "between_nodes": plan.between_nodes,
    }


def layout_rows(plan: LayoutPlan) -> list[Row]:
    """One row per layout, by time; layouts that do not fit come last, with a `reason`."""
    return even([_row(plan, number, each) for number, each in enumerate(plan.candidates, start=1)])


def _time_bars(shown: list[LayoutCandidate]) -> Bars:
    return Bars(
        bars=tuple(_time_bar(each, each.time) for each in shown if each.time),
        legend=tuple((color, "■", words) for _, words, color in _PARTS),
        note="Predicted step time of the slowest ranks, by component. The stroke marks the upper end of the "
        "90 % interval.",
    )


def _time_bar(each: LayoutCandidate, time: LayoutTime) -> Bar:
    show, high_s = units.format_time, time.high_s
    parts = [(words, color, getattr(time, name)) for name, words, color in _PARTS]
    most = f"at most {show(high_s)}"
    return Bar.of(each.options, parts, show, figure=show(time.seconds), mark=high_s, mark_tip=most)


def _memory_bars(plan: LayoutPlan, shown: list[LayoutCandidate]) -> Bars:
    bars, show, usable = [], units.format_bytes, float(plan.usable_bytes)
    capacity = f"a GPU has {show(plan.usable_bytes)}"
    for each in shown:
        peak, reserved, device = each.peak_bytes or 0, each.reserved_bytes or 0, each.device_bytes or 0
        values = (peak, reserved - peak, device - reserved)
        parts = [(words, color, value) for (words, color), value in zip(_MEMORY, values, strict=True)]
        figure, detail = show(reserved), each.worst_rank
        bars.append(Bar.of(each.options, parts, show, figure=figure, mark=usable, mark_tip=capacity, detail=detail))
    return Bars(
        bars=tuple(bars),
        legend=tuple((color, "■", words) for words, color in _MEMORY),
        note="Predicted peaks. The stroke marks the memory of a GPU; room to be sure: for unforeseen gaps and memory "
        "outside the allocator.",
    )


def _traffic(best: LayoutCandidate) -> Table:
    time = best.time
    assert time is not None
    return Table.of(
        "communication",
        sorted(time.traffic, key=lambda each: -each.exposed_s),
        (
            Column(key="axis"),
            Column(key="collective", value=lambda each: each.collective.replace("_", "-")),
            Column(key="carries", wraps_from=12),
            Column(key="phase"),
            Column(key="ranks", quantity=LABEL),
            Column(key="link", rank=2),
            Column(key="messages", quantity=NUMBER),
            Column(key="total_bytes", header="bytes", quantity=MESSAGE),
            Column(key="wire_bytes", header="sent", quantity=MESSAGE, rank=1, value=lambda a: round(a.wire_bytes)),
            Column(key="alone_s", header="alone"),
            Column(key="exposed_s", header="exposed"),
        ),
        caption=f"{best.options}, {time.ranks}, in one step. alone: the messages without computation; exposed: "
        "not hidden by it.",
        empty="these ranks send nothing",
    )


_VERDICTS = {
    "fits": ("fits but has no known time", "fit but have no known time"),
    "too tight to promise": ("is too tight to promise", "are too tight to promise"),
    "does not fit": ("does not fit", "do not fit"),
    "not possible": ("is not possible", "are not possible"),
}


def _failing(others: list[LayoutCandidate]) -> Table:
    counted = Counter(each.verdict for each in others)
    said = ", ".join(f"{number} {_VERDICTS[verdict][number > 1]}" for verdict, number in counted.items())
    return Table.of(
        "failing",
        others,
        (
            Column(key="layout"),
            Column(key="peak_bytes", header="allocated", note="Allocated is of the smallest micro-batch."),
            Column(key="reason", wraps_from=30),
        ),
        f"{units.counted(len(others), 'layout')}: {said}." if len(counted) > 1 else "",
        first=_FIRST,
    )
