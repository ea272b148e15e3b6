from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import TypeVar

from steplab import units
from steplab.records.memory_profile import Allocation, LeftOut, MemoryProfile, SavedTensors, tensor_bytes
from steplab.records.prediction import MemoryPrediction
from steplab.records.rows import Row, Scalar
from steplab.records.run import Run
from steplab.report.kit.document import Column, Table
from steplab.report.kit.grouping import grouped
from steplab.report.kit.quantities import BYTES, NUMBER, SHARE, Quantity, quotient
from steplab.report.memory.categories import category_word
from steplab.report.memory.figures import Part, allocated_bytes, error_text, parts, saved_bytes, whole
from steplab.specs.model import TransformerShape
from steplab.specs.step import StepSpec

_OF_PARAMETERS = ("parameters", "gradients", "optimizer_state", "autocast_copies")
_WIDTHS = {"residual stream": "width", "inner feed-forward": "inner width", "logits": "vocabulary"}
"""Name of the last dimension of activations."""


def shaped_as(shape: Sequence[int], spec: StepSpec | None) -> str | None:
    """Activation that has this shape: 'attention scores' or one of _WIDTHS; None if several or none have it."""
    sizes = spec.model.shape if spec else None
    if spec is None or sizes is None:
        return None
    if _is_scores(shape, spec, sizes):
        return "attention scores"
    names = dict(zip((sizes.d_model, sizes.d_ff, sizes.vocab_size), _WIDTHS, strict=True))
    is_clear = len(names) == len(_WIDTHS) and len(shape) > 1 and prod(shape[:-1]) == spec.tokens
    return names.get(shape[-1]) if is_clear else None


def _is_scores(shape: Sequence[int], spec: StepSpec, sizes: TransformerShape) -> bool:
    """True for batch × heads × context × context in 3 or 4 dimensions.

    False if queries, keys and values, or their halves in the rotary embedding, have the same shape.
    """
    square = len(shape) in (3, 4) and tuple(shape[-2:]) == (spec.context, spec.context)
    if not square or not sizes.num_heads or prod(shape[:-2]) != spec.batch * sizes.num_heads:
        return False
    of_one_head = (sizes.d_ff, sizes.vocab_size) if sizes.num_heads == 1 else ()
    return spec.context not in (sizes.head_dim, sizes.head_dim // 2, *of_one_head)


def derivation(shape: Sequence[int], dtype: str | None, spec: StepSpec | None) -> str | None:
    """Example: 'batch × heads × context × context × bytes of float32 = 4 × 12 × 512 × 512 × 4'.

    Without names if the spec does not identify the dimensions; None for an unknown dtype.
    """
    size = tensor_bytes(shape, dtype)
    if size is None or not shape:
        return None
    per_element = size // prod(shape) if prod(shape) else 0
    figures = " × ".join(f"{n}" for n in (*shape, per_element))
    names = _names(shape, spec)
    if names is None:
        return f"{figures} ({dtype})"
    return f"{' × '.join(names)} × bytes of {dtype} = {figures}"


def _names(shape: Sequence[int], spec: StepSpec | None) -> list[str] | None:
    if spec is None:
        return None
    by_token = len(shape) == 3 and tuple(shape[:2]) == (spec.batch, spec.context)
    if spec.model.shape is None:
        return ["batch", "context", "width"] if by_token else None
    kind = shaped_as(shape, spec)
    if kind == "attention scores":
        return [*(("batch", "heads") if len(shape) == 4 else ("(batch × heads)",)), "context", "context"]
    if kind is None or not (by_token or len(shape) == 2):
        return None
    return [*(("batch", "context") if by_token else ("(batch × context)",)), _WIDTHS[kind]]


def node_name(op: str) -> str:
    """'Softmax' for 'SoftmaxBackward0'; '' if no autograd node saved the tensor."""
    return op.rstrip("0123456789").removesuffix("Backward")


def is_compiled(tensors: SavedTensors) -> bool:
    return node_name(tensors.op) == "CompiledFunction"


_Item = TypeVar("_Item")
_MOST_ROWS = 40
_FIRST_ALLOCATIONS, _FIRST_SAVED = 10, 8
_NONE = LeftOut(count=0, num_bytes=0)


def category_rows(profile: MemoryProfile, prediction: MemoryPrediction | None = None) -> tuple[Row, ...]:
    """One row per category with bytes at the peak, measured or predicted; `bytes` sum to `peak_bytes`.

    A prediction adds `predicted_bytes`, which sum to `predicted_peak_bytes`, and `error`; both are None for categories
    it does not cover.
    """
    predicted = prediction is not None
    covered = {"predicted_peak_bytes": whole(profile, prediction).predicted_bytes} if predicted else {}
    peak: Row = {"peak_bytes": profile.peak_bytes, **covered, "peak_phase": profile.peak_phase}
    return tuple({**_part_row(part, predicted=predicted), **peak} for part in parts(profile, prediction))


def _part_row(part: Part, *, predicted: bool) -> Row:
    row: Row = {"category": part.category, "bytes": part.num_bytes, "share": part.share}
    return {**row, "predicted_bytes": part.predicted_bytes, "error": part.error} if predicted else row


def category_table(profile: MemoryProfile, prediction: MemoryPrediction | None = None) -> Table:
    every = [*parts(profile, prediction), whole(profile, prediction)]
    return Table(
        name="peak_by_category",
        columns=(
            Column(key="name", header="category"),
            Column(key="bytes", header="size", quantity=BYTES),
            Column(key="bytes", quantity=NUMBER, rank=1),
            Column(key="share", quantity=SHARE, rank=2),
            Column(key="predicted_bytes", header="predicted"),
            Column(key="predicted_bytes", quantity=NUMBER, rank=3),
            Column(key="error", quantity=Quantity(error_text)),
        ),
        rows=tuple(
            {"name": category_word(part.category), **_part_row(part, predicted=prediction is not None)}
            for part in every
        ),
        caption="The error of predicted bytes is relative to measured ones." if prediction else "",
    )


def phase_table(run: Run, profile: MemoryProfile) -> Table:
    counted = {peak.phase: peak.peak_allocated_bytes for peak in run.memory.peaks} if run.memory else {}
    unrecorded = "Unrecorded: the allocator's own peak in other steps, synchronised around each phase."
    rows = tuple(
        {"phase": phase, "peak_bytes": peak_bytes, "unrecorded_bytes": counted.get(phase)}
        for phase, peak_bytes in profile.phase_peaks.items()
    )
    columns = (
        Column(key="phase"),
        Column(key="peak_bytes", header="peak"),
        Column(key="peak_bytes", header="bytes", quantity=NUMBER, rank=2),
        Column(key="unrecorded_bytes", quantity=NUMBER, rank=1, note=unrecorded),
    )
    return Table(name="phases", columns=columns, rows=rows)


def allocation_table(run: Run, allocations: Sequence[Allocation], remark: str | None = None) -> Table:
    columns = (
        Column(key="requested_bytes", header="size"),
        Column(key="count", quantity=NUMBER, rank=1),
        Column(key="together_bytes", header="total"),
        Column(key="category", value=lambda made: category_word(made.category)),
        Column(key="what", header="shaped as", rank=2, wraps_from=20, value=lambda made: _shaped_as(made, run.spec)),
        Column(key="module", rank=3, folds=True),
        Column(key="line", rank=1, value=lambda made: _place(made)[1]),
        Column(key="function", rank=5, value=lambda made: _place(made)[2]),
        Column(key="phase", rank=4),
        Column(key="shape", rank=6, value=lambda made: None if made.shape is None else shape_text(made.shape)),
        Column(key="dtype", rank=7),
        Column(key="op", header="operator", rank=8, folds=True),
        Column(key="folder", rank=9, wraps_from=24, value=lambda made: _place(made)[0]),
    )
    figures = {"count": _count, "together_bytes": allocated_bytes}
    table = _alike("allocations", allocations, columns, figures, allocated_bytes, _NONE, first=_FIRST_ALLOCATIONS)
    return replace(table, caption=" ".join(filter(None, (table.caption, remark))))


def _shaped_as(made: Allocation, spec: StepSpec | None) -> str | None:
    return None if made.shape is None or made.category in _OF_PARAMETERS else shaped_as(made.shape, spec)


def _place(made: Allocation) -> tuple[str, str, str]:
    place, _, function = (made.source or "").partition(" in ")
    folder, _, line = place.rpartition("/")
    return folder, line, function


def saved_table(saved: Sequence[SavedTensors], left_out: LeftOut | None = None) -> Table:
    """Tabulate saved tensors, equal ones together, most bytes first.

    Shares are of a total that includes `left_out`, the groups that the record only counts.
    """
    beyond = left_out or _NONE
    total = saved_bytes(saved) + beyond.num_bytes
    columns = (
        Column(key="module", rank=1),
        Column(key="saved_by", value=lambda tensors: node_name(tensors.op)),
        Column(key="shape", value=lambda tensors: shape_text(tensors.shape)),
        Column(key="dtype", rank=4),
        Column(key="count", quantity=NUMBER, rank=3),
        Column(key="stored_bytes", header="memory"),
        Column(key="share", quantity=SHARE, rank=2),
        Column(key="category", rank=5, value=lambda tensors: category_word(tensors.category)),
    )

    def share(alike: list[SavedTensors]) -> Scalar:
        return quotient(saved_bytes(alike), total)

    figures = {"count": _count, "stored_bytes": saved_bytes, "share": share}
    return _alike("saved", saved, columns, figures, saved_bytes, beyond, first=_FIRST_SAVED)


def _alike(
    name: str,
    items: Iterable[_Item],
    columns: Sequence[Column],
    figures: Mapping[str, Callable[[list[_Item]], Scalar]],
    size: Callable[[list[_Item]], int],
    beyond: LeftOut,
    *,
    first: int,
) -> Table:
    """Tabulate groups of equal items, largest `size` first. A column in `figures` is computed from the whole group; in
    the other columns its items are equal.
    """
    looks = [column for column in columns if column.key not in figures]
    groups = grouped(items, lambda item: tuple(column.of_item(item) for column in looks)).values()
    largest = sorted(groups, key=lambda group: -size(group))
    rows = [
        {column.key: column.of_item(group[0]) for column in looks} | {key: of(group) for key, of in figures.items()}
        for group in largest[:_MOST_ROWS]
    ]
    told = ""
    if count := len(largest[_MOST_ROWS:]) + beyond.count:
        num_bytes = size(list(chain(*largest[_MOST_ROWS:]))) + beyond.num_bytes
        held = f"{units.format_bytes(num_bytes)} together" if num_bytes else "without memory of their own"
        told = f"The table leaves out {units.counted(count, 'smaller kind')}, {held}."
    return Table(name=name, columns=tuple(columns), rows=tuple(rows), caption=told, first=first)


def _count(alike: Iterable[Allocation | SavedTensors]) -> int:
    return sum(each.count for each in alike)


def shape_text(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "scalar"
