"""Reports a predicted memory peak: components with formulas, and the GPUs that it fits."""

from collections.abc import Iterator, Sequence

from steplab import units
from steplab.records.prediction import CardFit, MemoryPrediction, Term
from steplab.records.rows import Row, Scalar
from steplab.records.run import ModelFacts
from steplab.report.kit.document import Column, Document, Section, Sentences, Table, Verdict, row_of
from steplab.report.kit.quantities import LABEL, NUMBER, SHARE
from steplab.report.memory.categories import category_word
from steplab.report.memory.words import exactly
from steplab.specs.model import TransformerShape
from steplab.specs.step import StepSpec, describe

_SMALL = 0.001
"""Share of the peak below which components come last and terminals omit them."""
ANSWERS = {
    "fits": "fits on {}",
    "too tight to promise": "may fit on {}, depending on how far memory is fragmented; "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True helps",
    "does not fit": "does not fit on {}",
    "not known": "cannot be judged on {}, because the prediction is a lower bound",
}
"""Sentence parts by verdict on a GPU (records.prediction.CardFit)."""
_ABOUT = {"dry_run": "", "traced": "about ", "estimate": "about ", "at_least": "at least "}


def plan_document(spec: StepSpec, prediction: MemoryPrediction) -> Document:
    peak = f"{_ABOUT[prediction.kind]}{exactly(prediction.peak_bytes)} allocated, in {prediction.peak_phase}"
    return Document(
        title="Predicted peak memory",
        subtitle=f"{describe(spec)}{parameter_words(prediction.model)}",
        verdict=Verdict(
            sentences=(*_fits(prediction.cards), f"The peak{_of_rank(prediction)} is {peak}: {prediction.peak_where}.")
        ),
        sections=tuple(_sections(spec, prediction)),
        data=prediction_rows(prediction),
    )


def parameter_words(model: ModelFacts | None) -> str:
    """Example: ' · 46.7 G parameters, 12.9 G active'; empty for an unknown model."""
    if model is None:
        return ""
    active = model.num_active_parameters
    told = f", {units.format_count(active)} active" if active and active != model.num_parameters else ""
    return f" · {units.format_count(model.num_parameters)} parameters{told}"


def _of_rank(prediction: MemoryPrediction) -> str:
    if len(prediction.ranks) < 2:
        return " of every rank" if prediction.ranks else ""
    one = str(prediction.rank).startswith("rank ")
    return f" of {prediction.rank}, which {'needs' if one else 'need'} most,"


def _fits(cards: Sequence[CardFit]) -> Iterator[str]:
    named = {verdict: [card.gpu for card in cards if card.verdict == verdict] for verdict in ANSWERS}
    told = [answer.format(_some(verdict, named[verdict])) for verdict, answer in ANSWERS.items() if named[verdict]]
    if told:
        yield f"The step {'; '.join(told)}."


def _some(verdict: str, gpus: Sequence[str]) -> str:
    if len(gpus) <= _MOST_NAMED:
        return ", ".join(gpus)
    edge, which = (gpus[0], "largest") if verdict == "does not fit" else (gpus[-1], "smallest")
    return f"{len(gpus)} known GPUs ({which}: {edge})"


_MOST_NAMED = 3


def _sections(spec: StepSpec, prediction: MemoryPrediction) -> Iterator[Section]:
    if prediction.cards:
        yield Section.of("GPUs", _cards(prediction), Sentences.of(_needs(prediction)))
    yield Section.of("Memory by rank", _ranks(prediction))
    yield Section.of("Peak by category", _categories(prediction))
    yield Section.of("Peaks by phase", _phases(prediction))
    yield Section.of("Components of the peak", _summands(spec, prediction))
    yield Section.notes(prediction.notes)


_SIZE = (Column(key="total_bytes", header="size"), Column(key="total_bytes", header="bytes", quantity=NUMBER, rank=1))


def _ranks(prediction: MemoryPrediction) -> Table:
    pipeline = any(rank.in_flight > 1 for rank in prediction.ranks)
    return Table.of(
        "ranks",
        prediction.ranks,
        (
            Column(key="ranks"),
            Column(key="has", header="parts of the model", wraps_from=14, rank=2),
            *((Column(key="in_flight", quantity=LABEL, rank=3),) if pipeline else ()),
            Column(key="parameters_bytes", header="parameters", rank=1),
            Column(key="gradients_bytes", header="gradients", rank=1),
            Column(key="optimizer_bytes", header="optimizer state", rank=1),
            Column(key="peak_bytes", header="peak"),
            Column(key="reserved_bytes", header="reserved"),
        ),
        caption="The first rank, with the largest shards. Gradients: before the update. Peak: most allocated at once; "
        "reserved: held by the allocator."
        + (" In flight is the most microbatches between their two passes at once." if pipeline else ""),
    )


def _categories(prediction: MemoryPrediction) -> Table:
    sizes = {category_word(category): size for category, size in prediction.at_peak.items()}
    sizes["peak, at least" if prediction.kind == "at_least" else "peak"] = prediction.peak_bytes
    return Table(
        name="categories",
        columns=(Column(key="name", header="category"), *_SIZE, Column(key="share", quantity=SHARE)),
        rows=tuple(
            {"name": name, "total_bytes": size, "share": size / prediction.peak_bytes} for name, size in sizes.items()
        ),
    )


def _phases(prediction: MemoryPrediction) -> Table:
    return Table(
        name="phases",
        columns=(Column(key="phase"), *_SIZE),
        rows=tuple({"phase": name, "total_bytes": size} for name, size in prediction.phase_peaks.items()),
    )


def _summands(spec: StepSpec, prediction: MemoryPrediction) -> Table:
    large = [term for term in prediction.terms if _total_bytes(term) >= _SMALL * prediction.peak_bytes]
    small = [term for term in prediction.terms if _total_bytes(term) < _SMALL * prediction.peak_bytes]
    symbols = _symbols(spec, spec.model.shape) if spec.model.shape else "its sizes as numbers"
    caption = f"A formula gives the bytes of one tensor, with {symbols}."
    if small:
        size = units.format_bytes(sum(map(_total_bytes, small)))
        caption += f" The last {units.counted(len(small), 'row')}, each below {100 * _SMALL:g} % of the peak, "
        caption += f"sum to {size}."
    return Table(
        name="summands",
        columns=(
            Column(key="category", rank=2),
            Column(key="what", header="tensor", wraps_from=20),
            Column(key="formula", wraps_from=12),
            Column(key="num_bytes", header="bytes each", quantity=NUMBER, rank=3),
            Column(key="count", quantity=LABEL, rank=1),
            Column(key="total_bytes", header="total"),
        ),
        rows=tuple({**_summand(term), "category": category_word(term.category)} for term in (*large, *small)),
        caption=caption,
        first=len(large) if small else None,
    )


def _symbols(spec: StepSpec, shape: TransformerShape) -> str:
    microbatches = spec.num_microbatches
    sizes = {
        "B": spec.batch // microbatches,
        "T": spec.context,
        "d": shape.d_model,
        "f": shape.d_ff,
        "h": shape.num_heads,
    }
    sizes |= {"k": shape.num_kv_heads or 0, "L": shape.num_layers, "V": shape.vocab_size, "P": shape.learned_positions}
    named = ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items() if size)  # those that the model has
    if spec.layout.world_size == 1:
        return named
    return f"{named}, n = {spec.layout.tp} ranks of tp, and W the weights of the rank's part of the model"


def _cards(prediction: MemoryPrediction) -> Table:
    return Table.of(
        "cards",
        prediction.cards,
        (
            Column(key="gpu", header="GPU"),
            Column(key="usable_bytes", header="usable", value=_usable),
            Column(key="verdict"),
        ),
    )


def _usable(card: CardFit) -> Scalar:
    return card.usable_bytes if card.usable_is_known else f"≈ {units.format_bytes(card.usable_bytes)}"


def _needs(prediction: MemoryPrediction) -> Iterator[str]:
    peak, least, safe = prediction.peak_bytes, prediction.least_device_bytes, prediction.safe_device_bytes
    size = units.format_bytes
    if least is not None:
        yield (
            f"With less than {size(least)} the step does not fit: the peak, and {size(least - peak)} that CUDA takes "
            "outside of the allocator."
        )
    if least is not None and safe is not None and prediction.reserved_bytes is not None:
        reserved = prediction.reserved_bytes
        yield (
            f"With {size(safe)} it fits: {size(reserved)} that the allocator would hold, cache and gaps included, "
            f"{size(safe - reserved - (least - peak))} for gaps that the dry run does not see, and those "
            f"{size(least - peak)}. Between the two it depends on fragmentation."
        )
    if any(not card.usable_is_known for card in prediction.cards):
        yield "≈ marks a part of the data sheet's capacity; the usable memory of that GPU was not measured."


def prediction_rows(prediction: MemoryPrediction) -> list[Row]:
    """One row per peak, memory that a device needs, phase, rank, category, component, GPU and note; `row` names the
    kind.

    The `total_bytes` of all categories sum to the peak; so do those of all components, num_bytes × count each. A GPU's
    are its usable bytes. `bound` is a records.prediction.PredictionKind.
    """
    sizes = (
        ("peak", f"in {prediction.peak_phase}: {prediction.peak_where}", prediction.peak_bytes),
        ("device", "reserved by the allocator", prediction.reserved_bytes),
        ("device", "a device must have at the least", prediction.least_device_bytes),
        ("device", "a device must have to be sure", prediction.safe_device_bytes),
        *(("phase", phase, size) for phase, size in prediction.phase_peaks.items()),
        *(("rank", f"{rank.ranks}: {rank.has}", rank.peak_bytes) for rank in prediction.ranks),
        *(("reserved by rank", rank.ranks, rank.reserved_bytes) for rank in prediction.ranks),
    )
    rows: list[Row] = [{"row": row, "what": what, "total_bytes": size} for row, what, size in sizes if size is not None]
    rows += [{"row": "category", "category": name, "total_bytes": size} for name, size in prediction.at_peak.items()]
    rows += [{"row": "summand", **_summand(term)} for term in prediction.terms]
    rows += [{"row": "card", **_card(card)} for card in prediction.cards]
    rows += [{"row": "note", "what": note} for note in prediction.notes]
    return [{**dict.fromkeys(_FIELDS), **row, "bound": prediction.kind} for row in rows]


_FIELDS = ("row", "category", "what", "formula", "num_bytes", "count", "total_bytes", "verdict")


def _summand(term: Term) -> Row:
    return row_of(term, "category", "what", "formula", "num_bytes", "count") | {"total_bytes": _total_bytes(term)}


def _total_bytes(term: Term) -> int:
    return term.num_bytes * term.count


def _card(card: CardFit) -> Row:
    source = "read from one such GPU" if card.usable_is_known else "part of the data sheet's capacity"
    return {"what": card.gpu, "formula": source, "total_bytes": card.usable_bytes, "verdict": card.verdict}
