"""Every attention a CPU can run against the formula in float64, computed by numpy."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

import steplab.ops.attention as public
from steplab.ops.attention.api import IMPLEMENTATIONS, attention
from steplab.ops.errors import Unsupported

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
    """softmax(scale q k^T) v, row by row, in numpy's float64."""
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
    """What rounding the exact result to the output's type may cost: no implementation can promise less."""
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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
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
    """The most by which plain attention may miss the formula, to first order in the unit roundoff u.

    The scores are rounded twice, after the product and after the scale: 2 u |s|. The product is summed in
    float32 at least, whose roundoff u32 enters once a term: D u32 |q| |k|. A weight whose scores are off by d
    is off by a factor 1 + 2 d, and is rounded once. The weighted sum rounds once, and once a term in float32.
    """
    u, u32 = torch.finfo(q.dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    q_, k_ = (t.to(torch.float64) for t in (q, k))
    width, num_keys = q.shape[-1], k.shape[-2]
    scores = (q_ @ k_.mT).abs().amax() / math.sqrt(width)
    terms = (q_.abs() @ k_.abs().mT).amax() / math.sqrt(width)
    off = 2 * u * scores + width * u32 * terms
    return (2 * off + 2 * u + num_keys * u32) * truth(q, k, v.abs(), causal=causal)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
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
def test_without_causality_every_key_counts(implementation: str) -> None:
    q, k, v = inputs((1, 1), 5, 5, 8)
    before = attention(q, k, v, implementation=implementation)
    v[..., -1, :] += 1
    assert (attention(q, k, v, implementation=implementation) != before).all()


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
    """The model hands over transposed views, not fresh tensors."""
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
    """The Triton kernels under its interpreter, and flex without gradients: in files of their own."""
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
