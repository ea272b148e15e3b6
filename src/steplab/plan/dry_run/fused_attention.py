"""Attention whose scores are in no memory, and torch's composition, in the dry run, by the kernel that serves it.

A fused kernel keeps its inputs, its output and one number a row, and no scores. What its backward takes besides its
results is within the kernel, and read off aten/src/ATen/native/transformers/cuda (flash_api.cpp,
attention_backward.cu). cuDNN does not say what its workspace takes; it is given that of the flash kernel. steplab's own
kernels are beside it: ops/attention/triton_backward.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

from steplab.plan.dry_run.attention import Attend, batched_product, contiguous, heads_apart, softmax_gradient
from steplab.plan.dry_run.machine import Machine
from steplab.plan.dry_run.memory import Tensor
from steplab.plan.dry_run.operators import elementwise
from steplab.plan.dry_run.sizes import BOOL, FP32, Count, Dtype, Sizes

_FLASH_ROWS, _FLASH_COLUMNS, _EFFICIENT_ROWS, _TRITON_ROWS = 128, 32, 32, 128
"""Multiples that the kernels round tokens and head widths up to."""
_COPY_ENGINE_BYTES = 16
"""What the stride from token to token must be a multiple of for the Triton kernels; else they work on padded copies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kernel:
    """What tells the fused kernels apart."""

    tokens_in: int
    """Tokens are rounded up to a multiple of this in what is kept of a row."""
    gives_heads_together: bool
    """Whether the output is laid out as [B, T, h, d / h], which the output projection takes without a copy."""
    within_backward: Callable[[Sizes], tuple[tuple[Count, str], ...]]
    """What its backward takes for itself, in fp32."""
    row_bytes: int = 1
    """Where the bytes of a head's token are no multiple of this, inputs and results are copied, padded."""


def _flash_backward(sizes: Sizes) -> tuple[tuple[Count, str], ...]:
    tokens, width = _up(sizes.context, _FLASH_ROWS), _up(sizes.shape.head_dim, _FLASH_COLUMNS)
    rows = sizes.batch * sizes.shape.num_heads * tokens
    return (
        (Count(rows, f"B h {tokens}"), "row sums within the kernel"),
        (Count(rows * width, f"B h {tokens} {width}"), "gradient of the rotated query, gathered within the kernel"),
    )


def _row_sums(sizes: Sizes) -> tuple[tuple[Count, str], ...]:
    return ((sizes.rows, "row sums within the kernel"),)


def _triton_backward(sizes: Sizes) -> tuple[tuple[Count, str], ...]:
    tokens = _up(sizes.context, _TRITON_ROWS)
    rows = Count(sizes.batch * sizes.shape.num_heads * tokens, f"B h {tokens}")
    subtrahends = ("log-sum-exp in powers of two", "row sums", "log-sum-exp over the scale")
    return tuple((rows, f"{what}, within the kernels") for what in subtrahends)


def _reference_backward(sizes: Sizes) -> tuple[tuple[Count, str], ...]:
    tensors = ("rotated query, widened", "gradient of the output, widened", "gradient of the rotated query, gathered")
    return (*((sizes.residual, f"{tensor}, within the function") for tensor in tensors), *_row_sums(sizes))


def _efficient_backward(sizes: Sizes) -> tuple[tuple[Count, str], ...]:
    return (
        (sizes.residual, "gradient times output, within the kernel"),
        (sizes.rows, "row sums within the kernel"),
    )


_OF_FORWARD = ("rotated query", "rotated key", "value", "attention output")
_OF_BACKWARD = (
    *("gradient of the rotated query", "gradient of the rotated key", "gradient of the value"),
    *("gradient of the attention output", "attention output", "rotated query", "rotated key", "value"),
)
"""What is copied where the kernels do not take it as it is, in their order."""
_FLASH = _Kernel(tokens_in=1, gives_heads_together=False, within_backward=_flash_backward)
_EFFICIENT = _Kernel(tokens_in=_EFFICIENT_ROWS, gives_heads_together=True, within_backward=_efficient_backward)
_REFERENCE = _Kernel(tokens_in=1, gives_heads_together=False, within_backward=_reference_backward)
_TRITON = _Kernel(
    tokens_in=1, gives_heads_together=False, within_backward=_triton_backward, row_bytes=_COPY_ENGINE_BYTES
)
_ROW_SUMS = _Kernel(tokens_in=1, gives_heads_together=False, within_backward=_row_sums)


def flash(m: Machine, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention-2, for half precision."""
    return _fused(m, q, k, v, _FLASH)


def row_sums_alone(m: Machine, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlexAttention's kernels, which take one number a row for themselves backward."""
    return _fused(m, q, k, v, _ROW_SUMS)


def triton(m: Machine, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """steplab's own kernels."""
    return _fused(m, q, k, v, _TRITON)


def reference(m: Machine, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention-2 in tiled PyTorch, whose backward gathers in fp32. Its tiles are not followed."""
    return _fused(m, q, k, v, _REFERENCE)


def efficient(m: Machine, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The memory-efficient kernel."""
    return _fused(m, q, k, v, _EFFICIENT)


def _fused(m: Machine, q: Tensor, k: Tensor, v: Tensor, kernel: _Kernel) -> Tensor:
    likes = [(x.count, x.dtype, f"gradient of {x.what}") for x in (q, k, v)]
    output = m.dear(lambda: m.new(q.count, q.dtype, "attention output"))
    output.heads_together = kernel.gives_heads_together
    tokens = _up(m.sizes.context, kernel.tokens_in)
    rows = Count(
        m.sizes.batch * m.sizes.shape.num_heads * tokens, "B h T" if kernel.tokens_in == 1 else f"B h {tokens}"
    )
    dtype, padded = q.dtype, _padded(m.sizes, q.dtype, kernel)

    def run() -> Tensor:
        made = m.new(rows, FP32, "log of the sum of each row of scores")
        _copies = [m.new(padded, dtype, f"{what}, padded") for what in _OF_FORWARD] if padded else []
        return made

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, ...]:
        gradients = tuple(m.new(*like) for like in likes)
        gradients[2].heads_together = True
        _copies = [m.new(padded, dtype, f"{what}, padded") for what in _OF_BACKWARD] if padded else []
        _within = [m.new(count, FP32, what) for count, what in kernel.within_backward(m.sizes)]
        return gradients

    row_sums = m.dear(run)

    m.node((q.slot, k.slot, v.slot), (q, k, v, output, row_sums), backward).gives(output)
    return output


def _padded(sizes: Sizes, dtype: Dtype, kernel: _Kernel) -> Count | None:
    """Elements of a padded copy; None where the kernel takes the tensors as they are."""
    multiple = max(kernel.row_bytes // dtype.num_bytes, 1)
    width = _up(sizes.shape.head_dim, multiple)
    if width == sizes.shape.head_dim:
        return None
    return Count(sizes.tokens.value * sizes.shape.num_heads * width, f"B h T {width}")


def math(m: Machine, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's own composition, in fp32: the mask is a tensor of numbers that is added, the softmax safe for rows
    that are hidden whole."""
    source = q.dtype
    q, k, v = m.cast(q, FP32), m.cast(k, FP32), m.cast(v, FP32)
    q = elementwise(m, q, f"{q.what}, scaled")
    mask = _mask_of_numbers(m)
    k = elementwise(m, k, f"{k.what}, scaled")
    scores = batched_product(m, q, k, m.sizes.scores, "attention scores")
    weights = _safe_softmax(m, scores)
    del scores
    _for_the_caller = weights if source is FP32 else m.copy(weights, source)
    output = m.cast(
        heads_apart(m, batched_product(m, weights, contiguous(m, v), m.sizes.residual, "attention output")), source
    )
    del mask
    return output


def _mask_of_numbers(m: Machine) -> Tensor:
    ones = m.new(m.sizes.square, BOOL, "ones for the causal mask")
    hidden = m.new(m.sizes.square, BOOL, "causal mask")
    del ones
    numbers = m.new(m.sizes.square, FP32, "causal mask, in fp32")
    del hidden
    return numbers


def _safe_softmax(m: Machine, scores: Tensor) -> Tensor:
    unsafe = m.new(scores.count, FP32, "attention weights, unsafe")
    hidden = m.new(scores.count, BOOL, "hidden scores")
    weights = m.new(scores.count, FP32, "attention weights")
    m.node((scores.slot,), (weights,), softmax_gradient(scores)).gives(weights)
    del unsafe, hidden
    return weights


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


FUSED: dict[str, Attend] = {
    "sdpa_flash": flash,
    "sdpa_cudnn": flash,
    "sdpa_efficient": efficient,
    "sdpa_math": math,
    "flash_triton": triton,
    "flash_reference": reference,
    "flex": row_sums_alone,
    "flash_attn_4": flash,
    "auto": flash,
}
"""StepSpec's attention, but for plain, and for sdpa, which is one of these."""
