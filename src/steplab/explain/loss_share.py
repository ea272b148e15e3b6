"""The output head and the loss take a large part of the step."""

from steplab.explain.case import Case
from steplab.explain.shapes import shapes_of
from steplab.explain.vocabulary import VocabularyPart, vocabulary_part
from steplab.records.finding import Evidence, Finding
from steplab.records.profile import Profile
from steplab.units import format_percent, format_time

CONSIDERABLE = 0.15
"""Least share of the device's time: one matmul of many and a reduction are expected to be some per cent."""

PASSES = 2
"""Times that a fused loss moves the logits: it reads them once and writes their gradient once, in their place."""


def loss_share(case: Case) -> Finding | None:
    """Fires where vocabulary matmuls and loss take a considerable share of the device's time."""
    profile = case.profile
    part = vocabulary_part(case, profile) if profile else None
    if profile is None or part is None:
        return None
    matmul_s, loss_s = case.per_step(profile, part.matmul_s), case.per_step(profile, part.loss_s)
    busy_s = case.busy_s(profile)
    if matmul_s + loss_s <= CONSIDERABLE * busy_s:
        return None
    saves_s, prediction = _gain(case, part, loss_s)
    change, note = _change(case)
    return Finding(
        kind="loss_share",
        title=f"The vocabulary takes {format_percent((matmul_s + loss_s) / busy_s)} of the device's work",
        saw=(
            f"With {part.size} entries, the output head's products take {format_time(matmul_s)} a step, and casts, "
            f"softmax, loss and their gradients {format_time(loss_s)}, of {format_time(busy_s)}."
        ),
        why=(
            "Every token gets a score for every entry of the vocabulary, the widest tensor of the model. The loss "
            "passes over it several times to make one number of it, and keeps it for the backward pass."
        ),
        change=change,
        note=note,
        evidence=(
            Evidence(what="vocabulary matmuls", value=matmul_s, unit="s"),
            Evidence(what="loss and casts", value=loss_s, unit="s"),
            Evidence(what="device busy", value=busy_s, unit="s"),
        ),
        saves_s=saves_s,
        prediction=prediction,
    )


_IN_CHUNKS = "computed in chunks, the logits need less memory as well"


def _change(case: Case) -> tuple[str, str]:
    """What fuses the loss on this device: Liger's kernel is written for GPUs, and a compiled loss is compiled."""
    if case.is_gpu:
        compiler = "or torch.compile around head and loss; " if case.is_eager else ""
        liger = "loss = LigerFusedLinearCrossEntropyLoss()(head.weight, hidden, targets)  # of liger-kernel"
        return liger, f"{compiler}{_IN_CHUNKS}"
    if case.is_eager:
        return "torch.compile around head and loss", _IN_CHUNKS
    return "head and loss for some hundred tokens at a time, so that their logits stay in the cache", _IN_CHUNKS


def _gain(case: Case, part: VocabularyPart, loss_s: float) -> tuple[float | None, str]:
    """The products stay; the rest is taken down to the passes over the logits that must be."""
    logits_bytes = _logits_bytes(part, case.profile) if case.profile else None
    streaming = case.rates.streaming()
    if logits_bytes is None or streaming is None:
        return None, "The size of the logits or the bandwidth of the device is not known."
    fused_s = PASSES * logits_bytes / streaming.per_s
    return max(0.0, loss_s - fused_s), (
        f"The products stay as they are. A fused loss reads the logits and writes their gradient once: "
        f"{format_time(fused_s)} at {streaming.source}. One that computes the logits anew costs a further matmul."
    )


def _logits_bytes(part: VocabularyPart, profile: Profile) -> float | None:
    """Bytes of the logits as the head's product makes them: its rows are the tokens."""
    forward = [op for op in part.matmuls if op.phase == "forward"] or list(part.matmuls[:1])
    for op in forward:
        shapes = shapes_of(op)
        if len(shapes) >= 2 and shapes[-1].sizes[-1] == part.size:
            item_bytes = (shapes[-2].size_bytes or 0) // max(shapes[-2].numel, 1)
            return shapes[-2].sizes[0] * part.size * item_bytes * op.calls / profile.num_steps or None
    return None
