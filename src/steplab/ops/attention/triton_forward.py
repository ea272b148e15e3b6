"""flash_triton's forward pass: output and log-sum-exp, without scores in memory."""

from functools import lru_cache

import torch
from torch import Tensor

from ..triton_device import on_device_of
from .shapes import refuse_unserved
from .triton_launch import (
    ROWS_OF_A_CONSUMER,
    Call,
    Start,
    base_two,
    hopper_options,
    num_multiprocessors,
    portable_options,
    positive_scale,
    precision,
    tile_form,
)
from .triton_repeats import Made, in_a_row, kind_of, laid_out_as
from .triton_schedule import heads_a_group, task_table
from .triton_tensors import Shape, columns, copy_back, readable, writable
from .triton_tuning import Tiles, tiles_for


def triton_forward(
    q_BHSD: Tensor, k_BNKD: Tensor, v_BNKD: Tensor, *, causal: bool, scale: float, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v, laid out as q, and the log-sum-exp of each row of scores, float32 [B, H, S].

    Takes float32, bfloat16 or float16 of any strides, a head dimension up to 256, and key heads N that divide H. A
    query that sees no key gets zeros and -inf. `tiles` default to the table's.
    """
    products = precision(q_BHSD.dtype)
    inputs = q_BHSD, k_BNKD, v_BNKD
    kind = kind_of(_results, inputs, causal, scale, products, tiles)
    o_BHSD, lse_BHS = results = kind.tensors()
    if kind.made_again((*inputs, *results)):
        return o_BHSD, lse_BHS
    refuse_unserved("flash_triton", q_BHSD, k_BNKD, causal=causal, device="cuda")
    if o_BHSD.numel() == 0 or k_BNKD.shape[2] == 0:
        return o_BHSD.zero_(), lse_BHS.fill_(float("-inf"))
    parts = columns(q_BHSD.shape[-1])
    positive_q, scale = positive_scale(q_BHSD, scale)
    q, k, v = (readable(x, products) for x in (positive_q, k_BNKD, v_BNKD))
    o = writable(o_BHSD)
    # Copies have other addresses each time.
    stream = kind.stream if q is q_BHSD and k is k_BNKD and v is v_BNKD and o is o_BHSD else None
    tiles = tiles or tiles_for("forward", q, k.shape[2])
    strides = q.stride(), k.stride(), v.stride(), o.stride()
    with on_device_of(q):
        call = Call(parts, q.dtype, q.device, products, causal, scale)
        start, more = _start(tiles, call, q.shape, k.shape, strides)
        rests = (k, v) if tiles.variant == "hopper" and parts.rest else ()
        launch = start(q, k, v, o, lse_BHS, *more, *rests, stream=stream)
    kind.keep((*inputs, *results), [launch], more)
    copy_back(o, o_BHSD)
    return o_BHSD, lse_BHS


def _results(q_BHSD: Tensor, k_BNKD: Tensor, v_BNKD: Tensor) -> tuple[Made, ...]:
    return laid_out_as(q_BHSD), in_a_row(q_BHSD.shape[:3], torch.float32)


@lru_cache(maxsize=256)
def _start(
    tiles: Tiles, call: Call, q_shape: Shape, k_shape: Shape, strides: tuple[Shape, Shape, Shape, Shape]
) -> tuple[Start, tuple[Tensor, ...]]:
    """The kernel, ready to launch on (q, k, v, o, lse) of these strides, and further tensors to pass after them.

    With a rest of columns (`Columns`), the Hopper kernel takes k and v again at the end, for tiles of the rest.
    """
    batch, num_heads, num_queries, head_dim = q_shape
    _, num_kv_heads, num_keys, _ = k_shape
    num_tasks = -(-num_queries // tiles.queries) * batch * num_heads
    numbers: list[float | None] = [num_heads, num_heads // num_kv_heads, num_queries, num_keys, base_two(call.scale)]
    more: tuple[Tensor, ...] = ()
    if tiles.variant == "hopper":
        from .triton_hopper_forward import attention_forward

        sharing = num_heads // num_kv_heads
        together = heads_a_group(2 * num_keys * head_dim * call.dtype.itemsize // sharing, batch * num_heads)
        tasks = task_table(
            batch * num_heads,
            num_queries,
            num_keys,
            rows=tiles.queries,
            tile=tiles.keys,
            together=together,
            causal=call.causal,
            num_programs=num_multiprocessors(call.device),
            device=call.device,
        )
        more = (tasks,)
        num_programs, row_length = tasks.shape
        rows = ROWS_OF_A_CONSUMER
        main, rest = call.parts.main, call.parts.rest
        numbers = [*([] if rest else [None, None]), row_length, *numbers]
        consumers = tiles.queries // rows
        options = hopper_options(tiles, call.parts, consumers) | {"N": tiles.keys, "NUM_CONSUMERS": consumers}
    else:
        from .triton_portable import attention_forward

        num_programs, rows, main, rest = num_tasks, tiles.queries, tiles.box, 0
        options = portable_options(tiles, call.products)
    q, k, v, o = zip((q_shape, k_shape, k_shape, q_shape), strides, strict=True)
    forms = [
        tile_form(tiles, call.dtype, *q, rows),
        *(tile_form(tiles, call.dtype, *x, tiles.keys, main) for x in (k, v)),
        tile_form(tiles, call.dtype, *o, rows),
        *[None] * (1 + len(more)),
        *(tile_form(tiles, call.dtype, *x, tiles.keys, rest) for x in (k, v) if rest),
    ]
    start = Start(attention_forward, num_programs, forms, numbers, CAUSAL=call.causal, **options)
    return start, more
