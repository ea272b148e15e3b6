"""Attention by third-party kernels: torch's scaled_dot_product_attention, its FlexAttention, and flash-attn-4."""

from functools import cache
from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..errors import Unsupported
from .shapes import as_autocast_would, fixed, refuse_unserved

SDPA_BACKENDS: dict[str, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_NO_KERNEL = ("No available kernel", "No viable backend")


def sdpa_attention(
    q_BHSD: Tensor,
    k_BHKD: Tensor,
    v_BHKD: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """torch's scaled_dot_product_attention by the kernel `backend` alone; None lets torch choose. Raises Unsupported if
    the named kernel does not take these inputs.
    """
    grouped = q_BHSD.dim() > 2 and q_BHSD.shape[-3] != k_BHKD.shape[-3]
    if backend is None:
        return scaled_dot_product_attention(q_BHSD, k_BHKD, v_BHKD, is_causal=causal, scale=scale, enable_gqa=grouped)
    refuse_unserved(f"sdpa_{backend}", q_BHSD, k_BHKD, causal=causal)  # torch would first warn about each other kernel
    try:
        with sdpa_kernel(SDPA_BACKENDS[backend]):
            return scaled_dot_product_attention(
                q_BHSD, k_BHKD, v_BHKD, is_causal=causal, scale=scale, enable_gqa=grouped
            )
    except RuntimeError as error:
        if not any(words in str(error) for words in _NO_KERNEL):
            raise
        raise Unsupported(
            f"attention 'sdpa_{backend}'",
            f"torch has no kernel for {str(q_BHSD.dtype).removeprefix('torch.')} queries {list(q_BHSD.shape)} and keys "
            f"{list(k_BHKD.shape)} on {q_BHSD.device.type}",
            "choose sdpa, or another precision or shape",
        ) from None


def flash_attn_4_attention(
    q_BHSD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Attention by flash_attn.cute.flash_attn_func, called with positions before heads. Raises Unsupported without the
    package, or for inputs that it does not take.
    """
    q_BHSD, k_BHKD, v_BHKD = as_autocast_would(q_BHSD, k_BHKD, v_BHKD)
    refuse_unserved("flash_attn_4", q_BHSD, k_BHKD, causal=causal)
    try:
        attend = import_module("flash_attn.cute").flash_attn_func
    except ImportError as error:
        why = f"flash-attn-4 cannot be imported ({error})"
        raise Unsupported("attention 'flash_attn_4'", why, "pip install flash-attn-4") from None
    heads_last = (x.transpose(1, 2) for x in (q_BHSD, k_BHKD, v_BHKD))
    result = attend(*heads_last, softmax_scale=scale, causal=causal)
    # Some versions also return the log-sum-exp.
    o_BSHD: Tensor = result[0] if isinstance(result, tuple) else result
    return o_BSHD.transpose(1, 2)


if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# torch.nn.attention.flex_attention is imported at its use: it imports the compiler, which takes seconds.

BLOCK = 128
"""Queries, and keys, in a block of FlexAttention's mask: torch's default."""


def flex_attention_compiled(
    q_BHSD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Attention by flex_attention, compiled at a shape's first use; within torch.compile, inlined.

    On a CPU it raises Unsupported for gradients, and without queries or keys.
    """
    q_BHSD, k_BHKD, v_BHKD = as_autocast_would(q_BHSD, k_BHKD, v_BHKD)
    if q_BHSD.device.type == "cpu":
        _refuse_on_cpu(q_BHSD, k_BHKD, v_BHKD)
        # torch refuses tensors that require gradients there even if no gradient is taken.
        q_BHSD, k_BHKD, v_BHKD = q_BHSD.detach(), k_BHKD.detach(), v_BHKD.detach()
    if torch.compiler.is_compiling():
        return _attend(q_BHSD, k_BHKD, v_BHKD, causal, scale)
    output: Tensor = _compiled(q_BHSD.shape, k_BHKD.shape, q_BHSD.dtype)(q_BHSD, k_BHKD, v_BHKD, causal, scale)
    return output


def _attend(q_BHSD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, causal: bool, scale: float | None) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    mask = causal_mask(q_BHSD.shape[-2], k_BHKD.shape[-2], q_BHSD.device) if causal else None
    output: Tensor = flex_attention(
        q_BHSD, k_BHKD, v_BHKD, block_mask=mask, scale=scale, enable_gqa=q_BHSD.shape[-3] != k_BHKD.shape[-3]
    )
    return output


def _refuse_on_cpu(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise Unsupported(
            "attention 'flex' with gradients on a CPU",
            "torch's FlexAttention has no backward pass there",
            "choose sdpa or flash_reference, or run it under torch.no_grad()",
        )
    if any(tensor.shape[-2] == 0 for tensor in tensors):
        raise Unsupported(
            "attention 'flex' without queries or keys on a CPU",
            "torch's FlexAttention ends the process there",
            "choose sdpa or flash_reference",
        )


@cache
def _compiled(q_shape: torch.Size, k_shape: torch.Size, dtype: torch.dtype) -> Any:
    """flex_attention compiled for one shape.

    torch stops compiling a code object at the ninth shape, and searches them at every call; so each shape gets a copy.
    """
    code = _attend.__code__.replace(co_name=f"_attend_{'x'.join(map(str, (*q_shape, *k_shape[1:3])))}")
    return torch.compile(FunctionType(code, globals()), dynamic=False, fullgraph=True)


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> "BlockMask":
    """The mask with which a query sees keys up to its own position, both counted from the first."""
    from torch.nn.attention.flex_attention import BlockMask

    part, full = (_constant_lists(fixed(num_queries), fixed(num_keys), device, whole) for whole in (False, True))
    return BlockMask(
        seq_lengths=(num_queries, num_keys),
        kv_num_blocks=part[0],
        kv_indices=part[1],
        q_num_blocks=part[2],
        q_indices=part[3],
        full_kv_num_blocks=full[0],
        full_kv_indices=full[1],
        full_q_num_blocks=full[2],
        full_q_indices=full[3],
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=_sees,
    )


def _sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


# A constant to torch.compile: made within the graph, every layer would make its own.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constant_lists(num_queries: int, num_keys: int, device: torch.device, whole: bool) -> tuple[Tensor, ...]:
    return _lists_of_blocks(num_queries, num_keys, device, whole)


@cache
def _lists_of_blocks(num_queries: int, num_keys: int, device: torch.device, whole: bool) -> tuple[Tensor, ...]:
    """Number and list of key blocks that each block of queries sees wholly (else in part); then the same for blocks of
    keys.

    A row sees earlier key blocks wholly, but the diagonal one and incomplete ones in part. torch's create_block_mask
    needs a byte for every pair.
    """
    num_rows, num_columns = -(-num_queries // BLOCK), -(-num_keys // BLOCK)
    with torch.inference_mode(False):  # kept for training steps, even if first made in inference
        row_R1, column_C = torch.arange(num_rows, device=device)[:, None], torch.arange(num_columns, device=device)
        seen_RC = column_C <= row_R1
        whole_RC = (column_C < row_R1) & (column_C < num_keys // BLOCK) & (row_R1 < num_queries // BLOCK)
        listed_RC = whole_RC if whole else seen_RC & ~whole_RC
        return *_counted(listed_RC), *_counted(listed_RC.T)


def _counted(listed_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's number of entries, [1, 1, R], and its columns, entries first, [1, 1, R, C]."""
    order_RC = listed_RC.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return listed_RC.sum(-1, dtype=torch.int32)[None, None], order_RC.to(torch.int32)[None, None].contiguous()
