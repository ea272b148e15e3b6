"""The output head's matrix products and the loss.

They may take a large part of the step, and the vocabulary's size may not suit tensor cores."""

import math
import re
from dataclasses import dataclass

from steplab.costs.kernel_time import streaming_s
from steplab.explain.case import WORTH_TELLING, Case, in_seconds, reached_bandwidth
from steplab.explain.shapes import ALIGNED, shapes_of
from steplab.records.finding import Evidence, Finding
from steplab.records.profile import OpStats, Profile
from steplab.specs.resolve import command
from steplab.specs.step import StepSpec
from steplab.units import format_percent, format_rate, format_time

_HEAD = re.compile(r"(^|\.)(head|lm_head|output_head|loss)$")
"""Names of ranges of output head and loss, in the built-in model, transformers and most others."""
_LOG_SOFTMAX = re.compile(r"_log_softmax$")
_LEAST_ENTRIES = 1000
"""Least vocabulary size; a log-softmax over fewer entries counts as a classifier's. Smaller vocabularies, of bytes or
letters, cost almost nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyPart:
    size: int
    matmuls: tuple[OpStats, ...]
    matmul_s: float
    loss_s: float


def vocabulary_size(case: Case) -> int | None:
    """Number of entries, from the spec or from the loss's log-softmax over [tokens, V] in an imported trace."""
    model = case.spec.model if case.spec else None
    if model and model.shape:
        return model.shape.vocab_size or None
    if model and (size := model.configured("vocab_size")):
        return size
    for op in case.profile.ops:
        shapes = shapes_of(op)
        if _LOG_SOFTMAX.search(op.name) and shapes and len(shapes[0].sizes) == 2:
            entries = shapes[0].sizes[-1]
            return entries if entries >= _LEAST_ENTRIES else None
    return None


def vocabulary_part(case: Case) -> VocabularyPart | None:
    """Costs of output head and loss, found by ranges or by tensors [.., V]; None if neither exists. Excludes the
    embedding's look-up and the optimizer's update of the head's weights."""
    size, profile = vocabulary_size(case), case.profile
    if size is None:
        return None
    ops = [op for op in profile.ops if _HEAD.search(op.range)]
    if not ops and not _is_ambiguous(case, size):
        ops = [op for op in profile.ops if _is_one_thing(op, profile) and _has(op, size)]
    matmuls = tuple(op for op in ops if op.category == "matmul")
    if not matmuls:
        return None
    return VocabularyPart(
        size=size,
        matmuls=matmuls,
        matmul_s=sum(op.device_s for op in matmuls),
        loss_s=sum(op.device_s for op in ops if op.category != "matmul"),
    )


def _is_ambiguous(case: Case, size: int) -> bool:
    """True if another model size equals the vocabulary's, so shapes do not identify it."""
    spec = case.spec
    shape = spec.model.shape if spec else None
    return bool(spec and shape and size in (shape.d_model, shape.d_ff, spec.context, spec.tokens))


def _is_one_thing(op: OpStats, profile: Profile) -> bool:
    """True for a torch operator or a single generated kernel. Compiled functions and other containers receive the
    logits among other tensors."""
    return op.name.startswith("aten::") or (profile.device == "cuda" and op.name.startswith("triton_"))


def _has(op: OpStats, size: int) -> bool:
    if op.category == "embedding" or op.phase == "optimizer" or "embedding" in op.name:
        return False
    return any(len(shape.sizes) > 1 and size in (shape.sizes[0], shape.sizes[-1]) for shape in shapes_of(op))


SUITS = 64
"""Multiple of a size that matmul kernels process without padding. Entries added to reach one are never used."""
_HALF = {"bf16", "fp16"}


def vocabulary_padding(case: Case) -> Finding | None:
    """Finding on a GPU if the vocabulary is no multiple of 64 and its products are slower than others. Without a
    profile: if it is not divisible by 8."""
    size = vocabulary_size(case)
    if size is None or size % SUITS == 0 or not case.is_gpu:  # other devices have no tensor cores
        return None
    padded = _padded(size, SUITS)
    part = vocabulary_part(case)
    rates = _rates(case.profile, part) if part else None
    saves_s = None
    evidence = [Evidence(what="vocabulary", value=size, unit=""), Evidence(what="padded", value=padded, unit="")]
    saw = f"The vocabulary has {size} entries, no multiple of {SUITS}" + (
        f" nor of {ALIGNED}." if size % ALIGNED else "."
    )
    prediction = "A profile would show the rate of the vocabulary's products and of the others."
    if part and rates:
        head, others = rates
        now_s = case.per_step(part.matmul_s)
        saves_s = _saves_s(case, part, rates, padded)
        saw += (
            f" Its products take {format_time(now_s)} per step, at {format_rate(head, 'FLOP/s')}; the step's other "
            f"products in that dtype run at {format_rate(others, 'FLOP/s')}."
        )
        prediction = (
            f"Padded to {padded}, its products would do {format_percent(padded / size - 1)} more FLOPs, at the rate of "
            "the others. If their shape slows them too, padding saves less."
        )
        evidence += [
            Evidence(what="products with the vocabulary", value=now_s, unit="s"),
            Evidence(what="their rate", value=head, unit="FLOP/s"),
            Evidence(what="rate of the step's other products", value=others, unit="FLOP/s"),
        ]
        if saves_s <= WORTH_TELLING * case.length_s:
            return None
    elif size % ALIGNED == 0:
        return None  # its rows are aligned, and nothing shows that they are slow
    fields = {"model.vocab_size": str(padded)} if case.spec and case.spec.model.kind == "transformer" else {}
    return Finding(
        kind="vocabulary_padding",
        title=f"A vocabulary of {size} does not suit the tensor cores",
        saw=saw,
        why=(
            "Matmul kernels work on tiles of 64 or 128 columns and load 16 bytes at a time. A size that fits neither "
            "is computed by slower kernels, while a few entries that are never used cost nothing."
        ),
        change=case.change(fields, f"vocab_size={padded}  # {padded - size} entries that no token uses"),
        evidence=tuple(evidence),
        saves_s=saves_s,
        prediction=prediction,
        fields=fields,
    )


def padding_saves_s(case: Case) -> float:
    """Device seconds per step saved if a compiler pads the vocabulary, as Inductor does in half precision for unaligned
    rows. 0 in other cases, and for unknown rates."""
    part = vocabulary_part(case)
    if part is None or not case.is_gpu or part.size % ALIGNED == 0 or not {op.dtype for op in part.matmuls} <= _HALF:
        return 0.0
    rates = _rates(case.profile, part)
    return _saves_s(case, part, rates, _padded(part.size, ALIGNED)) if rates else 0.0


def _saves_s(case: Case, part: VocabularyPart, rates: tuple[float, float], padded: int) -> float:
    head, others = rates
    return max(0.0, case.per_step(part.matmul_s) * (1 - padded / part.size * head / others))


def _padded(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple


def _rates(profile: Profile, part: VocabularyPart) -> tuple[float, float] | None:
    mine = set(part.matmuls)
    dtypes = {op.dtype for op in part.matmuls}
    others = [
        op
        for op in profile.ops
        if op.category == "matmul" and op not in mine and op.dtype in dtypes and "bmm" not in op.name
    ]
    rates = []
    for ops in (part.matmuls, others):
        flops, seconds = sum(op.flops or 0.0 for op in ops), sum(op.device_s for op in ops)
        if not flops or not seconds or any(op.flops is None for op in ops):
            return None
        rates.append(flops / seconds)
    return rates[0], rates[1]


CONSIDERABLE = 0.15
"""Least share of device time; one matmul and a reduction should take a few per cent."""

PASSES = 2
"""Passes of a fused loss over the logits: one to read, one to write their gradient."""
_LIKE = "fused reduction"
"""Compiled kernel with the rate assumed for a fused loss."""


def loss_share(case: Case) -> Finding | None:
    """Finding if the head's matmuls and the loss take a considerable share of device time."""
    part, built_in = vocabulary_part(case), _built_in(case)
    if part is None or (built_in is not None and built_in.loss != "plain"):
        return None
    matmul_s, loss_s = case.per_step(part.matmul_s), case.per_step(part.loss_s)
    busy_s = case.busy_s
    if matmul_s + loss_s <= CONSIDERABLE * busy_s:
        return None
    saves_s, prediction = _gain(case, part, loss_s)
    if saves_s is not None and saves_s < WORTH_TELLING * case.length_s:
        return None
    change, note = _change(case)
    fields = {}
    if built_in is not None and case.is_gpu and case.is_eager:
        fields = {"loss": "fused"}
        change, note = command(built_in, fields), f"in your own code: {change}; {note}"
    return Finding(
        kind="loss_share",
        title=f"The vocabulary takes {format_percent((matmul_s + loss_s) / busy_s)} of the device's busy time",
        saw=(
            f"With {part.size} entries, the output head's products take {format_time(matmul_s)} per step, and casts, "
            f"softmax, loss and their gradients {format_time(loss_s)}, of {format_time(busy_s)}."
        ),
        why=(
            "Every token gets a score for every entry of the vocabulary, the widest tensor of the model. The loss "
            "passes over it several times to reduce it to one number, and saves it for the backward pass."
        ),
        change=change,
        note=note,
        evidence=in_seconds({"vocabulary matmuls": matmul_s, "loss and casts": loss_s, "device busy": busy_s}),
        saves_s=saves_s,
        prediction=prediction,
        fields=fields,
    )


def _built_in(case: Case) -> StepSpec | None:
    spec = case.spec
    if spec is None or spec.model.kind != "transformer" or spec.layout.tp > 1 or spec.layout.pp > 1:
        return None
    return spec


_IN_CHUNKS = "computed in chunks, the logits need less memory as well"


def _change(case: Case) -> tuple[str, str]:
    if case.is_gpu:
        compiler = "or torch.compile around head and loss; " if case.is_eager else ""
        liger = "loss = LigerFusedLinearCrossEntropyLoss()(head.weight, hidden, targets)  # of liger-kernel"
        return liger, f"{compiler}{_IN_CHUNKS}"
    if case.is_eager:
        return "torch.compile around head and loss", _IN_CHUNKS
    return "head and loss for some hundred tokens at a time, so that their logits stay in the cache", _IN_CHUNKS


def _gain(case: Case, part: VocabularyPart, loss_s: float) -> tuple[float | None, str]:
    """Seconds saved per step, and their derivation: products remain, all else shrinks to PASSES over the logits."""
    logits_bytes = _logits_bytes(part, case.profile)
    if logits_bytes is None or case.gpu is None:
        return None, "The size of the logits or the bandwidth of the device is not known."
    fused_s = streaming_s(_LIKE, PASSES * logits_bytes, case.gpu)
    return max(0.0, loss_s - fused_s), (
        f"The products do not change. A fused loss reads the logits and writes their gradient once: "
        f"{format_time(fused_s)} at {reached_bandwidth(_LIKE, case.gpu)}. A loss that "
        "recomputes the logits costs a further matmul."
    )


def _logits_bytes(part: VocabularyPart, profile: Profile) -> float | None:
    forward = [op for op in part.matmuls if op.phase == "forward"] or list(part.matmuls[:1])
    for op in forward:
        shapes = shapes_of(op)
        if len(shapes) >= 2 and shapes[-1].sizes[-1] == part.size:
            item_bytes = (shapes[-2].size_bytes or 0) // max(shapes[-2].numel, 1)
            return shapes[-2].sizes[0] * part.size * item_bytes * op.calls / profile.num_steps or None
    return None
