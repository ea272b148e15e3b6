import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention_errors import assert_at_most_twice_the_error_of_plain, results_of, results_of_plain
from tests.first import first
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from steplab.ops.attention.api import attention
from steplab.ops.attention.flash_reference import TILE
from steplab.ops.attention.functions import FlashAttentionReference
from steplab.ops.attention.operators import REFERENCE, num_pairs
from steplab.ops.errors import Unsupported

HALVES = [torch.bfloat16, torch.float16]
TYPES = [torch.float32, *HALVES]


def inputs(
    batch: int,
    heads: int,
    key_heads: int,
    num_queries: int,
    num_keys: int,
    width: int,
    dtype: torch.dtype,
    large: float = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(num_queries * 1000 + num_keys * 10 + width)
    shapes = (batch, heads, num_queries), (batch, key_heads, num_keys), (batch, key_heads, num_keys)
    q, k, v = (torch.randn(*shape, width, dtype=torch.float64, generator=make) for shape in shapes)
    q, k, v = ((t * large).to(dtype).requires_grad_() for t in (q, k, v))
    return q, k, v


def assert_at_most_twice_the_error(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> None:
    do = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q.dtype)
    assert_at_most_twice_the_error_of_plain(FlashAttentionReference, q, k, v, do, causal=causal)


SIZES = st.integers(1, TILE + 9)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@settings(max_examples=8)
@given(
    batch=st.integers(1, 2),
    heads=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    sizes=st.tuples(SIZES, SIZES),
    width=st.sampled_from([1, 8, 16, 24, 80]),
    causal=st.booleans(),
)
def test_all_results_err_at_most_twice_as_much_as_plain_attention(
    dtype: torch.dtype, batch: int, heads: tuple[int, int], sizes: tuple[int, int], width: int, causal: bool
) -> None:
    key_heads, sharing = heads
    q, k, v = inputs(batch, key_heads * sharing, key_heads, *sizes, width, dtype)
    assert_at_most_twice_the_error(q, k, v, causal=causal)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_large_scores_do_not_overflow(dtype: torch.dtype, causal: bool) -> None:
    q, k, v = inputs(1, 2, 2, TILE + 3, TILE + 9, 32, dtype, large=30)
    assert_at_most_twice_the_error(q, k, v, causal=causal)


@pytest.mark.parametrize("shape", first(2, [(1, 1, 1, 1, 1, 1), (1, 2, 1, 5, 7, 3), (1, 2, 2, 7, 5, 3)]), ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_those_of_finite_differences(
    shape: tuple[int, int, int, int, int, int], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steplab.ops.attention.flash_reference.TILE", 3)
    q, k, v = inputs(*shape, torch.float64)
    assert torch.autograd.gradcheck(lambda q, k, v: FlashAttentionReference.apply(q, k, v, is_causal=causal), (q, k, v))
    assert torch.autograd.gradcheck(lambda q, k, v: FlashAttentionReference.apply(q, k, v, causal, 0.3), (q, k, v))


@pytest.mark.parametrize("tile", [1, 3, 16, 1000])
@pytest.mark.parametrize("causal", [False, True])
def test_the_size_of_a_tile_does_not_matter(tile: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steplab.ops.attention.flash_reference.TILE", tile)
    q, k, v = inputs(1, 2, 1, 17, 21, 4, torch.float64)
    do = torch.ones_like(q)
    right = results_of_plain(q, k, v, do, causal=causal)
    for name, found in results_of(FlashAttentionReference, q, k, v, do, causal=causal).items():
        torch.testing.assert_close(found, right[name], msg=lambda text, name=name: f"{name}: {text}")  # type: ignore[misc]


def test_hidden_tiles_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN times a weight of zero would come out of an invisible key."""
    monkeypatch.setattr("steplab.ops.attention.flash_reference.TILE", 4)
    q, k, v = inputs(1, 1, 1, 8, 12, 4, torch.float32)
    with torch.no_grad():
        k[:, :, 8:], v[:, :, 8:] = float("nan"), float("nan")
    assert attention(q, k, v, causal=True, implementation="flash_reference").isfinite().all()


# --- infinities and NaN --------------------------------------------------------------------------------------------


def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v)


SPECIAL = {
    "a key that no query sees": lambda q, k, v: k[..., 1, :].fill_(float("-inf")),
    "no key that a query sees": lambda q, k, v: k.fill_(float("-inf")),
    "a key that outweighs all": lambda q, k, v: k[..., 1, :].fill_(float("inf")),
    "a NaN among the keys": lambda q, k, v: k[..., 1, 0].fill_(float("nan")),
    "a NaN among the queries": lambda q, k, v: q[..., 1, 0].fill_(float("nan")),
    "a NaN among the values": lambda q, k, v: v[..., 1, 0].fill_(float("nan")),
    "an infinite value": lambda q, k, v: v[..., 1, 0].fill_(float("inf")),
}


@pytest.mark.parametrize("case", SPECIAL)
@pytest.mark.parametrize("tile", [2, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_infinities_and_nan_come_out_as_of_torch(
    case: str, tile: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steplab.ops.attention.flash_reference.TILE", tile)
    q, k, v = (t.detach().abs() + 0.1 for t in inputs(1, 2, 2, 5, 7, 4, dtype))
    SPECIAL[case](q, k, v)
    found = attention(q, k, v, implementation="flash_reference")
    torch.testing.assert_close(found, torchs(q, k, v), equal_nan=True, rtol=2e-2, atol=2e-2)


def test_a_row_that_sees_nothing_gives_nothing_and_gets_no_gradient() -> None:
    q, k, v = (t.detach().abs() + 0.1 for t in inputs(1, 1, 1, 3, 5, 4, torch.float64))
    q[..., 1, :] = float("-inf")
    o, lse = REFERENCE.forward(q, k, v, False, 0.5)
    assert not o[..., 1, :].any()
    assert lse[0, 0].tolist() == pytest.approx([lse[0, 0, 0].item(), float("-inf"), lse[0, 0, 2].item()])
    _, _, dv = REFERENCE.backward(torch.ones_like(q), q, k, v, o, lse, False, 0.5)
    seen = [0, 2]
    _, _, right = REFERENCE.backward(
        torch.ones_like(q[:, :, seen]), q[:, :, seen], k, v, o[:, :, seen], lse[:, :, seen], False, 0.5
    )
    torch.testing.assert_close(dv, right)


# --- what a Function must be ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 2, 3)], ids=str)
def test_kept_are_exactly_inputs_output_and_log_sum_exp(lead: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(*lead, n, 8, requires_grad=True) for n in (5, 6, 6))
    out = FlashAttentionReference.apply(q, k, v)
    assert out.grad_fn is not None
    kept = out.grad_fn.saved_tensors  # type: ignore[attr-defined]
    assert [tuple(t.shape) for t in kept] == [tuple(t.shape) for t in (q, k, v, q)] + [(*lead, 5)]
    for t, same in zip(kept, (q, k, v, out), strict=False):
        assert t.data_ptr() == same.data_ptr()
    scores = q @ k.mT / math.sqrt(8)
    torch.testing.assert_close(kept[4], scores.logsumexp(-1))
    assert kept[4].dtype == torch.float32


@pytest.mark.parametrize("dims", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3)], ids=str)
def test_results_lie_in_memory_as_the_inputs_do(dims: tuple[int, ...]) -> None:
    """Heads are then joined after positions without a copy."""
    q, k, v = (
        t.detach().permute(dims).contiguous().permute(list(torch.tensor(dims).argsort()))
        for t in inputs(2, 3, 3, 5, 7, 8, torch.float32)
    )
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out = FlashAttentionReference.apply(q, k, v, True)
    assert out.stride() == q.stride()
    right = results_of_plain(q, k, v, torch.ones_like(q), causal=True)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))  # of a gradient of stride 0
    for name, found, of in zip(("dq", "dk", "dv"), gradients, (q, k, v), strict=True):
        torch.testing.assert_close(found, right[name])
        assert found.stride() == of.stride()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, for dual numbers
def test_without_gradients_nothing_is_kept() -> None:
    q, k, v = inputs(1, 2, 2, 5, 6, 8, torch.float32)
    right = FlashAttentionReference.apply(q, k, v, True)
    with torch.no_grad():
        out = FlashAttentionReference.apply(q, k, v, True)
        assert torch.equal(out, right)
        with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
            FlashAttentionReference.apply(torch.autograd.forward_ad.make_dual(q, q), k, v)
    assert out.grad_fn is None


def test_a_second_derivative_is_refused() -> None:
    q, k, v = inputs(1, 1, 1, 3, 3, 4, torch.float32)
    loss = FlashAttentionReference.apply(q, k, v).sum()
    (dq,) = torch.autograd.grad(loss, q, create_graph=True)
    with pytest.raises(Unsupported, match="second derivative"):
        (loss + dq.sum()).backward()

    def total(q: Tensor) -> Tensor:
        return FlashAttentionReference.apply(q, k, v).sum()

    with pytest.raises(Unsupported, match="second derivative"):
        torch.func.grad(lambda q: torch.func.grad(total)(q).sum())(q)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lead", first(1, [(2, 2), (2,)]), ids=str)
def test_a_compiler_goes_through_without_a_break(causal: bool, lead: tuple[int, ...]) -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        doubled = FlashAttentionReference.apply(q * 2, k, v, is_causal=causal)
        return attention(doubled, k, v, causal=causal, implementation="flash_reference").square().sum()

    q, k, v = (torch.randn(*lead, n, 8, requires_grad=True) for n in (5, 6, 6))
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(q, k, v)
    torch.testing.assert_close(compiled, loss(q, k, v))
    for found, right in zip(
        torch.autograd.grad(compiled, (q, k, v)), torch.autograd.grad(loss(q, k, v), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(found, right)


def test_a_compiler_takes_one_tensor_for_several_without_a_break() -> None:
    def loss(q: Tensor, k: Tensor) -> Tensor:
        once = attention(q, q, q, causal=True, implementation="flash_reference")
        return attention(once, k, k, implementation="flash_reference").square().sum()

    q, k = (torch.randn(1, 2, n, 8, requires_grad=True) for n in (5, 6))
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(q, k)
    for found, right in zip(
        torch.autograd.grad(compiled, (q, k)), torch.autograd.grad(loss(q, k), (q, k)), strict=True
    ):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("name", ["flash_reference", "flash_triton", "auto"])
def test_tensors_without_content_give_shapes(name: str) -> None:
    q, k = (torch.empty(2, 4, n, 8, device="meta", requires_grad=True) for n in (5, 6))
    out = attention(q, k, k, implementation=name)
    assert (out.device.type, out.shape) == ("meta", q.shape)
    assert [d.shape for d in torch.autograd.grad(out.sum(), (q, k))] == [q.shape, k.shape]


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_casts_what_goes_in(compiled: bool) -> None:
    q, k, v = inputs(1, 2, 2, 5, 6, 8, torch.float32)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return FlashAttentionReference.apply(q, k, v, True)

    torch._dynamo.reset()
    call = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    with torch.autocast("cpu", torch.bfloat16):
        out = call(q, k, v)
    low = [t.detach().bfloat16().requires_grad_() for t in (q, k, v)]
    right = run(*low)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, right)
    do = torch.randn_like(right)
    for found, expected in zip(
        torch.autograd.grad(out, (q, k, v), do), torch.autograd.grad(right, low, do), strict=True
    ):
        assert found.dtype == torch.float32
        assert torch.equal(found, expected.float())


def test_autocast_around_backward_rounds_nothing() -> None:
    q, k, v = inputs(1, 2, 2, 5, 6, 8, torch.float32)
    out = FlashAttentionReference.apply(q, k, v)
    right = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # the backward pass is mapped one by one
def test_gradients_of_torch_func_are_the_same() -> None:
    q, k, v = inputs(2, 4, 2, 5, 6, 8, torch.float64)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, implementation="flash_reference").square().sum()

    right = torch.autograd.grad(loss(q, k, v), (q, k, v))
    for found, expected in zip(torch.func.grad(loss, (0, 1, 2))(q, k, v), right, strict=True):
        torch.testing.assert_close(found, expected)
    q, k, v = (t.detach().unsqueeze(1) for t in (q, k, v))
    mapped = torch.func.vmap(torch.func.grad(loss), in_dims=(0, 0, None))(q, k, v[0])
    one_by_one = torch.stack([torch.func.grad(loss)(q[i], k[i], v[0]) for i in range(2)])
    torch.testing.assert_close(mapped, one_by_one)


# --- operators -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", first(2, [torch.float32, torch.bfloat16, torch.float64]), ids=str)
@pytest.mark.parametrize("transposed", first(1, [True, False]))
def test_operators_are_what_torch_asks_of_one(dtype: torch.dtype, transposed: bool) -> None:
    q, k, v = (t.detach() for t in inputs(2, 4, 2, 5, 6, 8, dtype))
    if transposed:
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    operators = torch.ops.steplab
    torch.library.opcheck(operators.flash_reference_forward.default, (q, k, v, True, 0.5))
    o, lse = REFERENCE.forward(q, k, v, True, 0.5)
    torch.library.opcheck(operators.flash_reference_backward.default, (torch.ones_like(o), q, k, v, o, lse, True, 0.5))


@given(num_queries=st.integers(0, 40), num_keys=st.integers(0, 40), causal=st.booleans())
def test_pairs_are_those_of_the_mask(num_queries: int, num_keys: int, causal: bool) -> None:
    ones = torch.ones(num_queries, num_keys)
    assert num_pairs(num_queries, num_keys, causal=causal) == int((ones.tril() if causal else ones).sum())


@pytest.mark.parametrize("causal", [False, True])
def test_flops_are_those_of_the_pairs_that_are_seen(causal: bool) -> None:
    q, k, v = inputs(2, 4, 2, 5, 7, 8, torch.float32)
    with FlopCounterMode(display=False) as forward:
        out = FlashAttentionReference.apply(q, k, v, causal)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    pairs = 15 if causal else 35
    assert forward.get_total_flops() == 4 * 2 * 4 * 8 * pairs
    assert backward.get_total_flops() == 10 * 2 * 4 * 8 * pairs


# --- what the Triton kernels do not serve --------------------------------------------------------------------------


def test_triton_without_its_interpreter_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(Unsupported, match=r"'flash_triton' on a CPU .*TRITON_INTERPRET=1"):
        attention(*inputs(1, 1, 1, 4, 4, 8, torch.float32), implementation="flash_triton")


def test_triton_refuses_float64_and_wide_heads() -> None:
    with pytest.raises(Unsupported, match="float64"):
        attention(*inputs(1, 1, 1, 4, 4, 8, torch.float64), implementation="flash_triton")
    with pytest.raises(Unsupported, match="heads of at most 256, and these are 257 wide"):
        attention(*inputs(1, 1, 1, 4, 4, 257, torch.float32), implementation="flash_triton")
