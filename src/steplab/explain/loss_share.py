from steplab.costs.kernel_time import streaming_s
from steplab.explain.case import WORTH_TELLING, Case, reached_bandwidth
from steplab.explain.shapes import shapes_of
from steplab.explain.vocabulary import VocabularyPart, vocabulary_part
from steplab.records.finding import Evidence, Finding
from steplab.records.profile import Profile
from steplab.specs.resolve import command
from steplab.specs.step import StepSpec
from steplab.units import format_percent, format_time

CONSIDERABLE = 0.15
"""Least share of the device's time: one matmul among many and a reduction should take a few per cent."""

PASSES = 2
"""Passes of a fused loss over the logits: it reads them once and overwrites them by their gradient."""
_LIKE = "fused reduction"
"""A fused loss is assumed to reach this compiled kernel's rate."""


def loss_share(case: Case) -> Finding | None:
    """Fires if vocabulary matmuls and loss take a considerable share of the device's time."""
    profile, built_in = case.profile, _built_in(case)
    part = vocabulary_part(case, profile) if profile else None
    if profile is None or part is None or (built_in is not None and built_in.loss != "plain"):
        return None
    matmul_s, loss_s = case.per_step(profile, part.matmul_s), case.per_step(profile, part.loss_s)
    busy_s = case.busy_s(profile)
    if matmul_s + loss_s <= CONSIDERABLE * busy_s:
        return None
    saves_s, prediction = _gain(case, part, loss_s)
    if saves_s is not None and saves_s < WORTH_TELLING * case.length_s(profile):
        return None
    change, note = _change(case)
    fields = {}
    if built_in is not None and case.is_gpu and case.is_eager:
        fields = {"loss": "fused"}
        change, note = command(built_in, fields), f"in your own code: {change}; {note}"
    return Finding(
        kind="loss_share",
        title=f"The vocabulary takes {format_percent((matmul_s + loss_s) / busy_s)} of the device's work",
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
        evidence=(
            Evidence(what="vocabulary matmuls", value=matmul_s, unit="s"),
            Evidence(what="loss and casts", value=loss_s, unit="s"),
            Evidence(what="device busy", value=busy_s, unit="s"),
        ),
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
    """Seconds saved per step and their derivation: the products stay, the rest shrinks to PASSES over the logits."""
    logits_bytes = _logits_bytes(part, case.profile) if case.profile else None
    if logits_bytes is None or case.gpu is None:
        return None, "The size of the logits or the bandwidth of the device is not known."
    fused_s = streaming_s(_LIKE, PASSES * logits_bytes, case.gpu)
    return max(0.0, loss_s - fused_s), (
        f"The products do not change. A fused loss reads the logits and writes their gradient once: "
        f"{format_time(fused_s)} at {reached_bandwidth(_LIKE, case.gpu)}. Recomputing the "
        "logits costs a further matmul."
    )


def _logits_bytes(part: VocabularyPart, profile: Profile) -> float | None:
    forward = [op for op in part.matmuls if op.phase == "forward"] or list(part.matmuls[:1])
    for op in forward:
        shapes = shapes_of(op)
        if len(shapes) >= 2 and shapes[-1].sizes[-1] == part.size:
            item_bytes = (shapes[-2].size_bytes or 0) // max(shapes[-2].numel, 1)
            return shapes[-2].sizes[0] * part.size * item_bytes * op.calls / profile.num_steps or None
    return None
