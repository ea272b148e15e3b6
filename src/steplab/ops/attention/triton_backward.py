"""flash_triton's backward pass: three gradients from what forward kept. triton_portable_backward.py says how."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steplab.ops.attention.triton_launch import (
    base_two,
    hopper_options,
    numbers_of,
    on_device_of,
    portable_options,
    positive_scale,
    tiles_of_variant,
)
from steplab.ops.attention.triton_tensors import Columns, columns, copy_back, readable, strides_of, writable
from steplab.ops.attention.triton_tuning import WIDEST_TILE, Tiles, tiles_for

PREPARED = 64
"""Queries that a program of the first kernel prepares."""


@dataclass(frozen=True, slots=True)
class Operands:
    """What both sweeps read; see `prepared`."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    minus_lse: Tensor
    """-lse / log(2), [B, H, queries padded to a multiple of WIDEST_TILE]; like the others, as `prepare_kernel` says."""
    minus_d: Tensor
    """-rowsum(dO o O)."""
    start_s: Tensor
    """-lse / scale."""
    causal: bool
    scale: float
    parts: Columns

    @property
    def numbers(self) -> tuple[int | float, ...]:
        """Arguments that both sweeps take in this order."""
        (_, num_heads, num_queries, _), (_, num_kv_heads, num_keys, _) = self.q.shape, self.k.shape
        num_padded = self.start_s.shape[-1]
        scales = self.scale, base_two(self.scale)
        return num_heads, num_heads // num_kv_heads, num_queries, num_keys, num_padded, *scales


def triton_backward(
    do_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BNKD: Tensor,
    v_BNKD: Tensor,
    o_BHSD: Tensor,
    lse_BHS: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each laid out as its tensor; of any strides, as in `triton_forward`."""
    dq_BHSD, dk_BNKD, dv_BNKD = torch.empty_like(q_BHSD), torch.empty_like(k_BNKD), torch.empty_like(v_BNKD)
    if q_BHSD.numel() == 0 or k_BNKD.numel() == 0:
        return dq_BHSD.zero_(), dk_BNKD.zero_(), dv_BNKD.zero_()
    dq, dk, dv = writable(dq_BHSD), writable(dk_BNKD), writable(dv_BNKD)
    with on_device_of(q_BHSD):
        operands = prepared(do_BHSD, q_BHSD, k_BNKD, v_BNKD, o_BHSD, lse_BHS, causal=causal, scale=scale)
        sweep_for_keys(operands, dk, dv)
        sweep_for_queries(operands, dq)
    if scale < 0:
        dq.neg_()
    for written, wanted in ((dq, dq_BHSD), (dk, dk_BNKD), (dv, dv_BNKD)):
        copy_back(written, wanted)
    return dq_BHSD, dk_BNKD, dv_BNKD


def prepared(
    do_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BNKD: Tensor,
    v_BNKD: Tensor,
    o_BHSD: Tensor,
    lse_BHS: Tensor,
    *,
    causal: bool,
    scale: float,
) -> Operands:
    """What the sweeps take, for the arguments of `triton_backward`; with a scale below zero, dQ comes out negated."""
    positive_q, positive = positive_scale(q_BHSD, scale)
    do, o = readable(do_BHSD), readable(o_BHSD)
    q, k, v = readable(positive_q), readable(k_BNKD), readable(v_BNKD)
    parts = columns(q_BHSD.shape[-1])
    return Operands(q, k, v, do, *_subtrahends(o, do, lse_BHS, positive, parts.box), causal, positive, parts)


def _subtrahends(o: Tensor, do: Tensor, lse_BHS: Tensor, scale: float, box: int) -> tuple[Tensor, Tensor, Tensor]:
    from steplab.ops.attention.triton_portable_backward import prepare_kernel

    batch, num_heads, num_queries, head_dim = o.shape
    num_padded = -(-num_queries // WIDEST_TILE) * WIDEST_TILE
    shape = batch, num_heads, num_padded
    minus_lse, minus_d, start_s = (torch.empty(shape, dtype=torch.float32, device=o.device) for _ in range(3))
    prepare_kernel[(num_padded // PREPARED * batch * num_heads,)](
        o,
        do,
        lse_BHS.contiguous(),
        minus_lse,
        minus_d,
        start_s,
        *strides_of(o)[:3],
        *strides_of(do)[:3],
        num_heads,
        num_queries,
        num_padded,
        head_dim,
        scale,
        M=PREPARED,
        D=box,
    )
    return minus_lse, minus_d, start_s


def sweep_for_keys(operands: Operands, dk: Tensor, dv: Tensor, tiles: Tiles | None = None) -> None:
    """Write dK and dV, which the copy engine must take as they are. Without `tiles`, those of the table."""
    batch, num_kv_heads, num_keys, _ = dk.shape
    tiles = tiles or tiles_for("backward_kv", operands.q, operands.parts.box, operands.q.shape[2])
    numbers: tuple[Any, Any] = (operands.minus_lse, operands.minus_d)
    if tiles.variant == "hopper":
        from steplab.ops.attention.triton_hopper_backward import backward_kv_kernel

        rows = 64  # of each of the two consumers
        numbers = numbers_of(operands.start_s, tiles.queries), numbers_of(operands.minus_d, tiles.queries)
        options = hopper_options(tiles, operands.parts) | {"M": tiles.queries}
    else:
        from steplab.ops.attention.triton_portable_backward import backward_kv_kernel

        rows = tiles.keys
        options = portable_options(tiles, dk.dtype)
    backward_kv_kernel[(-(-num_keys // tiles.keys) * batch * num_kv_heads,)](
        tiles_of_variant(tiles, operands.q, tiles.queries),
        tiles_of_variant(tiles, operands.k, rows),
        tiles_of_variant(tiles, operands.v, rows),
        tiles_of_variant(tiles, operands.do, tiles.queries),
        tiles_of_variant(tiles, dk, rows),
        tiles_of_variant(tiles, dv, rows),
        *numbers,
        *operands.numbers,
        CAUSAL=operands.causal,
        **options,
    )


def sweep_for_queries(operands: Operands, dq: Tensor, tiles: Tiles | None = None) -> None:
    """Write dQ, likewise."""
    batch, num_heads, num_queries, _ = dq.shape
    tiles = tiles or tiles_for("backward_q", operands.q, operands.parts.box, operands.k.shape[2])
    if tiles.variant == "hopper":
        from steplab.ops.attention.triton_hopper_backward import backward_q_kernel

        rows = 64  # of each of the two consumers
        options = hopper_options(tiles, operands.parts) | {"N": tiles.keys}
    else:
        from steplab.ops.attention.triton_portable_backward import backward_q_kernel

        rows = tiles.queries
        options = portable_options(tiles, dq.dtype)
    backward_q_kernel[(-(-num_queries // tiles.queries) * batch * num_heads,)](
        tiles_of_variant(tiles, operands.q, rows),
        tiles_of_variant(tiles, operands.k, tiles.keys),
        tiles_of_variant(tiles, operands.v, tiles.keys),
        tiles_of_variant(tiles, operands.do, rows),
        tiles_of_variant(tiles, dq, rows),
        operands.start_s if tiles.variant == "hopper" else operands.minus_lse,
        operands.minus_d,
        *operands.numbers,
        CAUSAL=operands.causal,
        **options,
    )
