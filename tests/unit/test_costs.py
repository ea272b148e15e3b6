"""Parameter and FLOP counts against built modules, torch's own counter, and figures worked out by hand."""

from typing import get_args

import pytest
import torch
from tests.shapes import VARIANTS
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from steplab.costs.flops import DTYPE_OF_MATMULS, Convention, executed_flops_per_token, model_flops_per_token
from steplab.costs.parameters import num_embedding_parameters, num_parameters
from steplab.model.transformer import Transformer
from steplab.model.workload import num_lookup_parameters
from steplab.model.workload import num_parameters as num_built_parameters
from steplab.ops.attention.api import attention_named
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
    """Weights of norms, and biases."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.dim() == 1)


# --- parameters -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [*(MODEL_SIZES[name] for name in MEASURED), *ALL_SHAPES], ids=str)
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
@pytest.mark.parametrize(("batch", "context"), [(1, 1), (2, 7), (3, 16)])
@pytest.mark.parametrize("backward", [False, True])
def test_the_full_convention_is_torchs_count_and_weights_of_norms_and_biases(
    shape: TransformerShape, batch: int, context: int, backward: bool
) -> None:
    """The convention takes every parameter outside the embedding for one of a matmul; those of norms and
    biases are not.

    Each of them is counted as 2 FLOPs a token and pass, and the counter sees no matmul for it: that is the
    whole difference. The plain attention computes the whole square, as both count it.
    """
    module = built(shape, context, "cpu")
    tokens = torch.randint(shape.vocab_size, (batch, context))
    with FlopCounterMode(display=False) as counter:
        loss = module(tokens, tokens)
        if backward:
            loss.backward()
    passes = 3 if backward else 1
    vectors = passes * 2 * num_in_vectors(module)
    full = model_flops_per_token("full", **sizes(shape), context=context, backward=backward)
    assert full is not None
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
        found = model_flops_per_token(convention, **sizes(shape), context=context, backward=backward)
        assert found is not None
        assert found * (1 if backward else 3) == published[convention]


@pytest.mark.parametrize("attention", ["sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient"])
@pytest.mark.parametrize("pass_name", CHOICES["pass_name"])
def test_a_fused_attention_executes_half_of_torchs_count_of_its_kernels(attention: str, pass_name: str) -> None:
    """torch counts the kernels of fused attention, recomputed scores included, over the whole square."""
    batch, context, shape = 2, 64, TINY_SHAPES[2]
    heads = (batch, shape.num_heads, context, shape.head_dim)
    kernels = sdpa_flop_count(heads, heads, heads)
    passes = 1
    if pass_name != "forward":
        kernels += sdpa_backward_flop_count(heads, heads, heads, heads)
        passes = 3
    N, E = num_parameters(shape), num_embedding_parameters(shape)
    spec = resolve_step({"batch": batch, "context": context, "attention": attention, "pass": pass_name})
    executed = executed_flops_per_token(spec, **sizes(shape))
    assert executed is not None
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


def test_the_2_7b_model_has_the_figures_worked_out_by_hand() -> None:
    # A block: 4 x 2560^2 = 26,214,400; 3 x 2560 x 10240 = 78,643,200; two norms 5,120: 104,862,720 in all.
    # 32 blocks 3,355,607,040; embedding and head 2 x 25,600,000; final norm 2,560.
    shape = MODEL_SIZES["2.7b"]
    assert num_parameters(shape) == 3_406_809_600
    assert num_embedding_parameters(shape) == 25_600_000
    # N - E = 3,381,209,600, times 6 = 20,287,257,600; L d T = 32 x 2560 x 512 = 41,943,040, times 6 = 251,658,240.
    causal = model_flops_per_token("causal", **sizes(shape), context=512, backward=True)
    assert causal == 20_538_915_840
    assert model_flops_per_token("full", **sizes(shape), context=512, backward=True) == 20_790_574_080
    assert model_flops_per_token("params", **sizes(shape), context=512, backward=True) == 20_440_857_600


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
