"""flash_triton's forward pass: output and log-sum-exp, the scores never in memory."""

import torch
from torch import Tensor

from steplab.ops.attention.triton_launch import (
    base_two,
    hopper_options,
    num_multiprocessors,
    on_device_of,
    portable_options,
    positive_scale,
    tiles_of_variant,
)
from steplab.ops.attention.triton_tensors import columns, copy_back, readable, writable
from steplab.ops.attention.triton_tuning import Tiles, tiles_for


def triton_forward(
    q_BHSD: Tensor, k_BNKD: Tensor, v_BNKD: Tensor, *, causal: bool, scale: float, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v and the natural logarithm of the sums of exponentials.

    Takes float32, bfloat16 or float16 of any strides, a head dimension up to 256, and key heads N that divide H. The
    output is laid out as q is; log-sum-exp is float32 [B, H, S]. A query that sees no key gets zeros and -inf. Without
    `tiles`, those of the table.
    """
    o_BHSD = torch.empty_like(q_BHSD)
    lse_BHS = torch.empty(q_BHSD.shape[:-1], dtype=torch.float32, device=q_BHSD.device)
    batch, num_heads, num_queries, head_dim = q_BHSD.shape
    num_keys = k_BNKD.shape[2]
    if o_BHSD.numel() == 0 or num_keys == 0:
        return o_BHSD.zero_(), lse_BHS.fill_(float("-inf"))
    q_BHSD, scale = positive_scale(q_BHSD, scale)
    q, k, v, o = readable(q_BHSD), readable(k_BNKD), readable(v_BNKD), writable(o_BHSD)
    parts = columns(head_dim)
    tiles = tiles or tiles_for("forward", q, parts.box, num_keys)
    num_tasks = -(-num_queries // tiles.queries) * batch * num_heads
    shape = num_heads, num_heads // k.shape[1], num_queries, num_keys
    if tiles.variant == "hopper":
        from steplab.ops.attention.triton_hopper_forward import forward_kernel

        num_programs = min(num_tasks, num_multiprocessors(q)) if tiles.persistent else num_tasks
        rows = 64  # of each of the two consumers
        numbers: tuple[int, ...] = (num_tasks, *shape)
        options = hopper_options(tiles, parts) | {"N": tiles.keys}
    else:
        from steplab.ops.attention.triton_portable_forward import forward_kernel

        num_programs, rows, numbers = num_tasks, tiles.queries, shape
        options = portable_options(tiles, q.dtype)
    with on_device_of(q):
        forward_kernel[(num_programs,)](
            tiles_of_variant(tiles, q, tiles.queries),
            tiles_of_variant(tiles, k, tiles.keys),
            tiles_of_variant(tiles, v, tiles.keys),
            tiles_of_variant(tiles, o, rows),
            lse_BHS,
            *numbers,
            base_two(scale),
            CAUSAL=causal,
            **options,
        )
    copy_back(o, o_BHSD)
    return o_BHSD, lse_BHS
