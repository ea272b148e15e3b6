from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from steplab.costs.kernel_time import Product, attention_s
from steplab.explain.case import Case, in_seconds, stated_peak
from steplab.explain.shapes import Shape, product_of, shapes_of, softmax_inputs
from steplab.explain.waiting import host_limit
from steplab.ops.attention.implementations import implementation
from steplab.records.finding import Evidence, Finding
from steplab.records.profile import ATTENTION_PARTS, OpStats, Profile
from steplab.units import format_bytes, format_count, format_percent, format_time, listed

CONSIDERABLE = 0.05
"""Least share of device time in scores, softmax and values. At short contexts they take a few per cent, and a fused
kernel saves only part."""

_IN_CODE = "torch.nn.functional.scaled_dot_product_attention(q, k, v, {})"
_SMALLEST_CONTEXT = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    ops: tuple[OpStats, ...]
    total_s: float
    where: str


def scores_materialised(case: Case) -> Finding | None:
    """Finding if attention scores go through memory and take a considerable share of device time. Ranges of plain
    attention identify them, else square inputs of a softmax."""
    profile = case.profile
    # A user's own model has its own attention, which the spec's field does not describe.
    chosen = case.spec if case.spec and case.spec.model.kind != "factory" else None
    if chosen is not None and not implementation(chosen.attention).materialises_scores:
        return None
    seen = _by_range(profile) or _by_shape(profile)
    now_s, busy_s = case.per_step(seen.total_s) if seen else 0.0, case.busy_s
    if seen is None or now_s <= CONSIDERABLE * busy_s:
        return None
    fields = {"attention": "sdpa"} if chosen else {}
    own = _IN_CODE.format("is_causal=True" if case.is_causal else "attn_mask=mask")
    saves_s, prediction = _gain(case, seen, now_s)
    moved = sum(op.moved_bytes or 0.0 for op in seen.ops) / profile.num_steps
    flops = sum(op.flops or 0.0 for op in seen.ops if op.category == "matmul") / profile.num_steps
    did = [f"take {format_time(now_s)} per step"]
    did += [f"move at least {format_bytes(moved)}"] * bool(moved)
    did += [f"compute {format_count(flops).rstrip()}FLOP in matmuls"] * bool(flops)
    return Finding(
        kind="scores_materialised",
        title=f"Attention that stores its scores takes {format_percent(now_s / busy_s)} of the device's busy time",
        saw=(f"Scores, softmax and value product ({seen.where}) {listed(did)}."),
        why=(
            "The scores have context x context entries per head, far more than queries, keys and values together, and "
            "plain attention writes and reads them several times. A fused kernel keeps them on the chip, tile by tile, "
            "and skips scores that a causal mask hides."
        ),
        change=case.change(fields, own),
        note=f"in your own code: {own}" if chosen else "with the present mask, if any",
        evidence=(
            *in_seconds({"scores, softmax and values": now_s, "device busy": busy_s}),
            *([Evidence(what="bytes they move at least", value=moved, unit="B")] if moved else []),
            *([Evidence(what="FLOPs of their matmuls", value=flops, unit="FLOP")] if flops else []),
        ),
        saves_s=saves_s,
        prediction=prediction,
        fields=fields,
    )


def _by_range(profile: Profile) -> _Seen | None:
    def inside(name: str) -> bool:
        return name.rpartition(".")[2] in ATTENTION_PARTS

    kernels = [kernel for kernel in profile.kernels if inside(kernel.range)]
    if not (total_s := sum(kernel.total_s for kernel in kernels)):
        return None
    ops = tuple(op for op in profile.ops if inside(op.range))
    known = any(kernel.phase == "backward" for kernel in kernels)
    where = f"by the profiler's ranges, {'with backward' if known else 'forward only'}"
    return _Seen(ops=ops, total_s=total_s, where=where)


def _by_shape(profile: Profile) -> _Seen | None:
    """Operators on [heads, S, S], if a softmax runs on that shape; activations have fewer rows."""
    square = next((s for s in softmax_inputs(profile) if _is_square(s)), None)
    if square is None:
        return None
    context = square.sizes[-1]
    heads = square.numel // context**2

    def handles_scores(op: OpStats) -> bool:
        shapes = [shape.sizes for shape in shapes_of(op)]
        if any(len(s) > 2 and s[-2:] == (context, context) and prod(s[:-2]) == heads for s in shapes):
            return True
        product = product_of(op)
        return product is not None and (product.m, product.n, product.batch) == (context, context, heads)

    ops = tuple(op for op in profile.ops if handles_scores(op))
    where = f"by their shape, {heads} x {context} x {context}"
    return _Seen(ops=ops, total_s=sum(op.device_s for op in ops), where=where)


def _is_square(shape: Shape) -> bool:
    sizes = shape.sizes
    return len(sizes) > 2 and sizes[-1] == sizes[-2] >= _SMALLEST_CONTEXT


def _gain(case: Case, seen: _Seen, now_s: float) -> tuple[float | None, str]:
    products = [op for op in seen.ops if op.category == "matmul" and op.flops]
    scores = _scores(products)
    if scores is None:
        return None, "The record lacks the sizes of its products, so a fused kernel's time is not known."
    dtype = next((op.dtype for op in products if op.dtype in ("bf16", "fp16")), "fp32")
    if case.gpu is None or dtype not in case.gpu.peaks:
        return None, f"The device's {dtype} peak is not known, so a fused kernel's time is not known either."
    backward = sum(op.flops or 0.0 for op in products if op.phase == "backward")
    forward = sum(op.flops or 0.0 for op in products) - backward
    # plain attention has two products forward and four backward, each with the FLOPs of the scores
    passes = {False: forward / (2 * scores.flops), True: backward / (4 * scores.flops)}
    fused_s = case.per_step(
        sum(
            number * attention_s("sdpa", scores, dtype, case.gpu, backward=is_backward, causal=case.is_causal)
            for is_backward, number in passes.items()
        )
    )
    masked = "half of the scores, because the rest are masked" if case.is_causal else "all scores, as without a mask"
    saves_s = max(0.0, now_s - fused_s)
    return saves_s, (
        f"A fused kernel takes {format_time(fused_s)}, at the rate fitted for torch's on {case.gpu.rates.name}, with "
        f"{stated_peak(dtype, case.gpu)}. It computes {masked}, and in backward five products instead of four."
        + host_limit(case, saves_s)
    )


def _scores(products: Sequence[OpStats]) -> Product | None:
    """Sizes of the product of queries and keys: the forward product with a square result."""
    found = (product_of(op) for op in sorted(products, key=lambda op: op.phase == "backward"))
    return next((product for product in found if product and product.m == product.n), None)
