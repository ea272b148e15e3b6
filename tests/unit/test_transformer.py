import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from steplab.model.transformer import ROPE_BASE, Transformer, rotary_table, rotate
from steplab.ops.attention.api import attention_named
from steplab.ops.cross_entropy import linear_cross_entropy
from steplab.specs.model import TransformerShape

CONTEXT = 24
SHAPES = [
    TransformerShape(vocab_size=50, d_model=32, d_ff=48, num_layers=1, num_heads=1),
    TransformerShape(vocab_size=37, d_model=48, d_ff=80, num_layers=2, num_heads=4),
    TransformerShape(vocab_size=64, d_model=60, d_ff=36, num_layers=3, num_heads=3),
    TransformerShape(vocab_size=50, d_model=32, d_ff=48, num_layers=2, num_heads=4, num_kv_heads=2),
    TransformerShape(vocab_size=50, d_model=32, d_ff=48, num_layers=2, num_heads=4, num_kv_heads=1, head="tied"),
    TransformerShape(vocab_size=37, d_model=48, d_ff=80, num_layers=2, num_heads=4, biases="all"),
]
LIKE_GPT_2 = TransformerShape(
    vocab_size=50, d_model=32, d_ff=48, num_layers=2, num_heads=4, learned_positions=40, norm="layernorm",
    feed_forward="gelu", biases="all", head="tied",
)  # fmt: skip
OF_LLAMA = {
    "embedding.": "model.embed_tokens.",
    "norm.": "model.norm.",
    "head.": "lm_head.",
    "attention_norm.": "input_layernorm.",
    "feed_forward_norm.": "post_attention_layernorm.",
    "attention.query.": "self_attn.q_proj.",
    "attention.key.": "self_attn.k_proj.",
    "attention.value.": "self_attn.v_proj.",
    "attention.output.": "self_attn.o_proj.",
    "feed_forward.gate.": "mlp.gate_proj.",
    "feed_forward.up.": "mlp.up_proj.",
    "feed_forward.down.": "mlp.down_proj.",
}


class Float64Norm(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps)


def plain(shape: TransformerShape, attention: str = "plain") -> Transformer:
    torch.manual_seed(0)
    module = Transformer(shape, context=CONTEXT, attention=attention_named(attention)).double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif "norm" in name:  # ones would hide a weight that is not used
                parameter.normal_(1.0, 0.3)
            else:
                parameter.mul_(5)  # far from the uniform distribution over tokens
    return module


def llama(module: Transformer, shape: TransformerShape) -> Any:
    """Llama with the weights of `module` in float64, and our rotary table, since its own sums float32 in another
    order.
    """
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.d_model,
        intermediate_size=shape.d_ff,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.kv_heads,
        attention_bias=shape.biases == "all",
        mlp_bias=shape.biases == "all",
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=shape.head == "tied",
        use_cache=False,
    )
    config._attn_implementation = "sdpa"  # the eager one takes its softmax in float32
    model: Any = LlamaForCausalLM(config).double()
    model.load_state_dict({name_of_llama(name): value for name, value in module.state_dict().items()})
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (shape.head == "tied")
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LlamaRMSNorm):
                setattr(parent, name, Float64Norm(child))

    def angles(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        assert module.rotary_2TD is not None
        cos, sin = module.rotary_2TD[:, position_ids]
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)

    model.model.rotary_emb.forward = angles
    return model


def name_of_llama(name: str) -> str:
    prefix = ""
    if name.startswith("blocks."):
        _, index, name = name.split(".", 2)
        prefix = f"model.layers.{index}."
    ours = next(ours for ours in OF_LLAMA if name.startswith(ours))
    return prefix + OF_LLAMA[ours] + name.removeprefix(ours)


def tokens_of(shape: TransformerShape, batch: int = 2, length: int = CONTEXT) -> Tensor:
    return torch.randint(shape.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


# --- the same function as Llama ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("length", [1, 7, CONTEXT])
def test_the_same_weights_give_llamas_logits(shape: TransformerShape, length: int) -> None:
    module = plain(shape)
    tokens = tokens_of(shape, length=length)
    expected = llama(module, shape)(input_ids=tokens).logits
    assert expected.dtype == torch.float64
    torch.testing.assert_close(module(tokens), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_same_weights_give_llamas_loss(shape: TransformerShape) -> None:
    """Llama shifts labels itself, and takes the loss in float32, which limits accuracy."""
    module = plain(shape)
    tokens = tokens_of(shape)
    expected = llama(module, shape)(input_ids=tokens, labels=tokens).loss
    assert expected.dtype == torch.float32
    loss = module(tokens[:, :-1], tokens[:, 1:])
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss.float(), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_same_weights_give_llamas_gradients(shape: TransformerShape) -> None:
    module = plain(shape)
    model = llama(module, shape)
    tokens = tokens_of(shape)
    module(tokens).square().mean().backward()
    model(input_ids=tokens).logits.square().mean().backward()
    expected = dict(model.named_parameters())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name_of_llama(name)].grad)


def gpt_2(module: Transformer, shape: TransformerShape) -> Any:
    config = GPT2Config(
        vocab_size=shape.vocab_size, n_positions=shape.learned_positions, n_embd=shape.d_model, n_inner=shape.d_ff,
        n_layer=shape.num_layers, n_head=shape.num_heads, activation_function="gelu", layer_norm_epsilon=1e-5,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    model: Any = GPT2LMHeadModel(config).double()
    own = module.state_dict()
    names = {"attention_norm": "ln_1", "attention.output": "attn.c_proj", "feed_forward_norm": "ln_2"}
    names |= {"feed_forward.up": "mlp.c_fc", "feed_forward.down": "mlp.c_proj"}
    found = {
        "transformer.wte.weight": own["embedding.weight"], "transformer.wpe.weight": own["positions.weight"],
        "transformer.ln_f.weight": own["norm.weight"], "transformer.ln_f.bias": own["norm.bias"],
        "lm_head.weight": own["head.weight"],
    }  # fmt: skip
    for layer in range(shape.num_layers):
        to, of = f"transformer.h.{layer}", f"blocks.{layer}"
        for ours, theirs in names.items():
            for kind in ("weight", "bias"):
                found[f"{to}.{theirs}.{kind}"] = own[f"{of}.{ours}.{kind}"].t()
        for kind in ("weight", "bias"):
            parts = [own[f"{of}.attention.{which}.{kind}"].t() for which in ("query", "key", "value")]
            found[f"{to}.attn.c_attn.{kind}"] = torch.cat(parts, -1)
    model.load_state_dict(found)
    return model


@pytest.mark.parametrize("length", [1, CONTEXT])
def test_the_same_weights_give_gpt_2s_logits_and_gradients(length: int) -> None:
    module = plain(LIKE_GPT_2)
    model = gpt_2(module, LIKE_GPT_2)
    tokens = tokens_of(LIKE_GPT_2, length=length)
    logits, expected = module(tokens), model(input_ids=tokens).logits
    torch.testing.assert_close(logits, expected)
    logits.square().mean().backward()
    expected.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    torch.testing.assert_close(gradients["embedding.weight"], model.transformer.wte.weight.grad)
    torch.testing.assert_close(gradients["positions.weight"], model.transformer.wpe.weight.grad)
    assert gradients["positions.weight"][length:].eq(0).all()
    weight, bias = (gradients[f"blocks.0.attention.query.{kind}"] for kind in ("weight", "bias"))
    ours = torch.cat([weight.t(), bias[None]])
    theirs = model.transformer.h[0].attn.c_attn
    whole = torch.cat([theirs.weight.grad, theirs.bias.grad[None]])
    torch.testing.assert_close(ours, whole[:, : LIKE_GPT_2.d_model])


def test_transformers_own_table_of_angles_pairs_the_same_elements() -> None:
    shape = SHAPES[1]
    module = plain(shape).float()
    model = llama(module.double(), shape)
    del model.model.rotary_emb.forward
    tokens = tokens_of(shape)
    torch.testing.assert_close(module(tokens).float(), model(input_ids=tokens).logits.float())


def test_the_loss_is_the_one_passed_in() -> None:
    shapes = []

    def loss(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        shapes.append((tuple(logits_NV.shape), tuple(targets_N.shape)))
        return logits_NV.sum()

    module = Transformer(SHAPES[0], context=CONTEXT, attention=attention_named("plain"), loss=loss)
    tokens = tokens_of(SHAPES[0])
    module(tokens, tokens)
    assert shapes == [((2 * CONTEXT, 50), (2 * CONTEXT,))]


def test_a_loss_in_chunks_gives_the_loss_and_the_gradients_of_the_plain_one() -> None:
    for shape in SHAPES:
        tokens, targets = tokens_of(shape), tokens_of(shape).flip(0)
        one, other = plain(shape), plain(shape)
        other.head_loss = linear_cross_entropy
        losses = [module(tokens, targets) for module in (one, other)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
        gradients = [{name: p.grad for name, p in module.named_parameters()} for module in (one, other)]
        torch.testing.assert_close(*gradients)
        assert torch.equal(one(tokens), other(tokens))  # without targets it gives logits, as ever


@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[3]], ids=["all heads", "grouped heads"])
@pytest.mark.parametrize("attention", ["sdpa", "sdpa_flash", "sdpa_math", "flash_reference"])
def test_the_choice_of_attention_does_not_change_the_logits(attention: str, shape: TransformerShape) -> None:
    tokens = tokens_of(shape)
    torch.testing.assert_close(plain(shape, attention)(tokens), plain(shape)(tokens))


# --- causality and gradients ------------------------------------------------------------------------------


# --- rotary embedding -------------------------------------------------------------------------------------


def exact_table(context: int, head_dim: int) -> Tensor:
    return torch.stack((angles(context, head_dim).cos(), angles(context, head_dim).sin()))


def angles(context: int, head_dim: int) -> Tensor:
    """position x base^(-2i/D), in float64 (Su et al. 2021, section 3.4.2)."""
    rows = [[t * ROPE_BASE ** (-2 * i / head_dim) for i in range(head_dim // 2)] for t in range(context)]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(("context", "head_dim"), [(1, 2), (17, 2), (128, 64), (1024, 80), (4096, 128)])
def test_the_rotary_table_is_as_exact_as_float32_allows(context: int, head_dim: int) -> None:
    """An angle is a position times a power, each rounded. The rounded exponent moves the power by a factor 1 + ln(base)
    u; power (up to 2 u), result and product are rounded too. Cosine and sine round once more. u is float32's unit
    roundoff, half its eps.
    """
    u = torch.finfo(torch.float32).eps / 2
    exact = angles(context, head_dim)
    allowed = exact * (math.log(ROPE_BASE) + 3) * u + 2 * u
    cos, sin = rotary_table(context, head_dim)
    assert cos.shape == sin.shape == (context, head_dim // 2)
    assert ((cos.double() - exact.cos()).abs() <= allowed).all()
    assert ((sin.double() - exact.sin()).abs() <= allowed).all()


def test_rotating_is_multiplying_complex_numbers() -> None:
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(9, 4, dtype=torch.float64), angles(9, 8))
    out = rotate(x, exact_table(9, 8))
    torch.testing.assert_close(out, torch.cat((turned.real, turned.imag), -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rotating_keeps_the_type_and_is_done_in_the_tables_precision(dtype: torch.dtype) -> None:
    x = torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    table = rotary_table(9, 8)
    out = rotate(x, table)
    assert out.dtype == dtype
    assert torch.equal(out, rotate(x.float(), table).to(dtype))


@pytest.mark.parametrize("shape", [*SHAPES, LIKE_GPT_2], ids=str)
def test_merged_projections_compute_the_same(shape: TransformerShape) -> None:
    separate, merged = plain(shape), plain(dataclasses.replace(shape, projections="merged"))
    parts = {"query_key_value": ("query", "key", "value"), "gate_up": ("gate", "up")}
    of = dict(separate.named_parameters())

    def parts_of(name: str) -> list[Tensor]:
        layer = name.split(".")[-2]
        return [of[name.replace(layer, part)] for part in parts.get(layer, (layer,))]

    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            parameter.copy_(torch.cat(parts_of(name)))
    tokens = torch.randint(shape.vocab_size, (2, CONTEXT + 1))
    losses = [module(tokens[:, :-1], tokens[:, 1:]) for module in (separate, merged)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0])
    for name, parameter in merged.named_parameters():
        gradients = [part.grad for part in parts_of(name) if part.grad is not None]
        torch.testing.assert_close(parameter.grad, torch.cat(gradients))
