"""A merged projection taken apart into heads, with rotary embedding, as the formulas read.

Shape suffixes: B batch, T tokens (context), H heads, N heads of keys and values, D head dimension, E (H + 2 N) D, 2
cosine and sine.
"""

import torch
from torch import Tensor


def plain_rotary_heads(merged_BTE: Tensor, table_2TD: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, H, T, D], keys and values [B, N, T, D]; the table is [2, T, D/2] (Su et al. 2021, section 3.4)."""
    head_dim = 2 * table_2TD.shape[-1]
    num_kv_heads = (merged_BTE.shape[-1] // head_dim - num_heads) // 2
    heads_BETD = merged_BTE.unflatten(-1, (-1, head_dim)).transpose(1, 2)
    q_BHTD, k_BNTD, v_BNTD = heads_BETD.split((num_heads, num_kv_heads, num_kv_heads), 1)
    return _rotated(q_BHTD, table_2TD), _rotated(k_BNTD, table_2TD), v_BNTD


def _rotated(x_BHTD: Tensor, table_2TD: Tensor) -> Tensor:
    """The pairs (x[i], x[i + D/2]) turned by their position's angle."""
    cosine_TD, sine_TD = table_2TD
    a, b = x_BHTD.chunk(2, -1)
    return torch.cat((a * cosine_TD - b * sine_TD, b * cosine_TD + a * sine_TD), -1).to(x_BHTD.dtype)
