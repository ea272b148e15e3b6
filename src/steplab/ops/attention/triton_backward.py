"""flash_triton's backward pass: three gradients from what forward kept. triton_portable_backward.py says how."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from steplab.ops.attention.triton_launch import (
    Call,
    Form,
    Start,
    base_two,
    hopper_options,
    number_form,
    on_device_of,
    portable_options,
    positive_scale,
    precision,
    tile_form,
)
from steplab.ops.attention.triton_tensors import (
    Shape,
    aligned,
    columns,
    copy_back,
    readable,
    strides_of,
    writable,
)
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
    call: Call


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
    products = precision(q_BHSD.dtype)
    q, k, v, do = (readable(x, products) for x in (positive_q, k_BNKD, v_BNKD, do_BHSD))
    parts = columns(q_BHSD.shape[-1])
    # D, which is to be the mean of dP, is made of dO as dP is: rounded where that is.
    subtrahends = _subtrahends(readable(o_BHSD), do, lse_BHS, positive, parts.box)
    return Operands(q, k, v, do, *subtrahends, Call(parts, q.dtype, q.device, products, causal, positive))


def _subtrahends(o: Tensor, do: Tensor, lse_BHS: Tensor, scale: float, box: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, num_heads, num_queries, _ = o.shape
    shape = batch, num_heads, -(-num_queries // WIDEST_TILE) * WIDEST_TILE
    minus_lse, minus_d, start_s = (torch.empty(shape, dtype=torch.float32, device=o.device) for _ in range(3))
    start = _start_of_prepare(box, o.dtype, o.device, scale, o.shape, o.stride(), do.stride())
    start(o, do, aligned(lse_BHS), minus_lse, minus_d, start_s)
    return minus_lse, minus_d, start_s


@lru_cache(maxsize=256)
def _start_of_prepare(
    box: int, dtype: torch.dtype, device: torch.device, scale: float, shape: Shape, o_strides: Shape, do_strides: Shape
) -> Start:
    """The kernel for (o, do, lse, minus_lse, minus_d, start_s)."""
    from steplab.ops.attention.triton_portable_backward import prepare_kernel

    batch, num_heads, num_queries, head_dim = shape
    num_padded = -(-num_queries // WIDEST_TILE) * WIDEST_TILE
    strides = *strides_of(shape, o_strides)[:3], *strides_of(shape, do_strides)[:3]
    numbers = *strides, num_heads, num_queries, num_padded, head_dim, scale
    return Start(prepare_kernel, num_padded // PREPARED * batch * num_heads, [None] * 6, numbers, M=PREPARED, D=box)


def sweep_for_keys(operands: Operands, dk: Tensor, dv: Tensor, tiles: Tiles | None = None) -> None:
    """Write dK and dV, which the copy engine must take as they are. Without `tiles`, those of the table."""
    x = operands
    tiles = tiles or tiles_for("backward_kv", x.q, x.call.parts.box, x.q.shape[2])
    strides = x.q.stride(), x.k.stride(), x.v.stride(), x.do.stride(), dk.stride(), dv.stride()
    start = _start_for_keys(tiles, x.call, x.q.shape, x.k.shape, strides)
    start(x.q, x.k, x.v, x.do, dk, dv, x.start_s if tiles.variant == "hopper" else x.minus_lse, x.minus_d)


@lru_cache(maxsize=256)
def _start_for_keys(tiles: Tiles, call: Call, q_shape: Shape, k_shape: Shape, strides: tuple[Shape, ...]) -> Start:
    """The kernel for (q, k, v, do, dk, dv) of these strides, then -lse and -D."""
    numbers = _numbers(q_shape, k_shape, call.scale)
    of_numbers: tuple[Form | None, Form | None] = (None, None)
    if tiles.variant == "hopper":
        from steplab.ops.attention.triton_hopper_backward import backward_kv_kernel

        rows = 64  # of each of the two consumers
        form = number_form(q_shape[0] * q_shape[1] * numbers.num_padded, tiles.queries)
        of_numbers = form, form
        options = hopper_options(tiles, call.parts) | {"M": tiles.queries}
    else:
        from steplab.ops.attention.triton_portable_backward import backward_kv_kernel

        rows = tiles.keys
        options = portable_options(tiles, call.products)
    shapes = q_shape, k_shape, k_shape, q_shape, k_shape, k_shape
    all_rows = tiles.queries, rows, rows, tiles.queries, rows, rows
    forms = [tile_form(tiles, call.dtype, *form) for form in zip(shapes, strides, all_rows, strict=True)]
    num_programs = -(-k_shape[2] // tiles.keys) * k_shape[0] * k_shape[1]
    return Start(backward_kv_kernel, num_programs, [*forms, *of_numbers], numbers, CAUSAL=call.causal, **options)


def sweep_for_queries(operands: Operands, dq: Tensor, tiles: Tiles | None = None) -> None:
    """Write dQ, likewise."""
    x = operands
    tiles = tiles or tiles_for("backward_q", x.q, x.call.parts.box, x.k.shape[2])
    strides = x.q.stride(), x.k.stride(), x.v.stride(), x.do.stride(), dq.stride()
    start = _start_for_queries(tiles, x.call, x.q.shape, x.k.shape, strides)
    start(x.q, x.k, x.v, x.do, dq, x.start_s if tiles.variant == "hopper" else x.minus_lse, x.minus_d)


@lru_cache(maxsize=256)
def _start_for_queries(tiles: Tiles, call: Call, q_shape: Shape, k_shape: Shape, strides: tuple[Shape, ...]) -> Start:
    """The kernel for (q, k, v, do, dq) of these strides, then -lse and -D."""
    if tiles.variant == "hopper":
        from steplab.ops.attention.triton_hopper_backward import backward_q_kernel

        rows = 64  # of each of the two consumers
        options = hopper_options(tiles, call.parts) | {"N": tiles.keys}
    else:
        from steplab.ops.attention.triton_portable_backward import backward_q_kernel

        rows = tiles.queries
        options = portable_options(tiles, call.products)
    shapes = q_shape, k_shape, k_shape, q_shape, q_shape
    all_rows = rows, tiles.keys, tiles.keys, rows, rows
    forms = [tile_form(tiles, call.dtype, *form) for form in zip(shapes, strides, all_rows, strict=True)]
    num_programs = -(-q_shape[2] // tiles.queries) * q_shape[0] * q_shape[1]
    numbers = _numbers(q_shape, k_shape, call.scale)
    return Start(backward_q_kernel, num_programs, [*forms, None, None], numbers, CAUSAL=call.causal, **options)


class _Numbers(NamedTuple):
    """Arguments that both sweeps take in this order."""

    num_heads: int
    sharing: int
    num_queries: int
    num_keys: int
    num_padded: int
    scale: float
    scale_log2: float


def _numbers(q_shape: Shape, k_shape: Shape, scale: float) -> _Numbers:
    (_, num_heads, num_queries, _), (_, num_kv_heads, num_keys, _) = q_shape, k_shape
    num_padded = -(-num_queries // WIDEST_TILE) * WIDEST_TILE
    return _Numbers(num_heads, num_heads // num_kv_heads, num_queries, num_keys, num_padded, scale, base_two(scale))
