import itertools

import pytest
import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from steplab.ops.attention.api import attention
from steplab.ops.attention.implementations import DTYPES, TABLE, Implementation, why_not
from steplab.ops.attention.peers import SDPA_BACKENDS

LENGTHS = ((64, 64), (1, 1), (2, 2), (64, 32), (32, 64), (0, 64), (64, 0), (1, 64))
WIDTHS = (8, 12, 20, 64, 100, 128, 136, 192, 256, 264)
KERNELS = [row for row in TABLE if row.name.removeprefix("sdpa_") in SDPA_BACKENDS and row.operators]


@pytest.mark.parametrize("row", KERNELS, ids=lambda row: row.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_torchs_kernels_take_what_the_table_says(row: Implementation, dtype: str) -> None:
    wrong = []
    for width, (queries, keys), causal, grouped in itertools.product(WIDTHS, LENGTHS, (False, True), (False, True)):
        why = why_not(
            row.name, device="cuda", dtype=DTYPES[dtype], head_dim=width, num_queries=queries, num_keys=keys,
            causal=causal, grouped=grouped,
        )  # fmt: skip
        q, k, v = (
            torch.randn(2, heads, n, width, device="cuda", dtype=getattr(torch, dtype), requires_grad=True)
            for heads, n in ((4, queries), (2 if grouped else 4, keys), (2 if grouped else 4, keys))
        )
        try:
            with sdpa_kernel(SDPA_BACKENDS[row.name.removeprefix("sdpa_")]):
                scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).sum().backward()
            taken = True
        except RuntimeError:
            taken = False
        if taken != (why is None):
            wrong.append((width, queries, keys, causal, grouped, taken, why))
    assert wrong == []


@pytest.mark.parametrize("row", [row for row in TABLE if row.deterministic], ids=lambda row: row.name)
def test_gradients_that_are_said_to_be_the_same_every_time_are(row: Implementation) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 16, 2048, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    found = []
    for _ in range(6):
        o = attention(q, k, v, causal=True, implementation=row.name)
        found.append(torch.autograd.grad(o, (q, k, v), q.detach() + 0.5))
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))
