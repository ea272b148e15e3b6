"""The vocabulary's part of the model: the output head's products, and the loss."""

import re
from dataclasses import dataclass

from steplab.explain.case import Case
from steplab.explain.shapes import shapes_of
from steplab.records.profile import OpStats, Profile

_HEAD = re.compile(r"(^|\.)(head|lm_head|output_head|loss)$")
"""Ranges of the output head and of the loss, in the built-in model, in transformers and in most others."""
_LOG_SOFTMAX = re.compile(r"_log_softmax$")
_LEAST_ENTRIES = 1000
"""Least number of entries of a vocabulary; a log-softmax over fewer counts as a classifier's. Vocabularies of bytes or
letters are smaller, and cost almost nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyPart:
    size: int
    matmuls: tuple[OpStats, ...]
    matmul_s: float
    loss_s: float


def vocabulary_size(case: Case, profile: Profile | None) -> int | None:
    """Entries of the vocabulary from the spec or, for a third-party trace, from the loss's log-softmax over [tokens, V]
    with V at least _LEAST_ENTRIES."""
    model = case.spec.model if case.spec else None
    if model and model.shape:
        return model.shape.vocab_size or None
    config = (model.hf_config if model else None) or {}
    text = config.get("text_config", config)
    if isinstance(text, dict) and isinstance(text.get("vocab_size"), int):
        return int(text["vocab_size"])
    for op in profile.ops if profile else ():
        shapes = shapes_of(op)
        if _LOG_SOFTMAX.search(op.name) and shapes and len(shapes[0].sizes) == 2:
            entries = shapes[0].sizes[-1]
            return entries if entries >= _LEAST_ENTRIES else None
    return None


def vocabulary_part(case: Case, profile: Profile) -> VocabularyPart | None:
    """The work on the vocabulary, found by the ranges of head and loss, else by tensors of [.., V]; None without both.
    It excludes the embedding's look-up and the optimizer's update of its weights."""
    size = vocabulary_size(case, profile)
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
    """True if another size of the model equals the vocabulary's, so that shapes are ambiguous."""
    spec = case.spec
    shape = spec.model.shape if spec else None
    return bool(spec and shape and size in (shape.d_model, shape.d_ff, spec.context, spec.tokens))


def _is_one_thing(op: OpStats, profile: Profile) -> bool:
    """True for an operator of torch or one generated kernel. A compiled function, or any other container, receives the
    logits among other tensors."""
    return op.name.startswith("aten::") or (profile.device == "cuda" and op.name.startswith("triton_"))


def _has(op: OpStats, size: int) -> bool:
    if op.category == "embedding" or op.phase == "optimizer" or "embedding" in op.name:
        return False
    return any(len(shape.sizes) > 1 and size in (shape.sizes[0], shape.sizes[-1]) for shape in shapes_of(op))
