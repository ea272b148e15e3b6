import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.attention_errors import assert_at_most_twice_the_error_of_plain, results_of, results_of_plain, rms
from tests.first import first
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from steplab.ops.attention import triton_backward, triton_tuning
from steplab.ops.attention.api import attention
from steplab.ops.attention.functions import FlashAttentionReference, FlashAttentionTriton
from steplab.ops.attention.operators import TRITON
from steplab.ops.attention.triton_launch import precision
from steplab.ops.attention.triton_tensors import rounded_to_tf32
from steplab.ops.attention.triton_tuning import Kernel, Tiles

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 (where there is a GPU, tests/gpu)"
    ),
    # The interpreter's numpy warns about intended infinities.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

UNSHRUNK = (Phase.explicit, Phase.generate)
"""Shrinking a failing example would take the interpreter minutes."""
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def inputs(
    batch: int, heads: int, key_heads: int, num_queries: int, num_keys: int, width: int, dtype: torch.dtype = FP32
) -> list[Tensor]:
    make = torch.Generator().manual_seed(num_queries * 1000 + num_keys * 10 + width)
    shapes = (heads, num_queries), (key_heads, num_keys), (key_heads, num_keys), (heads, num_queries)
    return [torch.randn(batch, *shape, width, generator=make).to(dtype) for shape in shapes]


def check(
    tensors: list[Tensor], *, causal: bool, scale: float | None = None, tf32: bool = False, case: object = ""
) -> None:
    q, k, v, do = tensors
    assert_at_most_twice_the_error_of_plain(
        FlashAttentionTriton, q, k, v, do, causal=causal, scale=scale, tf32=tf32, case=(case, causal, scale)
    )


@pytest.fixture
def tf32_allowed() -> Iterator[None]:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.mark.parametrize("causal", first(1, [True, False]))
def test_tf32_errs_at_most_twice_as_much_as_plain_attention_with_operands_rounded_to_it(
    causal: bool, tf32_allowed: None
) -> None:
    tensors = inputs(1, 2, 1, 70, 50, 33)
    check(tensors, causal=causal, tf32=True)
    exact = results_of_plain(*tensors, causal=causal)
    found = results_of(FlashAttentionTriton, *tensors, causal=causal)
    assert rms(found["output"] - exact["output"]) > 1e-5 * rms(exact["output"])  # it is not float32


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9")
def test_tf32_may_be_allowed_by_the_newer_of_torchs_settings() -> None:
    """torch then refuses to read the older setting."""
    setting: Any = torch.backends.cuda.matmul
    before = setting.fp32_precision
    setting.fp32_precision = "tf32"
    try:
        assert (precision(FP32), precision(BF16)) == ("tf32", "ieee")
    finally:
        setting.fp32_precision = before
    assert precision(FP32) == "ieee"


def test_rounding_to_tf32_is_to_the_nearest_and_keeps_what_is_no_number() -> None:
    x = torch.tensor([1 + 2**-11 + 2**-20, 1 + 2**-12, -1 - 2**-10, float("inf"), -float("inf"), 0.0])
    right = torch.tensor([1 + 2**-10, 1.0, -1 - 2**-10, float("inf"), -float("inf"), 0.0])
    assert torch.equal(rounded_to_tf32(x), right)
    all_ones = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert rounded_to_tf32(all_ones).isnan().all()


@pytest.mark.parametrize("dtype", first(1, [BF16, FP32, FP16]), ids=str)
@settings(max_examples=3, phases=UNSHRUNK)
@given(
    batch=st.integers(1, 2),
    key_heads=st.integers(1, 2),
    sharing=st.integers(1, 2),
    num_queries=st.integers(1, 100),
    num_keys=st.integers(1, 80),
    width=st.sampled_from([1, 8, 17, 33, 80, 200]),
    causal=st.booleans(),
    scale=st.sampled_from([None, None, 0.3, -0.2]),
)
def test_all_results_err_at_most_twice_as_much_as_plain_attention(
    dtype: torch.dtype,
    batch: int,
    key_heads: int,
    sharing: int,
    num_queries: int,
    num_keys: int,
    width: int,
    causal: bool,
    scale: float | None,
) -> None:
    tensors = inputs(batch, key_heads * sharing, key_heads, num_queries, num_keys, width, dtype)
    check(tensors, causal=causal, scale=scale)


def tiles_of(queries: int, keys: int) -> object:
    def found(
        kernel: Kernel, name: str, capability: object, hopper: bool, bits: int, box: int, tokens: int
    ) -> Tiles | None:
        if kernel == "backward":  # in one sweep, which no CPU interprets
            return None
        return Tiles(
            kernel=kernel, gpu="any", bits=bits, box=box, variant="portable", queries=queries, keys=keys, stages=1
        )

    return patch.object(triton_tuning, "_found", found)


@pytest.mark.parametrize("tiles", [(16, 16), (16, 64), (64, 16)], ids=str)
@pytest.mark.parametrize("causal", first(1, [True, False]))
@settings(max_examples=2, phases=UNSHRUNK)
@given(num_queries=st.integers(1, 70), num_keys=st.integers(1, 70))
def test_the_size_of_a_tile_does_not_matter(
    tiles: tuple[int, int], causal: bool, num_queries: int, num_keys: int
) -> None:
    with tiles_of(*tiles):  # type: ignore[attr-defined]
        check(inputs(1, 1, 1, num_queries, num_keys, 16), causal=causal)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 65), (65, 1), (64, 64), (33, 32), (64, 1)])
def test_lengths_of_one_and_of_whole_tiles(num_queries: int, num_keys: int) -> None:
    for causal in (False, True):
        check(inputs(1, 1, 1, num_queries, num_keys, 16), causal=causal)


@pytest.mark.parametrize("num_queries", [0, 5])
@pytest.mark.parametrize("num_keys", [0, 5])
def test_nothing_to_attend_to_gives_zeros(num_queries: int, num_keys: int) -> None:
    if num_queries and num_keys:
        return
    found = results_of(FlashAttentionTriton, *inputs(2, 2, 1, num_queries, num_keys, 8), causal=True)
    assert found["output"].shape == (2, 2, num_queries, 8)
    assert found["dv"].shape == (2, 1, num_keys, 8)
    assert not any(found[name].any() for name in ("output", "dq", "dk", "dv"))
    assert (found["log-sum-exp"] == float("-inf")).all()


@pytest.mark.parametrize("causal", [False, True])
def test_a_scale_of_zero_weighs_all_alike(causal: bool) -> None:
    q, k, v, do = inputs(1, 2, 1, 20, 40, 16)
    right = results_of_plain(q, k, v, do, causal=causal, scale=0.0)
    found = results_of(FlashAttentionTriton, q, k, v, do, causal=causal, scale=0.0)
    for name, expected in right.items():
        torch.testing.assert_close(found[name], expected, msg=lambda text, name=name: f"{name}: {text}")  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_large_scores_do_not_overflow(dtype: torch.dtype, causal: bool) -> None:
    q, k, v, do = inputs(1, 2, 2, 70, 75, 80, dtype)
    check([q * 30, k * 30, v * 30, do], causal=causal)


# --- strides -------------------------------------------------------------------------------------------------------


def in_wider(x: Tensor) -> Tensor:
    return torch.cat([x, torch.full_like(x, float("nan"))], -1)[..., : x.shape[-1]]


def one_off(x: Tensor) -> Tensor:
    return torch.cat([torch.full((1,), float("nan"), dtype=x.dtype), x.flatten()])[1:].view(x.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads after positions": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "columns before rows": lambda x: x.mT.contiguous().mT,
    "every second column": lambda x: torch.stack([x, torch.full_like(x, float("nan"))], -1)[..., 0],
    "part of a wider tensor": in_wider,
    "off by one element": one_off,
    "one batch for all": lambda x: x[:1].expand(x.shape),
    "one number for all": lambda x: x[:1, :1, :1, :1].expand(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", first(1, [5, 8]))
def test_strides_do_not_matter(layout: str, width: int) -> None:
    tensors = [LAYOUTS[layout](x) for x in inputs(2, 2, 1, 5, 9, width)]
    found = results_of(FlashAttentionTriton, *tensors, causal=True)
    right = results_of(
        FlashAttentionTriton, *(x.clone(memory_format=torch.contiguous_format) for x in tensors), causal=True
    )
    for name, expected in right.items():
        assert torch.equal(found[name], expected), name
    for name, of in zip(("output", "dq", "dk", "dv"), [tensors[0], *tensors], strict=False):
        assert found[name].stride() == torch.empty_like(of).stride(), name


# --- infinities and NaN --------------------------------------------------------------------------------------------

SPECIAL = {
    "a key that no query sees": lambda q, k, v: k[..., 1, :].fill_(float("-inf")),
    "a tile of keys that no query sees": lambda q, k, v: k[..., :32, :].fill_(float("-inf")),
    "no key that a query sees": lambda q, k, v: k.fill_(float("-inf")),
    "a query that sees no key": lambda q, k, v: q[..., 1, :].fill_(float("-inf")),
    "a key that outweighs all": lambda q, k, v: k[..., 35, :].fill_(float("inf")),
    "a NaN among the keys": lambda q, k, v: k[..., 1, 0].fill_(float("nan")),
    "a NaN among the queries": lambda q, k, v: q[..., 1, 0].fill_(float("nan")),
    "a NaN among the values": lambda q, k, v: v[..., 1, 0].fill_(float("nan")),
    "an infinite value": lambda q, k, v: v[..., 35, 0].fill_(float("inf")),
    "a NaN in the last key": lambda q, k, v: k[..., -1, 0].fill_(float("nan")),
}


@pytest.mark.parametrize("case", SPECIAL)
def test_infinities_and_nan_come_out_as_of_torch(case: str) -> None:
    *qkv, do = inputs(1, 2, 2, 40, 45, 4)
    q, k, v = (t.abs() + 0.1 for t in qkv)
    SPECIAL[case](q, k, v)
    found = results_of(FlashAttentionTriton, q, k, v, do, causal=False)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(q, k, v)
    right = dict(zip(("output", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, (q, k, v), do)), strict=True))
    for name, expected in right.items():
        torch.testing.assert_close(
            found[name],
            expected,
            equal_nan=True,
            rtol=1e-4,
            atol=1e-5,
            msg=lambda text, name=name: f"{name}: {text}",  # type: ignore[misc]
        )


def test_hidden_tiles_are_not_looked_at() -> None:
    """NaN times a weight of zero would come out of an invisible key."""
    widest = max(row.keys for row in triton_tuning.table() if row.box == 16)
    q, k, v, do = inputs(1, 1, 1, 32, 2 * widest, 16)
    k[:, :, widest:], v[:, :, widest:] = float("nan"), float("nan")
    found = results_of(FlashAttentionTriton, q, k, v, do, causal=True)
    assert found["output"].isfinite().all()
    assert found["dq"].isfinite().all()
    assert found["dv"][:, :, :32].isfinite().all()


# --- what a Function must be ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 1, 2)], ids=str)
def test_kept_are_exactly_inputs_output_and_log_sum_exp(lead: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(*lead, n, 8, requires_grad=True) for n in (5, 6, 6))
    out = FlashAttentionTriton.apply(q, k, v)
    kept = out.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert [tuple(t.shape) for t in kept] == [tuple(t.shape) for t in (q, k, v, q)] + [(*lead, 5)]
    assert [t.data_ptr() for t in kept[:4]] == [t.data_ptr() for t in (q, k, v, out)]
    torch.testing.assert_close(kept[4], (q @ k.mT / math.sqrt(8)).logsumexp(-1))
    assert kept[4].dtype == FP32


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_it_is_the_reference_in_other_kernels(dtype: torch.dtype) -> None:
    tensors = inputs(1, 4, 2, 33, 40, 24, dtype)
    right = results_of(FlashAttentionReference, *tensors, causal=True)
    for name, found in results_of(FlashAttentionTriton, *tensors, causal=True).items():
        assert (found.dtype, found.shape) == (right[name].dtype, right[name].shape)
        torch.testing.assert_close(found, right[name], rtol=2e-2 if dtype == BF16 else 2e-3, atol=2e-2)


def test_operators_are_what_torch_asks_of_one() -> None:
    q, k, v, do = inputs(1, 2, 1, 5, 6, 8)
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    operators = torch.ops.steplab
    torch.library.opcheck(operators.flash_triton_forward.default, (q, k, v, True, 0.5))
    o, lse = TRITON.forward(q, k, v, True, 0.5)
    torch.library.opcheck(operators.flash_triton_backward.default, (do, q, k, v, o, lse, True, 0.5))


def test_a_compiler_goes_through_without_a_break() -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        doubled = FlashAttentionTriton.apply(q * 2, k, v, is_causal=True)
        return attention(doubled, k, v, causal=True, implementation="flash_triton").square().sum()

    q, k, v = (t.requires_grad_() for t in inputs(1, 2, 2, 5, 6, 8)[:3])
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(q, k, v)
    torch.testing.assert_close(compiled, loss(q, k, v))
    right = torch.autograd.grad(loss(q, k, v), (q, k, v))
    for found, expected in zip(torch.autograd.grad(compiled, (q, k, v)), right, strict=True):
        torch.testing.assert_close(found, expected)


def test_autocast_casts_what_goes_in() -> None:
    q, k, v = (t.requires_grad_() for t in inputs(1, 2, 2, 5, 6, 8)[:3])
    with torch.autocast("cpu", BF16):
        out = FlashAttentionTriton.apply(q, k, v, True)
    assert out.dtype == BF16
    assert torch.equal(out, FlashAttentionTriton.apply(q.bfloat16(), k.bfloat16(), v.bfloat16(), True))
    assert {d.dtype for d in torch.autograd.grad(out.sum(), (q, k, v))} == {FP32}


def test_flops_are_those_of_the_reference() -> None:
    counts = []
    for function in (FlashAttentionTriton, FlashAttentionReference):
        q, k, v = (t.requires_grad_() for t in inputs(1, 2, 1, 5, 7, 8)[:3])
        with FlopCounterMode(display=False) as counter:
            function.apply(q, k, v, True).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


# --- what goes before and after the sweep that no CPU interprets ---------------------------------------------------


@pytest.mark.parametrize(("dim", "widths"), [(64, 64), (40, 64), (80, 96), (128, 128)])
def test_sums_in_panels_of_8_columns_become_the_gradient_of_the_queries(dim: int, widths: int) -> None:
    from steplab.ops.attention.triton_backward import PREPARED
    from steplab.ops.attention.triton_portable import attention_finish

    batch, heads, length, padded = 2, 3, 70, 128
    make = torch.Generator().manual_seed(dim)
    sums = torch.randn(batch, heads, padded, widths, generator=make)
    in_panels = sums.unflatten(3, (-1, 8)).unflatten(2, (-1, PREPARED)).transpose(3, 4).contiguous()
    dq = torch.full((batch, length, heads, dim), float("nan")).transpose(1, 2)
    parts = widths // 32
    grid = (batch * heads * padded // PREPARED * parts,)
    numbers = heads, length, padded, dim, 0.5
    attention_finish[grid](in_panels, dq, *dq.stride()[:3], *numbers, M=PREPARED, PARTS=parts, WIDTH=32, PANEL=8)
    assert torch.equal(dq, sums[:, :, :length, :dim] * 0.5)


@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_what_is_prepared_subtracts_the_log_sum_exp_and_begins_the_turns(num_kv_heads: int) -> None:
    q, k, v, do = inputs(2, 3, num_kv_heads, 70, 300, 16)
    o, lse = torch.randn_like(q), torch.randn(2, 3, 70)
    lse[0, 1, 5] = float("-inf")
    tiles = Tiles(kernel="backward", gpu="any", bits=16, box=64, variant="hopper", queries=128, keys=128, stages=2)
    with patch.object(triton_backward, "tiles_if_any", return_value=tiles):
        operands = triton_backward.prepared(do, q, k, v, o, lse, causal=False, scale=0.5)
    right = -lse / math.log(2)
    right[0, 1, 5] = float("-inf")
    minus_lse, minus_d = operands.minus_lse.view(2, 3, 128), operands.minus_d.view(2, 3, 128)
    torch.testing.assert_close(minus_lse[..., :70], right)
    assert (minus_lse[..., 70:] == float("-inf")).all()
    torch.testing.assert_close(minus_d[..., :70], -(o * do).sum(-1))
    assert not minus_d[..., 70:].any()
    shared_tiles = 2 * 3 if num_kv_heads == 1 else 0
    assert operands.turns.tolist() == [0] * (2 * 2 * 3 + 2 * shared_tiles)
    assert operands.shared.numel() == shared_tiles * 2 * 128 * 64
