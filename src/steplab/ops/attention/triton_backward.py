"""flash_triton's backward pass: three gradients from what forward kept. triton_portable_backward.py says how."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from steplab.ops.attention.triton_launch import (
    ROWS_OF_A_CONSUMER,
    SUMS_WIDTH,
    Call,
    Start,
    base_two,
    hopper_options,
    number_form,
    on_device_of,
    portable_options,
    positive_scale,
    precision,
    sums_form,
    tile_form,
)
from steplab.ops.attention.triton_schedule import heads_a_group
from steplab.ops.attention.triton_tensors import (
    Shape,
    aligned,
    columns,
    copy_back,
    readable,
    strides_of,
    writable,
)
from steplab.ops.attention.triton_tuning import WIDEST_TILE, Tiles, tiles_for, tiles_if_any

PREPARED = 64
"""Queries that a program of the first kernel prepares, and one of the last finishes."""

MOST_TOGETHER = 16
"""Heads of a group: the more in the last, whose programs wait the longest for each other, the later it ends."""


@dataclass(frozen=True, slots=True)
class Operands:
    """What the kernels between the first and the last read; see `prepared`."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    minus_lse: Tensor
    """-lse / log(2), [B, H, queries padded to a multiple of WIDEST_TILE]; like the others, as `prepare_kernel` says."""
    minus_d: Tensor
    """-rowsum(dO o O)."""
    turns: Tensor
    """Zeros, int32: one for every PREPARED queries."""
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
        tiles = one_sweep_tiles(operands.q)
        if tiles is not None:
            one_sweep(operands, dq, dk, dv, tiles)
        else:
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
    subtrahends = _subtrahends(readable(o_BHSD), do, lse_BHS, parts.box)
    return Operands(q, k, v, do, *subtrahends, Call(parts, q.dtype, q.device, products, causal, positive))


def _subtrahends(o: Tensor, do: Tensor, lse_BHS: Tensor, box: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, num_heads, num_queries, _ = o.shape
    shape = batch, num_heads, -(-num_queries // WIDEST_TILE) * WIDEST_TILE
    minus_lse, minus_d = (torch.empty(shape, dtype=torch.float32, device=o.device) for _ in range(2))
    turns = torch.empty(batch * num_heads * shape[2] // PREPARED, dtype=torch.int32, device=o.device)
    start = _start_of_prepare(box, o.dtype, o.device, o.shape, o.stride(), do.stride())
    start(o, do, aligned(lse_BHS), minus_lse, minus_d, turns)
    return minus_lse, minus_d, turns


@lru_cache(maxsize=256)
def _start_of_prepare(
    box: int, dtype: torch.dtype, device: torch.device, shape: Shape, o_strides: Shape, do_strides: Shape
) -> Start:
    """The kernel for (o, do, lse, minus_lse, minus_d, turns)."""
    from steplab.ops.attention.triton_portable_backward import prepare_kernel

    batch, num_heads, num_queries, head_dim = shape
    num_padded = -(-num_queries // WIDEST_TILE) * WIDEST_TILE
    strides = *strides_of(shape, o_strides)[:3], *strides_of(shape, do_strides)[:3]
    numbers = *strides, num_heads, num_queries, num_padded, head_dim
    return Start(prepare_kernel, num_padded // PREPARED * batch * num_heads, [None] * 6, numbers, M=PREPARED, D=box)


# --- in one sweep, on Hopper GPUs ----------------------------------------------------------------------------------


def one_sweep_tiles(q: Tensor) -> Tiles | None:
    """The tiles of the kernel that makes all three gradients; None where there is none for such tensors."""
    return tiles_if_any("backward", q, max(64, columns(q.shape[-1]).box), q.shape[2])


def one_sweep(operands: Operands, dq: Tensor, dk: Tensor, dv: Tensor, tiles: Tiles) -> None:
    """Write all three, which the copy engine must take as they are.

    Takes B H S D * 4 bytes of memory for sums in float32, S and D filled up to multiples of WIDEST_TILE and 32.
    """
    x = operands
    strides = x.q.stride(), x.k.stride(), x.v.stride(), x.do.stride(), dk.stride(), dv.stride(), dq.stride()
    start, finish, num_sums = _starts_of_one_sweep(tiles, x.call, x.q.shape, x.k.shape, strides)
    sums = torch.empty(num_sums, dtype=torch.float32, device=dq.device)
    start(x.q, x.k, x.v, x.do, sums, dk, dv, x.minus_lse, x.minus_d, x.turns)
    finish(sums, dq)


@lru_cache(maxsize=256)
def _starts_of_one_sweep(
    tiles: Tiles, call: Call, q_shape: Shape, k_shape: Shape, strides: tuple[Shape, ...]
) -> tuple[Start, Start, int]:
    """The kernels for (q, k, v, do, sums, dk, dv, -lse, -D, turns) and for (sums, dq), and the number of sums."""
    from steplab.ops.attention.triton_hopper_backward import backward_kernel
    from steplab.ops.attention.triton_portable_backward import finish_kernel

    (batch, num_heads, num_queries, head_dim), (_, num_kv_heads, num_keys, _) = q_shape, k_shape
    numbers = _numbers(q_shape, k_shape, call.scale)
    parts = columns(tiles.box) if call.parts.box < tiles.box else call.parts
    num_parts = (parts.main + (max(parts.rest, SUMS_WIDTH) if parts.rest else 0)) // SUMS_WIDTH
    num_rows = batch * num_heads * numbers.num_padded
    heads = batch * num_kv_heads
    # Of a head's queries, q, dO and the sums are read by every program.
    together = min(heads_a_group(num_queries * head_dim * 2 * call.dtype.itemsize, heads), MOST_TOGETHER)
    num_upwards = (heads - 1) // together * together if call.causal else 0
    shapes = q_shape, k_shape, k_shape, q_shape, k_shape, k_shape
    half = ROWS_OF_A_CONSUMER
    all_rows = tiles.queries, tiles.keys, tiles.keys, tiles.queries, half, half
    q, k, v, do, dk, dv = (
        tile_form(tiles, call.dtype, *form) for form in zip(shapes, strides[:6], all_rows, strict=True)
    )
    of_numbers = number_form(num_rows, tiles.queries)
    forms = [q, k, v, do, sums_form(num_rows * num_parts), dk, dv, of_numbers, of_numbers, None]
    options = hopper_options(tiles, parts) | {"M": tiles.queries}
    num_programs = -(-num_keys // tiles.keys) * heads
    start = Start(
        backward_kernel,
        num_programs,
        forms,
        [heads, together, num_upwards, *numbers],
        CAUSAL=call.causal,
        **options,
    )
    of_dq = *strides_of(q_shape, strides[6])[:3], num_heads, num_queries, numbers.num_padded, head_dim, call.scale
    sizes = {"M": PREPARED, "PARTS": num_parts, "WIDTH": SUMS_WIDTH}
    finish = Start(finish_kernel, num_rows // PREPARED * num_parts, [None] * 2, of_dq, **sizes)
    return start, finish, num_rows * num_parts * SUMS_WIDTH


# --- in two sweeps -------------------------------------------------------------------------------------------------


def sweep_for_keys(operands: Operands, dk: Tensor, dv: Tensor, tiles: Tiles | None = None) -> None:
    """Write dK and dV, which the copy engine must take as they are. Without `tiles`, those of the table."""
    x = operands
    tiles = tiles or tiles_for("backward_kv", x.q, x.call.parts.box, x.q.shape[2])
    strides = x.q.stride(), x.k.stride(), x.v.stride(), x.do.stride(), dk.stride(), dv.stride()
    start = _start_for_keys(tiles, x.call, x.q.shape, x.k.shape, strides)
    start(x.q, x.k, x.v, x.do, dk, dv, x.minus_lse, x.minus_d)


@lru_cache(maxsize=256)
def _start_for_keys(tiles: Tiles, call: Call, q_shape: Shape, k_shape: Shape, strides: tuple[Shape, ...]) -> Start:
    """The kernel for (q, k, v, do, dk, dv) of these strides, then -lse and -D."""
    from steplab.ops.attention.triton_portable_backward import backward_kv_kernel

    numbers = _numbers(q_shape, k_shape, call.scale)
    shapes = q_shape, k_shape, k_shape, q_shape, k_shape, k_shape
    all_rows = tiles.queries, tiles.keys, tiles.keys, tiles.queries, tiles.keys, tiles.keys
    forms = [tile_form(tiles, call.dtype, *form) for form in zip(shapes, strides, all_rows, strict=True)]
    num_programs = -(-k_shape[2] // tiles.keys) * k_shape[0] * k_shape[1]
    options = portable_options(tiles, call.products)
    return Start(backward_kv_kernel, num_programs, [*forms, None, None], numbers, CAUSAL=call.causal, **options)


def sweep_for_queries(operands: Operands, dq: Tensor, tiles: Tiles | None = None) -> None:
    """Write dQ, likewise."""
    x = operands
    tiles = tiles or tiles_for("backward_q", x.q, x.call.parts.box, x.k.shape[2])
    strides = x.q.stride(), x.k.stride(), x.v.stride(), x.do.stride(), dq.stride()
    start = _start_for_queries(tiles, x.call, x.q.shape, x.k.shape, strides)
    start(x.q, x.k, x.v, x.do, dq, x.minus_lse, x.minus_d)


@lru_cache(maxsize=256)
def _start_for_queries(tiles: Tiles, call: Call, q_shape: Shape, k_shape: Shape, strides: tuple[Shape, ...]) -> Start:
    """The kernel for (q, k, v, do, dq) of these strides, then -lse and -D."""
    from steplab.ops.attention.triton_portable_backward import backward_q_kernel

    shapes = q_shape, k_shape, k_shape, q_shape, q_shape
    all_rows = tiles.queries, tiles.keys, tiles.keys, tiles.queries, tiles.queries
    forms = [tile_form(tiles, call.dtype, *form) for form in zip(shapes, strides, all_rows, strict=True)]
    num_programs = -(-q_shape[2] // tiles.queries) * q_shape[0] * q_shape[1]
    numbers = _numbers(q_shape, k_shape, call.scale)
    options = portable_options(tiles, call.products)
    return Start(backward_q_kernel, num_programs, [*forms, None, None], numbers, CAUSAL=call.causal, **options)


class _Numbers(NamedTuple):
    """Arguments that all sweeps take in this order."""

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
