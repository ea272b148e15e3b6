"""Which tensors attention takes, grouped-query heads, and what it says to others."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from steplab.ops.attention.api import attention
from steplab.ops.attention.shapes import as_four_dims, check_inputs, fixed
from steplab.ops.errors import UserError

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


@pytest.mark.parametrize("implementation", GROUPED)
def test_three_dimensions_are_a_batch_of_single_heads(implementation: str) -> None:
    q, k, v = random(3, 5, 8), random(3, 9, 8), random(3, 9, 8) + 1
    out = attention(q, k, v, causal=True, implementation=implementation)
    expected = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected)


@given(
    lead=st.lists(st.integers(1, 3), max_size=4).map(tuple),
    order=st.permutations(range(6)),
)
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
        ((2, 6, 4, 8), (2, 4, 4, 8), (2, 4, 4, 8), "divides that of the query heads"),
        ((2, 2, 4, 8), (2, 4, 4, 8), (2, 4, 4, 8), "divides that of the query heads"),
        ((2, 2, 4, 8), (2, 0, 4, 8), (2, 0, 4, 8), "divides that of the query heads"),
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


def test_a_size_is_a_constant() -> None:
    assert [fixed(n) for n in (0, 1, 4097)] == [0, 1, 4097]
