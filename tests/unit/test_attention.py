import math
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.first import first
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import steplab.ops.attention as public
from steplab.ops.attention import operators
from steplab.ops.attention.api import IMPLEMENTATIONS, attention
from steplab.ops.attention.peers import _compiled, causal_mask
from steplab.ops.attention.shapes import as_four_dims, check_inputs
from steplab.ops.errors import Unsupported, UserError

ON_CPU = ["plain", "sdpa", "sdpa_flash", "sdpa_math", "flash_reference", "auto"]
GPU_ONLY = ["sdpa_cudnn", "sdpa_efficient", "flash_attn_4"]
FORWARD_ONLY = ["flex"]
INTERPRETED = ["flash_triton"]
SHAPES = [  # leading dimensions and heads, queries, keys, width
    ((1, 1), 1, 1, 1),
    ((1, 1), 1, 1, 64),
    ((2, 3), 1, 9, 8),
    ((2, 3), 5, 5, 2),
    ((1, 2), 7, 3, 6),
    ((3, 1), 3, 11, 10),
    ((1, 5), 33, 33, 80),
    ((2, 2), 64, 64, 16),
    ((1, 2), 129, 129, 24),
]


def inputs(lead: tuple[int, ...], num_queries: int, num_keys: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(num_queries * 1000 + num_keys * 10 + width)
    lengths = (num_queries, num_keys, num_keys)
    q, k, v = (torch.randn(*lead, n, width, dtype=torch.float64, generator=make) for n in lengths)
    return q, k, v


def truth(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
    q_, k_, v_ = (np.asarray(t.detach().to(torch.float64)) for t in (q, k, v))
    scale = 1 / math.sqrt(q_.shape[-1]) if scale is None else scale
    out = np.empty_like(q_)
    for index in np.ndindex(q_.shape[:-1]):
        lead, row = index[:-1], index[-1]
        seen = min(row + 1, k_.shape[-2]) if causal else k_.shape[-2]
        scores = scale * (k_[lead][:seen] @ q_[index])
        weights = np.exp(scores - scores.max())
        out[index] = (weights / weights.sum()) @ v_[lead][:seen]
    return torch.from_numpy(out)


def rms(difference: Tensor) -> float:
    return float(difference.to(torch.float64).square().mean().sqrt())


def half_a_unit_in_the_last_place(exact: Tensor, dtype: torch.dtype) -> float:
    """Cost of rounding the exact result to the output's type, for any implementation."""
    return torch.finfo(dtype).eps / 2 * rms(exact)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("implementation", ON_CPU)
def test_float64_is_the_formula(
    implementation: str, causal: bool, shape: tuple[tuple[int, ...], int, int, int]
) -> None:
    q, k, v = inputs(*shape)
    out = attention(q, k, v, causal=causal, implementation=implementation)
    torch.testing.assert_close(out, truth(q, k, v, causal=causal))


@pytest.mark.parametrize("shape", SHAPES[4:], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", first(2, [torch.float32, torch.bfloat16, torch.float16]), ids=str)
@pytest.mark.parametrize("implementation", sorted(set(ON_CPU) - {"plain"}))
def test_the_error_is_at_most_twice_that_of_plain_attention_in_the_same_precision(
    implementation: str, dtype: torch.dtype, causal: bool, shape: tuple[tuple[int, ...], int, int, int]
) -> None:
    q, k, v = (t.to(dtype) for t in inputs(*shape))
    exact = truth(q, k, v, causal=causal)
    plain = attention(q, k, v, causal=causal, implementation="plain")
    out = attention(q, k, v, causal=causal, implementation=implementation)
    assert (out.dtype, out.shape) == (dtype, q.shape)
    allowed = max(rms(plain - exact), half_a_unit_in_the_last_place(exact, dtype))
    assert rms(out - exact) <= 2 * allowed


def bound_of_plain(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Largest error of plain attention, to first order in unit roundoff u.

    Scores are rounded twice, after product and scale: 2 u |s|. The product is a float32 sum with roundoff u32 per term:
    D u32 |q| |k|. A weight with scores off by d is off by a factor 1 + 2 d, and rounded once. The weighted sum rounds
    once, and once per term in float32.
    """
    u, u32 = torch.finfo(q.dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    q_, k_ = (t.to(torch.float64) for t in (q, k))
    width, num_keys = q.shape[-1], k.shape[-2]
    scores = (q_ @ k_.mT).abs().amax() / math.sqrt(width)
    terms = (q_.abs() @ k_.abs().mT).amax() / math.sqrt(width)
    off = 2 * u * scores + width * u32 * terms
    return (2 * off + 2 * u + num_keys * u32) * truth(q, k, v.abs(), causal=causal)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", first(2, [torch.float32, torch.bfloat16, torch.float16]), ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_plain_attention_rounds_no_more_often_than_the_formula_has_steps(
    dtype: torch.dtype, causal: bool, shape: tuple[tuple[int, ...], int, int, int]
) -> None:
    q, k, v = (t.to(dtype) for t in inputs(*shape))
    error = (attention(q, k, v, causal=causal).to(torch.float64) - truth(q, k, v, causal=causal)).abs()
    assert (error <= bound_of_plain(q, k, v, causal=causal)).all()


@pytest.mark.parametrize("implementation", ON_CPU)
def test_gradients_are_those_of_finite_differences(implementation: str) -> None:
    q, k, v = (t.requires_grad_() for t in inputs((1, 2), 5, 5, 4))
    assert torch.autograd.gradcheck(lambda *qkv: attention(*qkv, causal=True, implementation=implementation), (q, k, v))


@pytest.mark.parametrize("implementation", ON_CPU)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_later_keys_and_values_change_nothing_before_them(implementation: str, dtype: torch.dtype) -> None:
    q, k, v = (t.to(dtype) for t in inputs((2, 2), 17, 17, 8))
    before = attention(q, k, v, causal=True, implementation=implementation)
    for position in (1, 8, 16):
        k_changed, v_changed = k.clone(), v.clone()
        k_changed[..., position:, :] += 3
        v_changed[..., position:, :] -= 5
        after = attention(q, k_changed, v_changed, causal=True, implementation=implementation)
        assert torch.equal(after[..., :position, :], before[..., :position, :])
        assert not torch.equal(after[..., position, :], before[..., position, :])


@pytest.mark.parametrize("implementation", ON_CPU)
@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_a_scale_of_ones_own_takes_the_place_of_the_default(implementation: str, scale: float) -> None:
    q, k, v = inputs((2, 1), 6, 6, 12)
    out = attention(q, k, v, causal=True, scale=scale, implementation=implementation)
    torch.testing.assert_close(out, truth(q, k, v, causal=True, scale=scale))


@pytest.mark.parametrize("implementation", ON_CPU)
@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3), (2, 2, 1, 3), (0, 3)], ids=str)
def test_any_leading_dimensions_are_taken(implementation: str, lead: tuple[int, ...]) -> None:
    q, k, v = inputs(lead, 5, 5, 8)
    out = attention(q, k, v, causal=True, implementation=implementation)
    torch.testing.assert_close(out, truth(q, k, v, causal=True))


@pytest.mark.parametrize("implementation", ON_CPU)
def test_heads_that_lie_strided_in_memory_are_read_right(implementation: str) -> None:
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs((2, 3), 7, 7, 4))
    assert not q.is_contiguous()
    out = attention(q, k, v, causal=True, implementation=implementation)
    torch.testing.assert_close(out, truth(q, k, v, causal=True))


# --- names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", public.__all__)
def test_the_public_names_are_there(name: str) -> None:
    assert getattr(public, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'flash'"):
        _ = public.flash


def test_every_implementation_is_tested_here() -> None:
    assert {*ON_CPU, *GPU_ONLY, *FORWARD_ONLY, *INTERPRETED} == set(IMPLEMENTATIONS)


@pytest.mark.parametrize("implementation", GPU_ONLY)
def test_a_kernel_the_cpu_lacks_raises_and_is_not_replaced(implementation: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Unsupported, match=rf"attention '{implementation}' .*(no kernel|pip install)"):
            attention(*inputs((1, 1), 4, 4, 8), implementation=implementation)


@pytest.mark.parametrize("name", ["", "flash", "PLAIN", "sdpa_"])
def test_an_unknown_name_is_answered_with_the_valid_ones(name: str) -> None:
    with pytest.raises(Unsupported) as error:
        attention(*inputs((1, 1), 4, 4, 8), implementation=name)
    assert f"'{name}'" in str(error.value)
    assert all(valid in str(error.value) for valid in IMPLEMENTATIONS)


GROUPED = ["plain", "sdpa", "sdpa_flash", "sdpa_math", "flash_reference", "auto"]


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("implementation", GROUPED)
@pytest.mark.parametrize("num_key_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_a_query_head_reads_the_key_head_of_its_group(implementation: str, num_key_heads: int, causal: bool) -> None:
    q, k, v = random(2, 6, 5, 8), random(2, num_key_heads, 7, 8), random(2, num_key_heads, 7, 8) + 1
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out = attention(q, k, v, causal=causal, implementation=implementation)
    alone = [
        attention(q[:, [h]], k[:, [h * num_key_heads // 6]], v[:, [h * num_key_heads // 6]], causal=causal)
        for h in range(6)
    ]
    expected = torch.cat(alone, dim=1)
    torch.testing.assert_close(out, expected)
    do = random(2, 6, 5, 8) - 0.5
    gradients = (torch.autograd.grad(result, (q, k, v), do) for result in (out, expected))
    for found, right in zip(*gradients, strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("implementation", GROUPED)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(0, 3), (3, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_to_ask_or_to_see_gives_zeros(
    implementation: str, num_queries: int, num_keys: int, causal: bool
) -> None:
    out = attention(
        random(2, 3, num_queries, 8), *2 * [random(2, 3, num_keys, 8)], causal=causal, implementation=implementation
    )
    assert out.shape == (2, 3, num_queries, 8)
    assert not out.any()


@given(lead=st.lists(st.integers(1, 3), max_size=4).map(tuple), order=st.permutations(range(6)))
def test_four_dimensions_are_a_view_that_holds_the_same(lead: tuple[int, ...], order: list[int]) -> None:
    shape = (*lead, 2, 3)
    strided = [d for d in order if d < len(shape)]
    x = torch.arange(int(np.prod(shape))).view([shape[d] for d in strided]).permute(list(np.argsort(strided)))
    four = as_four_dims(x)
    assert four.dim() == 4
    assert torch.equal(four.reshape(x.shape), x)
    if len(shape) <= 4 or x.is_contiguous():
        assert four.data_ptr() == x.data_ptr()


def test_what_is_taken_is_not_complained_of() -> None:
    for q, k in [((4, 8), (5, 8)), ((2, 4, 8), (2, 5, 8)), ((2, 4, 3, 8), (2, 2, 5, 8)), ((7, 2, 4, 3, 8),) * 2]:
        check_inputs(torch.empty(q), torch.empty(k), torch.empty(k))


@pytest.mark.parametrize(
    ("q", "k", "v", "said"),
    [
        ((8,), (8,), (8,), "attention takes q [..., heads, queries, dim]"),
        ((2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8), "attention takes q [..., heads, queries, dim]"),
        ((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 5, 8), "v of the shape of k, not q [1, 2, 4, 8], k [1, 2, 4, 8]"),
        ((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 16), "v of the shape of k"),
        ((1, 2, 4, 8), (1, 2, 4, 16), (1, 2, 4, 16), "one head dimension"),
        ((1, 2, 4, 0), (1, 2, 4, 0), (1, 2, 4, 0), "one head dimension, at least 1"),
        ((6, 4, 8), (2, 4, 8), (2, 4, 8), "for grouped-query heads give [batch, heads, positions, dim]"),
        ((2, 6, 4, 8), (1, 6, 4, 8), (1, 6, 4, 8), "broadcasts nothing"),
        ((2, 6, 4, 8), (2, 4, 4, 8), (2, 4, 4, 8), "must divide the number of query heads"),
        ((2, 2, 4, 8), (2, 4, 4, 8), (2, 4, 4, 8), "must divide the number of query heads"),
        ((2, 2, 4, 8), (2, 0, 4, 8), (2, 0, 4, 8), "must divide the number of query heads"),
    ],
)
@pytest.mark.parametrize("implementation", ["plain", "sdpa", "flash_reference", "flash_triton"])
def test_other_shapes_are_refused_in_a_line(
    implementation: str, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], said: str
) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as error:
        attention(torch.empty(q), torch.empty(k), torch.empty(v), implementation=implementation)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("types", "said"),
    [
        ((torch.float32, torch.bfloat16, torch.bfloat16), "not float32, bfloat16"),
        ((torch.int64, torch.int64, torch.int64), "not int64"),
        ((torch.complex64,) * 3, "not complex64"),
    ],
)
def test_other_types_are_refused_in_a_line(types: tuple[torch.dtype, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        attention(*(torch.ones(1, 1, 4, 8, dtype=dtype) for dtype in types))


def test_tensors_of_two_devices_are_refused() -> None:
    q = torch.ones(1, 1, 4, 8)
    with pytest.raises(UserError, match="attention takes tensors of torch, not ndarray, Tensor, list"):
        check_inputs(np.zeros((2, 3)), torch.zeros(2, 3), [[0.0]])  # type: ignore[arg-type]
    with pytest.raises(UserError, match="one device, not cpu, meta and meta"):
        attention(q, q.to("meta"), q.to("meta"))


def test_autocast_may_be_given_several_types() -> None:
    q, k, v = random(1, 2, 4, 8), random(1, 2, 4, 8) + 1, random(1, 2, 4, 8) + 2
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q.float(), k.bfloat16(), v.float(), implementation="flash_reference")
        with pytest.raises(UserError, match="not float64, float32"):
            attention(q, k.float(), v.float())
    assert out.dtype == torch.bfloat16


class OnGpu(Tensor):
    is_cuda = True


@pytest.fixture
def called() -> list[str]:
    return []


@pytest.fixture
def call(called: list[str]) -> Callable[..., Any]:
    def noting(name: str) -> Any:
        return lambda x, causal, scale: called.append(name)

    return operators._called(noting("operator"), noting("function"), 1)


@pytest.mark.parametrize(
    ("context", "through"),
    [
        (nullcontext, "function"),
        (torch.enable_grad, "operator"),
        (lambda: FlopCounterMode(display=False), "operator"),
        (lambda: profile(activities=[ProfilerActivity.CPU]), "operator"),
    ],
    ids=["nobody", "autograd", "a mode", "a profiler"],
)
def test_operators_are_called_where_somebody_sees_them(
    context: Callable[[], AbstractContextManager[Any]],
    through: str,
    call: Callable[..., Any],
    called: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operators, "_is_plain", lambda x: True)
    with torch.no_grad(), context():
        call(torch.zeros(1), True, 1.0)
    assert called == [through]


def test_a_transform_of_torch_func_sees_operators(
    call: Callable[..., Any], called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(x: Tensor) -> Tensor:
        call(x, True, 1.0)
        return x

    monkeypatch.setattr(operators, "_is_plain", lambda x: True)
    with torch.no_grad():
        torch.func.vmap(attend)(torch.zeros(2, 3))
    assert called == ["operator"]


@torch.no_grad()
def test_other_tensors_than_plain_ones_of_a_gpu_go_through_operators(
    call: Callable[..., Any], called: list[str]
) -> None:
    negative = torch.zeros(2, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    for x in (torch.zeros(1), torch.zeros(1).as_subclass(OnGpu), negative, torch._efficientzerotensor((1,))):
        call(x, True, 1.0)
    assert called == ["operator"] * 4


LISTS = ["kv", "full_kv", "q", "full_q"]


def later_keys_hidden(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return query >= key


@pytest.mark.parametrize(
    ("num_queries", "num_keys"),
    [(1, 1), (128, 128), (200, 300), (300, 200), (384, 128), (512, 512), (513, 640), (130, 1000), (1000, 130)],
)
def test_the_mask_has_the_blocks_that_torch_finds(num_queries: int, num_keys: int) -> None:
    found = causal_mask(num_queries, num_keys, torch.device("cpu"))
    right = create_block_mask(later_keys_hidden, None, None, num_queries, num_keys, device="cpu")
    assert torch.equal(found.to_dense(), right.to_dense())
    for name in LISTS:
        numbers, indices = (getattr(found, f"{name}_{of}")[0, 0] for of in ("num_blocks", "indices"))
        right_indices = getattr(right, f"{name}_indices")[0, 0]
        assert torch.equal(numbers, getattr(right, f"{name}_num_blocks")[0, 0])
        for row, number in enumerate(numbers.tolist()):
            assert indices[row, :number].tolist() == right_indices[row, :number].tolist()


def test_a_mask_that_was_first_made_for_inference_serves_a_step_that_trains() -> None:
    """Its lists are cached, and autograd cannot save tensors of inference mode."""
    with torch.inference_mode():
        causal_mask(777, 777, torch.device("cpu"))
    mask = causal_mask(777, 777, torch.device("cpu"))
    assert not any(getattr(mask, f"{name}_indices").is_inference() for name in LISTS)


def test_within_a_compiled_graph_it_is_attention() -> None:
    def run(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        once = attention(q, k, k, causal=True, implementation="flex")
        return attention(once, k, k, causal=True, implementation="flex")

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for length in (130, 140):
        q, k = torch.randn(1, 4, length, 8), torch.randn(1, 2, 200, 8)
        right = attention(attention(q, k, k, causal=True), k, k, causal=True)
        torch.testing.assert_close(compiled(q, k), right)


@pytest.mark.release
def test_many_shapes_in_one_process_are_each_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch stops compiling a function after eight shapes, here two."""
    compiled = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    monkeypatch.setattr("steplab.ops.attention.peers._compiled", _compiled.__wrapped__)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiler))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=2):
        for length in range(1, 5):
            q = torch.randn(1, 2, length, 8)
            torch.testing.assert_close(attention(q, q, q, implementation="flex"), attention(q, q, q))
    assert len(compiled) == 4


def test_gradients_on_a_cpu_are_refused() -> None:
    q = torch.ones(1, 1, 4, 8, requires_grad=True)
    with pytest.raises(Unsupported, match="choose sdpa or flash_reference"):
        attention(q, q, q, implementation="flex")


def test_without_gradients_a_cpu_takes_tensors_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    with torch.no_grad():
        torch.testing.assert_close(attention(q, q, q, implementation="flex"), attention(q, q, q))


@pytest.mark.parametrize(("num_queries", "num_keys"), [(0, 4), (4, 0)])
def test_no_positions_on_a_cpu_are_refused(num_queries: int, num_keys: int) -> None:
    """torch would divide by zero and crash the process."""
    q, k = torch.ones(1, 1, num_queries, 8), torch.ones(1, 1, num_keys, 8)
    with torch.no_grad(), pytest.raises(Unsupported, match="without queries or keys"):
        attention(q, k, k, implementation="flex")
