"""Costs of operators against torch's own FLOP counter and the sizes of real tensors."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor as TorchTensor
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import steplab.ops.attention.operators  # noqa: F401  # defines torch.ops.steplab
from steplab.costs.operators import _FUSED, FUSED_ATTENTION, Tensor, fused_attention_cost, operator_cost
from steplab.reading.traces.digest import digest
from steplab.reading.traces.reading import read_trace


def described(tensor: TorchTensor) -> Tensor:
    return Tensor(shape=tuple(tensor.shape), item_bytes=tensor.element_size())


PRODUCTS: dict[str, tuple[Callable[..., TorchTensor], list[tuple[int, ...]]]] = {
    "aten::mm": (torch.mm, [(4, 8), (8, 3)]),
    "aten::addmm": (torch.addmm, [(3,), (4, 8), (8, 3)]),
    "aten::bmm": (torch.bmm, [(5, 4, 8), (5, 8, 3)]),
    "aten::baddbmm": (torch.baddbmm, [(5, 4, 3), (5, 4, 8), (5, 8, 3)]),
    "aten::linear": (torch.nn.functional.linear, [(2, 4, 8), (3, 8)]),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_cost_what_torch_counts_and_move_their_tensors(name: str, dtype: torch.dtype) -> None:
    function, shapes = PRODUCTS[name]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        out = function(*tensors)
    cost = operator_cost(name, [described(tensor) for tensor in tensors])
    assert cost is not None
    assert cost.flops == counter.get_total_flops()
    assert cost.moved_bytes == sum(tensor.nbytes for tensor in (*tensors, out))


@pytest.mark.parametrize(
    ("name", "function", "shapes"),
    [
        ("aten::mul", torch.mul, [(4, 1, 8), (5, 1)]),
        ("aten::add_", torch.add, [(4, 8), (4, 8)]),
        ("aten::where", lambda c, a, b: torch.where(c > 0, a, b), [(4, 8), (1, 8), (4, 1)]),
        ("aten::silu", torch.nn.functional.silu, [(4, 8)]),
        ("aten::_softmax", lambda x: torch.softmax(x, -1), [(4, 8)]),
    ],
)
def test_the_rest_reads_its_inputs_and_writes_its_output(
    name: str, function: Callable[..., TorchTensor], shapes: list[tuple[int, ...]]
) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    cost = operator_cost(name, [described(tensor) for tensor in tensors])
    assert cost is not None
    assert cost.moved_bytes == sum(tensor.nbytes for tensor in (*tensors, function(*tensors)))
    assert cost.flops


def test_a_cast_reads_one_type_and_writes_the_other() -> None:
    weight, copy = torch.randn(16, 8), torch.empty(16, 8, dtype=torch.bfloat16)
    cost = operator_cost("aten::copy_", [described(copy), described(weight)])
    assert cost is not None
    assert (cost.flops, cost.moved_bytes) == (0, weight.nbytes + copy.nbytes)


def test_softmax_moves_as_many_bytes_as_a_product_that_computes_a_hundredfold() -> None:
    scores = Tensor(shape=(80, 1024, 1024), item_bytes=4)
    softmax = operator_cost("aten::_softmax", [scores])
    q, k = Tensor(shape=(80, 1024, 64), item_bytes=4), Tensor(shape=(80, 64, 1024), item_bytes=4)
    product = operator_cost("aten::bmm", [q, k])
    assert softmax is not None
    assert softmax.flops is not None
    assert product is not None
    assert product.flops is not None
    assert product.flops / softmax.flops == pytest.approx(2 * 64 / 5)
    assert softmax.moved_bytes / product.moved_bytes == pytest.approx(2 * 1024 / (1024 + 2 * 64))


def test_an_inductor_kernel_moves_all_it_was_given_and_its_flops_are_unknown() -> None:
    tensors = [Tensor(shape=(10, 10), item_bytes=4)] * 3
    cost = operator_cost("triton_poi_fused_add_cos_sin_0", tensors)
    assert cost is not None
    assert (cost.flops, cost.moved_bytes) == (None, 3 * 400)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("aten::unheard_of", [(4, 4)]),
        ("aten::mm", [(4, 8)]),
        ("aten::mm", [(2, 4, 8), (8, 3)]),
        ("aten::mul", [(4, 3), (4, 8)]),
        ("aten::mm", []),
    ],
)
def test_what_no_rule_knows_has_no_cost(name: str, shapes: list[tuple[int, ...]]) -> None:
    assert operator_cost(name, [Tensor(shape=shape, item_bytes=4) for shape in shapes]) is None


# --- fused attention ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(FUSED_ATTENTION))
def test_the_flag_is_looked_for_where_torch_has_it(name: str) -> None:
    namespace, _, short = name.partition("::")
    operator = getattr(getattr(torch.ops, namespace), short).default
    argument = operator._schema.arguments[_FUSED[name].causal]
    assert argument.name in ("is_causal", "custom_mask_type", "causal")
    assert _FUSED[name].backward == operator._schema.arguments[0].name.startswith("grad")


@pytest.mark.parametrize("name", sorted(FUSED_ATTENTION))
@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_costs_what_torch_counts_of_what_is_not_masked(name: str, causal: bool) -> None:
    batch, heads, queries, keys, width = 2, 3, 128, 96, 16
    known = _FUSED[name]

    def tensor(length: int) -> Tensor:
        middle = (length, heads) if known.heads_last else (heads, length)
        return Tensor(shape=(batch, *middle, width), item_bytes=2)

    q, k, v = tensor(queries), tensor(keys), tensor(keys)
    scalars = [""] * known.causal + [str(causal)]
    cost = fused_attention_cost(name, [q, q, k, v, q] if known.backward else [q, k, v], scalars)
    shape, other = (batch, heads, queries, width), (batch, heads, keys, width)
    whole = (
        sdpa_backward_flop_count(shape, shape, other, other) if known.backward else sdpa_flop_count(shape, other, other)
    )
    assert cost is not None
    assert cost.flops == whole * (0.5 if causal else 1)
    untold = fused_attention_cost(name, [q, q, k, v, q] if known.backward else [q, k, v], [])
    assert untold is not None
    assert untold.flops is None
    assert fused_attention_cost(name, [Tensor(shape=(4,), item_bytes=2)], scalars) is None


def test_attention_in_a_trace_has_its_flops(tmp_path: Path) -> None:
    batch, heads, length, width = 2, 4, 64, 32
    q, k, v = (torch.randn(batch, heads, length, width, requires_grad=True) for _ in range(3))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    ops = digest(read_trace(tmp_path / "trace.json"), source=None, file=None).ops
    flops = {op.name.rpartition("_")[2]: op.flops for op in ops if "flash_attention" in op.name}
    forward = 4 * batch * heads * length * length * width / 2
    assert flops == {"cpu": forward, "backward": 2.5 * forward}
