from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from steplab.costs.parameters import num_embedding_parameters, num_parameters
from steplab.errors import Unsupported, UserError
from steplab.model.workload import num_lookup_parameters
from steplab.specs.hf_shape import shape_of
from steplab.specs.model import ModelSpec

SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
OF_GPT_2 = {"vocab_size": 200, "n_embd": 64, "n_head": 4, "n_positions": 128}
KNOWN: list[dict[str, Any]] = [
    {"model_type": "llama", **SIZES, "vocab_size": 200},
    {"model_type": "llama", **SIZES, "vocab_size": 200, "num_key_value_heads": 1, "tie_word_embeddings": True},
    {"model_type": "llama", **SIZES, "vocab_size": 200, "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    {"model_type": "mistral", **SIZES, "vocab_size": 200, "num_key_value_heads": 2},
    {"model_type": "qwen2", **SIZES, "vocab_size": 200, "num_key_value_heads": 2, "tie_word_embeddings": True},
    {"model_type": "gpt2", **OF_GPT_2, "n_layer": 3},
    {"model_type": "gpt2", **OF_GPT_2, "n_layer": 2, "n_inner": 80, "tie_word_embeddings": False},
    {"model_type": "starcoder2", **SIZES, "vocab_size": 200},
]


def model(config: dict[str, Any]) -> ModelSpec:
    return ModelSpec(name="hf:config.json", kind="hf", hf_config=config)


@pytest.mark.parametrize("config", KNOWN, ids=lambda config: config["model_type"])
def test_the_parameters_are_those_of_the_model_that_transformers_builds(config: dict[str, Any]) -> None:
    shape = shape_of(model(config), "counting")
    given = dict(config)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(given.pop("model_type"), **given))
    built.tie_weights()
    assert num_parameters(shape) == sum(parameter.numel() for parameter in built.parameters())
    lookups = num_lookup_parameters(built)
    assert num_embedding_parameters(shape) == lookups
    norms = [inner for name, inner in built.named_modules() if "norm" in type(inner).__name__.lower()]
    assert len(norms) == 2 * shape.num_layers + 1


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "mixtral", **SIZES, "num_local_experts": 8}, "is a mixture of experts"),
        ({"model_type": "qwen3", **SIZES}, "it is qwen3; .* are gpt2, llama, mistral, qwen2, starcoder2"),
        (
            {"model_type": "llama", **SIZES, "vocab_size": 9, "hidden_act": "relu"},
            "hidden_act 'relu', and known are silu",
        ),
        (
            {"model_type": "llama", **SIZES, "vocab_size": 9, "head_dim": 32},
            "heads 32 wide, which are not its width 64",
        ),
        (
            {"model_type": "llama", **SIZES, "vocab_size": 9, "attention_bias": True},
            "biases in only its attention or .* are not supported",
        ),
        ({"model_type": "starcoder2", **SIZES, "vocab_size": 9, "use_bias": False}, "biases in its LayerNorm"),
    ],
)
def test_what_the_plain_transformer_has_not_is_refused_by_name(config: dict[str, Any], said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        shape_of(model(config), "predicting the memory of it")


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_size_that_is_missing_is_named(key: str) -> None:
    config = {name: value for name, value in KNOWN[0].items() if name != key}
    with pytest.raises(UserError, match=f"hf:config.json: its configuration must give {key} as a whole number"):
        shape_of(model(config), "counting")
