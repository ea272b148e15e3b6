"""FlexAttention's mask against torch's own way of making one, and what a CPU has of it."""

from functools import partial

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from steplab.ops.attention.api import attention
from steplab.ops.attention.peers import _compiled, causal_mask
from steplab.ops.errors import Unsupported

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
    """Its lists are kept, and autograd saves no tensor that was made in inference mode."""
    with torch.inference_mode():
        causal_mask(777, 777, torch.device("cpu"))
    mask = causal_mask(777, 777, torch.device("cpu"))
    assert not any(getattr(mask, f"{name}_indices").is_inference() for name in LISTS)


def test_within_a_compiled_graph_it_is_attention() -> None:
    """Twice, as in two layers, and for several lengths, of which the compiler makes a symbol."""

    def run(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        once = attention(q, k, k, causal=True, implementation="flex")
        return attention(once, k, k, causal=True, implementation="flex")

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for length in (130, 140):
        q, k = torch.randn(1, 4, length, 8), torch.randn(1, 2, 200, 8)
        right = attention(attention(q, k, k, causal=True), k, k, causal=True)
        torch.testing.assert_close(compiled(q, k), right)


def test_many_shapes_in_one_process_are_each_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives a function up that it has compiled for eight, or here for two."""
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
    """As the refusal above says: torch itself would look at the tensors alone."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    with torch.no_grad():
        torch.testing.assert_close(attention(q, q, q, implementation="flex"), attention(q, q, q))


@pytest.mark.parametrize(("num_queries", "num_keys"), [(0, 4), (4, 0)])
def test_no_positions_on_a_cpu_are_refused(num_queries: int, num_keys: int) -> None:
    """torch would divide by their number, and the process would be gone."""
    q, k = torch.ones(1, 1, num_queries, 8), torch.ones(1, 1, num_keys, 8)
    with torch.no_grad(), pytest.raises(Unsupported, match="without queries or keys"):
        attention(q, k, k, implementation="flex")
