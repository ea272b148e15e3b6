"""Splits a merged linear layer's output into queries, keys and values with rotary embedding; backward joins their
gradients.

Each is contiguous as [B, T, heads, D], which attention takes as [B, heads, T, D] without a copy. Attention's output
then suits the next linear layer. Only the table is saved for the backward pass.

Shape suffixes: B batch, T tokens (context), H heads, N heads of keys and values, D head dimension, E (H + 2 N) D, 2
cosine and sine.
"""

from typing import Any

import torch
from torch import Tensor

from .errors import Unsupported, UserError
from .torch_library import define, define_derivative, define_with_amax
from .triton_device import on_device_of, refuse_second_derivative, refuse_unserved
from .triton_places import power_of_two


def plain_rotary_heads(merged_BTE: Tensor, table_2TD: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, H, T, D], keys and values [B, N, T, D]: the reference, as the formulas read.

    The table is [2, T, D/2] (Su et al. 2021, section 3.4).
    """
    head_dim = 2 * table_2TD.shape[-1]
    num_kv_heads = (merged_BTE.shape[-1] // head_dim - num_heads) // 2
    heads_BETD = merged_BTE.unflatten(-1, (-1, head_dim)).transpose(1, 2)
    q_BHTD, k_BNTD, v_BNTD = heads_BETD.split((num_heads, num_kv_heads, num_kv_heads), 1)
    return _rotated(q_BHTD, table_2TD), _rotated(k_BNTD, table_2TD), v_BNTD


def _rotated(x_BHTD: Tensor, table_2TD: Tensor) -> Tensor:
    cosine_TD, sine_TD = table_2TD
    a, b = x_BHTD.chunk(2, -1)
    return torch.cat((a * cosine_TD - b * sine_TD, b * cosine_TD + a * sine_TD), -1).to(x_BHTD.dtype)


ELEMENTS, NUM_WARPS = 1024, 4
"""Pairs (x[i], x[i + D/2]) of a program's tile (rows x the power of two that holds D/2), and its warps."""
_INSTEAD = "use steplab.ops.rotary_heads.plain_rotary_heads"


def rotary_heads(merged_BTE: Tensor, table_2TD: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, H, T, D], keys and values [B, N, T, D] of merged [B, T, (H + 2 N) D]; queries and keys are rotated.

    table: float32 [2, positions, D/2], cosines and sines of at least T positions (Su et al. 2021, section 3.4). Pairs
    (x[i], x[i + D/2]) rotate. Computed in float32, rounded once.

    For float32, bfloat16 and float16 on CUDA (CPU: TRITON_INTERPRET=1). Raises UserError for other shapes and tables,
    Unsupported for other dtypes and devices, and for a trained table.
    """
    if not _fit(merged_BTE.shape, table_2TD.shape, num_heads) or table_2TD.dtype != torch.float32:
        raise UserError(
            f"rotary_heads takes [B, T, (H + 2 N) D] and a float32 table [2, T, D/2], not {list(merged_BTE.shape)} and "
            f"{list(table_2TD.shape)} of {table_2TD.dtype} with {num_heads} heads"
        )
    refuse_unserved("rotary_heads", merged_BTE, _INSTEAD)
    if table_2TD.requires_grad and torch.is_grad_enabled():
        raise Unsupported("rotary_heads with a trained table", "its backward pass has no gradient of it", _INSTEAD)
    q_BTHD, k_BTND, v_BTND = torch.ops.steplab.rotary_heads(merged_BTE, table_2TD, num_heads)
    return q_BTHD.transpose(1, 2), k_BTND.transpose(1, 2), v_BTND.transpose(1, 2)


def rotary_heads_backward_amax(
    dq_BHTD: Tensor, dk_BNTD: Tensor, dv_BNTD: Tensor, table_2TD: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of merged from its heads' gradients, and its largest magnitude: a float32 scalar on the device, NaN
    if any element is.
    """
    gradients = (x.transpose(1, 2) for x in (dq_BHTD, dk_BNTD, dv_BNTD))
    d_merged_BTE, amax = torch.ops.steplab.rotary_heads_backward_amax(*gradients, table_2TD)
    return d_merged_BTE, amax


def _fit(merged: torch.Size, table: torch.Size, num_heads: int) -> bool:
    if len(merged) != 3 or len(table) != 3 or table[0] != 2 or table[1] < merged[1] or not table[2] or num_heads < 1:
        return False
    of_keys_and_values = merged[2] - num_heads * 2 * table[2]  # divmod takes no symbolic sizes
    return of_keys_and_values > 0 and of_keys_and_values % (4 * table[2]) == 0


def _forward(merged: Tensor, table: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    from .block_kernels import rotary_heads_kernel

    merged, table = merged.contiguous(), _rows_together(table)
    q, k, v = _fake_forward(merged, table, num_heads)
    batch, context, _, head_dim = q.shape
    if merged.numel():
        with on_device_of(merged):
            rotary_heads_kernel[_grid(q, k)](
                merged, table, q, k, v, table.stride(0), batch * context, context, num_heads, k.shape[2], head_dim,
                ROWS=_rows(head_dim), HALF=power_of_two(head_dim // 2), enable_fp_fusion=True, num_warps=NUM_WARPS,
            )  # fmt: skip
    return q, k, v


def _backward(dq: Tensor, dk: Tensor, dv: Tensor, table: Tensor, amax: Tensor | None = None) -> Tensor:
    from .block_kernels import rotary_heads_backward_kernel

    dq, dk, dv = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk, dv))
    table = _rows_together(table)
    grad = _fake_backward(dq, dk, dv, table)
    batch, context, num_heads, head_dim = dq.shape
    if grad.numel():
        strides = [stride for x in (dq, dk, dv) for stride in x.stride()[:3]]
        with on_device_of(dq):
            rotary_heads_backward_kernel[_grid(dq, dk)](
                dq, dk, dv, table, grad, amax, table.stride(0), *strides,
                batch * context, context, num_heads, dk.shape[2], head_dim,
                ROWS=_rows(head_dim), HALF=power_of_two(head_dim // 2), enable_fp_fusion=True, num_warps=NUM_WARPS,
            )  # fmt: skip
    return grad


def _rows_together(table: Tensor) -> Tensor:
    return table if table.stride()[1:] == (table.shape[-1], 1) else table.contiguous()


def _rows(head_dim: int) -> int:
    return max(ELEMENTS // power_of_two(head_dim // 2), 1)


def _grid(q_BTHD: Tensor, k_BTND: Tensor) -> tuple[int]:
    head_dim = q_BTHD.shape[-1]
    of_queries, of_keys = (-(-(x.numel() // head_dim) // _rows(head_dim)) for x in (q_BTHD, k_BTND))
    return (of_queries + 2 * of_keys,)


def _fake_forward(merged: Tensor, table: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    head_dim = 2 * table.shape[-1]
    num_kv_heads = (merged.shape[-1] // head_dim - num_heads) // 2
    q, k, v = (merged.new_empty(*merged.shape[:2], n, head_dim) for n in (num_heads, num_kv_heads, num_kv_heads))
    return q, k, v


def _fake_backward(dq: Tensor, dk: Tensor, dv: Tensor, table: Tensor) -> Tensor:
    return dq.new_empty(*dq.shape[:2], (dq.shape[2] + 2 * dk.shape[2]) * dq.shape[3])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[1])


def _differentiate(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None, None]:
    refuse_second_derivative("rotary_heads", _INSTEAD)
    (table,) = ctx.saved_tensors
    return torch.ops.steplab.rotary_heads_backward(dq, dk, dv, table), None, None


OPERATOR = define(
    "rotary_heads", "(Tensor merged, Tensor table, int num_heads) -> (Tensor, Tensor, Tensor)", _forward, _fake_forward
)
"""The operator steplab::rotary_heads, for selective checkpointing."""
_GRADIENTS = "(Tensor dq, Tensor dk, Tensor dv, Tensor table)"
define_with_amax("rotary_heads_backward", _GRADIENTS, 1, _backward, _fake_backward)
define_derivative("rotary_heads", _differentiate, _save)
