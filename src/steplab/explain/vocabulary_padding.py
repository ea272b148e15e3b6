"""A vocabulary size that does not suit the tensor cores."""

import math

from steplab.explain.case import WORTH_TELLING, Case
from steplab.explain.vocabulary import VocabularyPart, vocabulary_part, vocabulary_size
from steplab.records.finding import Evidence, Finding
from steplab.records.profile import Profile
from steplab.specs.resolve import command
from steplab.units import format_percent, format_rate, format_time

SUITS = 64
"""Every matmul kernel takes multiples of this size without padding; the entries added to reach one are never used."""
ALIGNED = 8
"""Elements of bf16 in 16 bytes: other rows cannot be loaded 16 bytes at a time, and the fastest kernels refuse them
(NVIDIA, "Matrix Multiplication Background User's Guide", tensor core requirements).
"""
_HALF = {"bf16", "fp16"}


def vocabulary_padding(case: Case) -> Finding | None:
    """Fires on a GPU if the vocabulary is no multiple of 64 and its products are slower than others; without a profile,
    for no multiple of 8.
    """
    size = vocabulary_size(case, case.profile)
    if size is None or size % SUITS == 0 or not case.is_gpu:  # other devices have no tensor cores
        return None
    padded = _padded(size, SUITS)
    part = vocabulary_part(case, case.profile) if case.profile else None
    rates = _rates(case.profile, part) if case.profile and part else None
    saves_s = None
    evidence = [Evidence(what="vocabulary", value=size, unit=""), Evidence(what="padded", value=padded, unit="")]
    saw = f"The vocabulary has {size} entries, no multiple of {SUITS}" + (
        f" nor of {ALIGNED}." if size % ALIGNED else "."
    )
    prediction = "A profile would show the rate of the vocabulary's products and of the others."
    if case.profile and part and rates:
        head, others = rates
        now_s = case.per_step(case.profile, part.matmul_s)
        saves_s = _saves_s(case, case.profile, part, rates, padded)
        saw += (
            f" Its products take {format_time(now_s)} per step, at {format_rate(head, 'FLOP/s')}; the step's other "
            f"products in that dtype run at {format_rate(others, 'FLOP/s')}."
        )
        prediction = (
            f"Padded to {padded}, its products would do {format_percent(padded / size - 1)} more FLOPs, at the rate of "
            "the others. They may also be slower because of their shape."
        )
        evidence += [
            Evidence(what="products with the vocabulary", value=now_s, unit="s"),
            Evidence(what="their rate", value=head, unit="FLOP/s"),
            Evidence(what="rate of the step's other products", value=others, unit="FLOP/s"),
        ]
        if saves_s <= WORTH_TELLING * case.length_s(case.profile):
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
        change=command(case.spec, fields)
        if case.spec and fields
        else f"vocab_size={padded}  # {padded - size} entries that no token uses",
        evidence=tuple(evidence),
        saves_s=saves_s,
        prediction=prediction,
        fields=fields,
    )


def padding_saves_s(case: Case, profile: Profile) -> float:
    """Device time per step that the vocabulary's products save if a compiler pads them, as Inductor does in half
    precision for unaligned rows. 0 in other cases, and if the rates are not known."""
    part = vocabulary_part(case, profile)
    if part is None or not case.is_gpu or part.size % ALIGNED == 0 or not {op.dtype for op in part.matmuls} <= _HALF:
        return 0.0
    rates = _rates(profile, part)
    return _saves_s(case, profile, part, rates, _padded(part.size, ALIGNED)) if rates else 0.0


def _saves_s(case: Case, profile: Profile, part: VocabularyPart, rates: tuple[float, float], padded: int) -> float:
    head, others = rates
    return max(0.0, case.per_step(profile, part.matmul_s) * (1 - padded / part.size * head / others))


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
