"""flash_triton's backward pass: launches the kernels that compute dQ, dK and dV; triton_portable.py explains the
algorithm.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..triton_device import on_device_of
from ..triton_places import power_of_two
from .triton_launch import (
    ROWS_OF_A_CONSUMER,
    SUMS_PANEL,
    SUMS_WIDTH,
    Call,
    Form,
    Start,
    base_two,
    hopper_options,
    num_multiprocessors,
    numbers_form,
    portable_options,
    positive_scale,
    precision,
    tile_form,
)
from .triton_repeats import Launch, Made, in_a_row, kind_of, laid_out_as
from .triton_schedule import heads_a_group, heads_in_a_row
from .triton_tensors import (
    Columns,
    Shape,
    aligned,
    columns,
    copy_back,
    readable,
    strides_of,
    writable,
)
from .triton_tuning import WIDEST_TILE, Tiles, tiles_for, tiles_if_any

PREPARED = 64
"""Queries of one program of attention_prepare or attention_finish."""

MOST_TOGETHER = 16
"""Most heads in a group of the backward kernel. Programs of the last group wait longest for each other, so larger
groups end later.
"""


@dataclass(frozen=True, slots=True)
class Operands:
    """Arguments of the kernels between attention_prepare and attention_finish; `prepared` builds them."""

    one_sweep: Tiles | None
    """Tiles of attention_backward, which makes all three gradients; None if these tensors take two kernels."""
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    minus_lse: Tensor
    """-lse / log(2), [B, H, queries] with queries padded to a multiple of WIDEST_TILE."""
    minus_d: Tensor
    sums: Tensor
    """float32 memory for the sums of dQ in one sweep; empty in two sweeps."""
    shared: Tensor
    """float32 memory in which programs whose heads share keys pass on their sums of dK and dV; empty without such."""
    turns: Tensor
    """int32 zeros, counters of turns. Each of two consumers has one for every WIDEST_TILE queries of a head. If heads
    share keys, it also has one for every WIDEST_TILE keys of a key head.
    """
    call: Call
    stream: int | None
    """The raw CUDA stream if launches are kept for repeats, else None."""
    launches: list[Launch | None]


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
    """Gradients of q, k and v, each laid out as its tensor. Inputs may have any strides, as in `triton_forward`."""
    inputs = q_BHSD, k_BNKD, v_BNKD, o_BHSD, do_BHSD, lse_BHS
    kind = kind_of(_results, inputs, causal, scale, precision(q_BHSD.dtype))
    dq_BHSD, dk_BNKD, dv_BNKD, room = results = kind.tensors()
    if kind.made_again((*inputs, *results)):
        return dq_BHSD, dk_BNKD, dv_BNKD
    if q_BHSD.numel() == 0 or k_BNKD.numel() == 0:
        return dq_BHSD.zero_(), dk_BNKD.zero_(), dv_BNKD.zero_()
    dq, dk, dv = writable(dq_BHSD), writable(dk_BNKD), writable(dv_BNKD)
    # Copies have other addresses each time.
    stream = kind.stream if dq is dq_BHSD and dk is dk_BNKD and dv is dv_BNKD else None
    with on_device_of(q_BHSD):
        given = do_BHSD, q_BHSD, k_BNKD, v_BNKD, o_BHSD, lse_BHS
        operands = prepared(*given, causal=causal, scale=scale, room=room, stream=stream)
        if operands.one_sweep is not None:
            _one_sweep(operands, operands.one_sweep, dq, dk, dv)
        else:
            sweep(operands, tiles_for("backward_kv", operands.q, q_BHSD.shape[2]), dk, dv)
            sweep(operands, tiles_for("backward_q", operands.q, k_BNKD.shape[2]), dq)
    kind.keep((*inputs, *results), operands.launches)
    if scale < 0:
        dq.neg_()
    for written, wanted in ((dq, dq_BHSD), (dk, dk_BNKD), (dv, dv_BNKD)):
        copy_back(written, wanted)
    return dq_BHSD, dk_BNKD, dv_BNKD


def _results(q_BHSD: Tensor, k_BNKD: Tensor, v_BNKD: Tensor, *others: Tensor) -> tuple[Made, ...]:
    gradients = laid_out_as(q_BHSD), laid_out_as(k_BNKD), laid_out_as(v_BNKD)
    parts = _layout_for(q_BHSD, k_BNKD).parts
    return *gradients, in_a_row([sum(parts)], torch.float32)


class _Layout(NamedTuple):
    one_sweep: Tiles | None
    parts: list[int]
    """Sizes of -lse, -D, sums, shared and turns, in 32-bit numbers. All except the last are multiples of 128, as the
    copy engine needs.
    """


def _layout_for(q: Tensor, k: Tensor) -> _Layout:
    tiles = tiles_if_any("backward", q.device, 8 * q.element_size(), max(64, q.shape[-1]), q.shape[2])
    return _layout(q.shape, k.shape, tiles)


@lru_cache(maxsize=256)
def _layout(q_shape: Shape, k_shape: Shape, tiles: Tiles | None) -> _Layout:
    batch, num_heads, num_queries, head_dim = q_shape
    _, num_kv_heads, num_keys, _ = k_shape
    tiles_of_queries, tiles_of_keys = -(-num_queries // WIDEST_TILE), -(-num_keys // WIDEST_TILE)
    rows = batch * num_heads * tiles_of_queries * WIDEST_TILE
    if tiles is None:
        return _Layout(None, [rows, rows, 0, 0, 0])
    parts = _columns_of(tiles, columns(head_dim))
    shared_tiles = batch * num_kv_heads * tiles_of_keys if num_heads > num_kv_heads else 0
    num_shared = shared_tiles * 2 * WIDEST_TILE * (parts.main + parts.rest)
    turns = 2 * (rows // WIDEST_TILE + shared_tiles)
    return _Layout(tiles, [rows, rows, rows * _num_parts(parts) * SUMS_WIDTH, num_shared, turns])


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
    room: Tensor | None = None,
    stream: int | None = None,
) -> Operands:
    """Run attention_prepare, and return the arguments of the kernels after it.

    With a scale below zero, these write -dQ. `room` is memory divided as by `_layout`, allocated here if None. Launches
    on the raw CUDA `stream` are kept for repeats.
    """
    positive_q, positive = positive_scale(q_BHSD, scale)
    products = precision(q_BHSD.dtype)
    q, k, v, do = (readable(x, products) for x in (positive_q, k_BNKD, v_BNKD, do_BHSD))
    # D must be the mean of dP, so it is computed from the same rounded dO as dP.
    o, lse = readable(o_BHSD), aligned(lse_BHS)
    given = q_BHSD, k_BNKD, v_BNKD, do_BHSD, o_BHSD, lse_BHS
    if any(x is not y for x, y in zip((q, k, v, do, o, lse), given, strict=True)):
        stream = None
    call = Call(columns(q_BHSD.shape[-1]), q.dtype, q.device, products, causal, positive)
    layout = _layout_for(q_BHSD, k_BNKD)
    if room is None:
        room = torch.empty(sum(layout.parts), dtype=torch.float32, device=q.device)
    minus_lse, minus_d, sums, shared, turns = room.split_with_sizes(layout.parts)
    turns = turns.view(torch.int32)
    start = _start_of_prepare(call.parts.box, len(turns), o.dtype, o.device, o.shape, o.stride(), do.stride())
    launch = start(o, do, lse, minus_lse, minus_d, turns, stream=stream)
    return Operands(layout.one_sweep, q, k, v, do, minus_lse, minus_d, sums, shared, turns, call, stream, [launch])


@lru_cache(maxsize=256)
def _start_of_prepare(
    box: int,
    num_turns: int,
    dtype: torch.dtype,
    device: torch.device,
    shape: Shape,
    o_strides: Shape,
    do_strides: Shape,
) -> Start:
    from .triton_portable import attention_prepare

    batch, num_heads, num_queries, head_dim = shape
    num_padded = -(-num_queries // WIDEST_TILE) * WIDEST_TILE
    num_programs = num_padded // PREPARED * batch * num_heads
    strides = *strides_of(shape, o_strides)[:3], *strides_of(shape, do_strides)[:3]
    numbers = *strides, num_heads, num_queries, num_padded, head_dim, num_turns
    turns = power_of_two(-(-num_turns // num_programs))
    return Start(attention_prepare, num_programs, [None] * 6, numbers, M=PREPARED, D=box, TURNS=turns)


# --- in one sweep, on Hopper GPUs ----------------------------------------------------------------------------------


def _columns_of(tiles: Tiles, of_head: Columns) -> Columns:
    return columns(tiles.box) if of_head.box < tiles.box else of_head


def _num_parts(parts: Columns) -> int:
    return (parts.main + (max(parts.rest, SUMS_WIDTH) if parts.rest else 0)) // SUMS_WIDTH


def _one_sweep(operands: Operands, tiles: Tiles, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Write dQ, dK and dV; their layouts must suit the copy engine (TMA).

    float32 sums take B H S D * 4 bytes of memory, S and D rounded up to multiples of WIDEST_TILE and 32.
    """
    x = operands
    strides = x.q.stride(), x.k.stride(), x.v.stride(), x.do.stride(), dk.stride(), dv.stride(), dq.stride()
    start, finish = _starts_of_one_sweep(tiles, x.call, x.q.shape, x.k.shape, strides)
    given = x.q, x.k, x.v, x.do, x.sums, dk, dv, x.minus_lse, x.minus_d, x.turns, x.shared
    rests = (x.q, x.do) if _columns_of(tiles, x.call.parts).rest else ()
    swept = start(*given, *rests, stream=x.stream)
    x.launches.extend([swept, finish(x.sums, dq, stream=x.stream)])


@lru_cache(maxsize=256)
def _starts_of_one_sweep(
    tiles: Tiles, call: Call, q_shape: Shape, k_shape: Shape, strides: tuple[Shape, ...]
) -> tuple[Start, Start]:
    """The kernels, ready to launch on (q, k, v, do, sums, dk, dv, -lse, -D, turns, shared) and on (sums, dq).

    If a head has a rest of columns (`Columns`), q and do are passed again, for tiles of the rest.
    """
    from .triton_hopper_backward import attention_backward
    from .triton_portable import attention_finish

    (batch, num_heads, num_queries, head_dim), num_keys = q_shape, k_shape[2]
    numbers = _numbers(q_shape, k_shape, call.scale)
    parts = _columns_of(tiles, call.parts)
    num_parts = _num_parts(parts)
    num_rows = batch * num_heads * numbers.num_padded
    # Every program reads q, dO and the sums of a head's queries.
    bytes_a_head = num_queries * head_dim * 2 * call.dtype.itemsize
    num_programs = -(-num_keys // tiles.keys) * batch * num_heads
    num_in_a_row = heads_in_a_row(bytes_a_head, numbers.sharing, num_programs, num_multiprocessors(call.device))
    heads = batch * num_heads // num_in_a_row
    together = min(heads_a_group(num_in_a_row * bytes_a_head, heads), MOST_TOGETHER)
    num_upwards = (heads - 1) // together * together if call.causal else 0
    q, k, v, do, dk, dv = zip((q_shape, k_shape, k_shape, q_shape, k_shape, k_shape), strides[:6], strict=True)
    main, rest = (
        [tile_form(tiles, call.dtype, *x, tiles.queries, width) for x in (q, do) if width]
        for width in (parts.main, parts.rest)
    )
    of_keys = [tile_form(tiles, call.dtype, *x, tiles.keys) for x in (k, v)]
    of_gradients = [tile_form(tiles, call.dtype, *x, ROWS_OF_A_CONSUMER) for x in (dk, dv)]
    of_sums = numbers_form([num_rows * num_parts, SUMS_WIDTH], [ROWS_OF_A_CONSUMER, SUMS_WIDTH])
    of_numbers = numbers_form([num_rows], [tiles.queries])
    forms: list[Form | None] = [main[0], *of_keys, main[1], of_sums, *of_gradients]
    forms += [of_numbers, of_numbers, None, None, *rest]
    options = hopper_options(tiles, parts)
    options |= {"M": tiles.queries, "CAUSAL": call.causal}
    options |= {"GROUPED": numbers.sharing > num_in_a_row, "IN_A_ROW": num_in_a_row}
    start = Start(
        attention_backward,
        num_programs // num_in_a_row,
        forms,
        [*([] if rest else [None, None]), batch * num_heads, together, num_upwards, *numbers],
        **options,
    )
    of_dq = *strides_of(q_shape, strides[6])[:3], num_heads, num_queries, numbers.num_padded, head_dim, call.scale
    sizes = {"M": PREPARED, "PARTS": num_parts, "WIDTH": SUMS_WIDTH, "PANEL": SUMS_PANEL}
    finish = Start(attention_finish, num_rows // PREPARED * num_parts, [None] * 2, of_dq, **sizes)
    return start, finish


# --- in two sweeps -------------------------------------------------------------------------------------------------


def sweep(operands: Operands, tiles: Tiles, *gradients: Tensor) -> None:
    """Write dK and dV, or dQ, by the tiles' kernel; their layouts must suit the copy engine (TMA)."""
    x = operands
    given = x.q, x.k, x.v, x.do, *gradients
    start = _start_of_sweep(tiles, x.call, x.q.shape, x.k.shape, tuple(tensor.stride() for tensor in given))
    x.launches.append(start(*given, x.minus_lse, x.minus_d, stream=x.stream))


@lru_cache(maxsize=256)
def _start_of_sweep(tiles: Tiles, call: Call, q_shape: Shape, k_shape: Shape, strides: tuple[Shape, ...]) -> Start:
    from .triton_portable import attention_backward_kv, attention_backward_q

    of_queries, of_keys = (q_shape, tiles.queries), (k_shape, tiles.keys)
    for_keys = tiles.kernel == "backward_kv"
    kernel, gradients = (attention_backward_kv, [of_keys] * 2) if for_keys else (attention_backward_q, [of_queries])
    given = [of_queries, of_keys, of_keys, of_queries, *gradients]
    forms = [
        tile_form(tiles, call.dtype, shape, of_tensor, rows)
        for (shape, rows), of_tensor in zip(given, strides, strict=True)
    ]
    (batch, num_heads, tokens, _), rows = gradients[0]
    num_programs = -(-tokens // rows) * batch * num_heads
    numbers, options = _numbers(q_shape, k_shape, call.scale), portable_options(tiles, call.products)
    return Start(kernel, num_programs, [*forms, None, None], numbers, CAUSAL=call.causal, **options)


class _Numbers(NamedTuple):
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
