from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from tests.first import first
from tests.shapes import VARIANTS
from tests.sure import sure
from torch import Tensor as TorchTensor
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import steplab.ops.attention.operators  # noqa: F401  # defines torch.ops.steplab
from steplab.costs.flops import (
    DTYPE_OF_MATMULS,
    Convention,
    executed_flops_per_token,
    model_flops_per_token,
    num_embedding_parameters,
    num_parameters,
)
from steplab.costs.operators import _FUSED, FUSED_ATTENTION, Tensor, fused_attention_cost, operator_cost
from steplab.costs.roofline import Roofline
from steplab.model.transformer import Transformer
from steplab.model.workload import num_lookup_parameters
from steplab.model.workload import num_parameters as num_built_parameters
from steplab.ops.attention.api import attention_named
from steplab.reading.traces.digest import digest
from steplab.reading.traces.reading import read_trace
from steplab.specs.hardware import hardware_named
from steplab.specs.model import MODEL_SIZES, PLANNING_ONLY, TransformerShape
from steplab.specs.resolve import resolve_step
from steplab.specs.step import CHOICES

MEASURED = sorted(set(MODEL_SIZES) - set(PLANNING_ONLY))
TINY_SHAPES = [
    TransformerShape(vocab_size=50, d_model=24, d_ff=40, num_layers=1, num_heads=1),
    TransformerShape(vocab_size=17, d_model=32, d_ff=24, num_layers=3, num_heads=4),
    TransformerShape(vocab_size=101, d_model=48, d_ff=96, num_layers=2, num_heads=3),
]
PARTS = [
    resolve_step({"model": "tiny", "model.vocab_size": 40, "model.d_model": 32, "model.d_ff": 48} | variant).model.shape
    for variant in VARIANTS
]
ALL_SHAPES = [*TINY_SHAPES, *(shape for shape in PARTS if shape)]


def built(shape: TransformerShape, context: int = 8, device: str = "meta") -> Transformer:
    with torch.device(device):
        return Transformer(shape, context=context, attention=attention_named("plain"))


def sizes(shape: TransformerShape) -> dict[str, int]:
    return {
        "num_parameters": num_parameters(shape),
        "num_embedding_parameters": num_embedding_parameters(shape),
        "num_layers": shape.num_layers,
        "attention_width": shape.d_model,
    }


def num_in_vectors(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.dim() == 1)


# --- parameters -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [MODEL_SIZES["2.7b"], *ALL_SHAPES], ids=str)
def test_the_closed_forms_count_the_parameters_of_the_built_module(shape: TransformerShape) -> None:
    module = built(shape)
    assert num_parameters(shape) == num_built_parameters(module) == sum(p.numel() for p in module.parameters())
    assert num_embedding_parameters(shape) == num_lookup_parameters(module)


def test_the_planning_size_counts_its_two_linear_layers_a_block() -> None:
    with torch.device("meta"):
        block = [torch.nn.Linear(16384, 53248, bias=False), torch.nn.Linear(53248, 16384, bias=False)]
    assert num_parameters(MODEL_SIZES["xxl"]) == 126 * sum(layer.weight.numel() for layer in block)
    assert num_embedding_parameters(MODEL_SIZES["xxl"]) == 0


def test_an_embedding_tied_to_the_head_is_no_look_up() -> None:
    module = built(TINY_SHAPES[0])
    module.head.weight = module.embedding.weight
    assert num_lookup_parameters(module) == 0
    assert num_built_parameters(module) == num_parameters(TINY_SHAPES[0]) - 50 * 24


# --- FLOPs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ALL_SHAPES, ids=str)
@pytest.mark.parametrize("size", first(1, [(3, 16), (2, 7), (1, 1)]), ids=str)
@pytest.mark.parametrize("backward", [False, True])
def test_the_full_convention_is_torchs_count_and_weights_of_norms_and_biases(
    shape: TransformerShape, size: tuple[int, int], backward: bool
) -> None:
    """The convention counts all non-embedding parameters as matmuls, 2 FLOPs a token and pass; norms and biases, which
    torch's counter does not see, are the whole difference. Both count the whole square of plain attention.
    """
    batch, context = size
    module = built(shape, context, "cpu")
    tokens = torch.randint(shape.vocab_size, (batch, context))
    with FlopCounterMode(display=False) as counter:
        loss = module(tokens, tokens)
        if backward:
            loss.backward()
    passes = 3 if backward else 1
    vectors = passes * 2 * num_in_vectors(module)
    full = sure(model_flops_per_token("full", **sizes(shape), context=context, backward=backward))
    assert full * batch * context == counter.get_total_flops() + vectors * batch * context
    spec = resolve_step({"context": context, "pass": "forward_backward" if backward else "forward"})
    assert executed_flops_per_token(spec, **sizes(shape)) == full


@pytest.mark.parametrize("name", [*MEASURED])
@pytest.mark.parametrize("context", [128, 1024])
@pytest.mark.parametrize("backward", [False, True])
def test_the_conventions_are_those_published(name: str, context: int, backward: bool) -> None:
    shape = MODEL_SIZES[name]
    N, E = num_parameters(shape), num_embedding_parameters(shape)
    LdT = shape.num_layers * shape.d_model * context
    published = {"causal": 6 * (N - E) + 6 * LdT, "full": 6 * (N - E) + 12 * LdT, "params": 6 * N}
    assert set(published) == set(get_args(Convention))
    for convention in get_args(Convention):
        found = sure(model_flops_per_token(convention, **sizes(shape), context=context, backward=backward))
        assert found * (1 if backward else 3) == published[convention]


@pytest.mark.parametrize("attention", ["sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient"])
@pytest.mark.parametrize("pass_name", CHOICES["pass_name"])
def test_a_fused_attention_executes_half_of_torchs_count_of_its_kernels(attention: str, pass_name: str) -> None:
    """torch counts fused attention's kernels, with recomputed scores, over the whole square."""
    batch, context, shape = 2, 64, TINY_SHAPES[2]
    heads = (batch, shape.num_heads, context, shape.head_dim)
    kernels = sdpa_flop_count(heads, heads, heads)
    passes = 1
    if pass_name != "forward":
        kernels += sdpa_backward_flop_count(heads, heads, heads, heads)
        passes = 3
    N, E = num_parameters(shape), num_embedding_parameters(shape)
    spec = resolve_step({"batch": batch, "context": context, "attention": attention, "pass": pass_name})
    executed = sure(executed_flops_per_token(spec, **sizes(shape)))
    linear = passes * 2 * (N - E) * spec.tokens
    assert executed * spec.tokens == linear + shape.num_layers * kernels / 2


@pytest.mark.parametrize("attention", ["plain", "sdpa_math"])
def test_materialised_scores_are_kept_and_not_recomputed(attention: str) -> None:
    shape = MODEL_SIZES["small"]
    spec = resolve_step({"model": "small", "attention": attention, "context": 512})
    full = model_flops_per_token("full", **sizes(shape), context=512, backward=True)
    assert executed_flops_per_token(spec, **sizes(shape)) == full


def test_the_optimizer_adds_no_flops_of_matmuls() -> None:
    counts = [
        executed_flops_per_token(resolve_step({"pass": pass_name}), **sizes(MODEL_SIZES["tiny"]))
        for pass_name in ("forward_backward", "train")
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("unknown", ["num_embedding_parameters", "num_layers", "attention_width"])
def test_where_a_size_is_unknown_only_the_rule_of_thumb_is_counted(unknown: str) -> None:
    known: dict[str, int | None] = {**sizes(MODEL_SIZES["tiny"]), unknown: None}
    count = num_parameters(MODEL_SIZES["tiny"])
    arguments = {name: known[name] for name in known if name != "num_parameters"}
    for convention in get_args(Convention):
        found = model_flops_per_token(convention, num_parameters=count, **arguments, context=128, backward=True)
        assert found == (6 * count if convention == "params" else None)
    assert executed_flops_per_token(resolve_step({}), num_parameters=count, **arguments) is None


def test_every_precision_has_the_data_type_whose_peak_counts() -> None:
    assert set(DTYPE_OF_MATMULS) == set(CHOICES["precision"])
    assert DTYPE_OF_MATMULS["bf16_pure"] == "bf16"
    assert DTYPE_OF_MATMULS["tf32"] == "tf32"


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
    cost = sure(operator_cost(name, [described(tensor) for tensor in tensors]))
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
    cost = sure(operator_cost(name, [described(tensor) for tensor in tensors]))
    assert cost.moved_bytes == sum(tensor.nbytes for tensor in (*tensors, function(*tensors)))
    assert cost.flops


def test_a_cast_reads_one_type_and_writes_the_other() -> None:
    weight, copy = torch.randn(16, 8), torch.empty(16, 8, dtype=torch.bfloat16)
    cost = sure(operator_cost("aten::copy_", [described(copy), described(weight)]))
    assert (cost.flops, cost.moved_bytes) == (0, weight.nbytes + copy.nbytes)


def test_an_inductor_kernel_moves_all_it_was_given_and_its_flops_are_unknown() -> None:
    tensors = [Tensor(shape=(10, 10), item_bytes=4)] * 3
    cost = sure(operator_cost("triton_poi_fused_add_cos_sin_0", tensors))
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
    untold = sure(fused_attention_cost(name, [q, q, k, v, q] if known.backward else [q, k, v], []))
    assert untold.flops is None
    assert fused_attention_cost(name, [Tensor(shape=(4,), item_bytes=2)], scalars) is None


def test_attention_in_a_trace_has_its_flops(tmp_path: Path) -> None:
    batch, heads, length, width = 2, 4, 64, 32
    q, k, v = (torch.randn(batch, heads, length, width, requires_grad=True) for _ in range(3))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    ops = digest(read_trace(tmp_path / "trace.json"), source=None).ops
    flops = {op.name.rpartition("_")[2]: op.flops for op in ops if "flash_attention" in op.name}
    forward = 4 * batch * heads * length * length * width / 2
    assert flops == {"cpu": forward, "backward": 2.5 * forward}


H200 = Roofline(hardware=hardware_named("H200 SXM"))
DOCUMENT = (Path(__file__).parents[2] / "docs" / "profile.md").read_text()


def test_the_least_time_is_that_of_the_lower_roof() -> None:
    ridge = 67e12 / 4.8e12
    for intensity in (ridge / 10, ridge, 10 * ridge):
        least_s = H200.least_time_s(intensity * 1e9, 1e9, "fp32")
        assert least_s == pytest.approx(1e9 / 4.8e12 * max(1.0, intensity / ridge))
    assert H200.least_time_s(1.0, 1.0, "fp64") is None


def test_an_unlisted_device_has_no_roof() -> None:
    unknown = Roofline(hardware=None)
    assert (unknown.peak("fp32"), unknown.bandwidth()) == (None, None)
    assert unknown.citations(["fp32"]) == []


def test_the_document_has_softmax_below_the_ridge_and_the_product_above() -> None:
    q, k = Tensor(shape=(1, 1024, 64), item_bytes=4), Tensor(shape=(1, 64, 1024), item_bytes=4)
    product = operator_cost("aten::bmm", [q, k])
    softmax = operator_cost("aten::_softmax", [Tensor(shape=(1, 1024, 1024), item_bytes=4)])
    ridge = sure(H200.peak("fp32")) / sure(H200.bandwidth())
    assert product is not None
    assert product.flops is not None
    assert softmax is not None
    assert sure(softmax.flops) / softmax.moved_bytes == 5 / 8 < ridge < product.flops / product.moved_bytes
    told = " ".join(DOCUMENT.split())
    assert f"0.6 FLOPs a byte, the product {product.flops / product.moved_bytes:.0f}" in told
    assert f"the ridge of an H200 in fp32 is at {ridge:.0f}" in told
