"""Configurations of transformers, read without it: against the models that it builds, and what is refused by name."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from steplab.cli.app import main
from steplab.costs.parameters import num_embedding_parameters, num_parameters
from steplab.errors import Unsupported, UserError
from steplab.model.build import build_workload
from steplab.model.workload import num_lookup_parameters
from steplab.plan.memory import predict_memory
from steplab.specs.hf_shape import shape_of
from steplab.specs.model import ModelSpec
from steplab.specs.resolve import resolve_step

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
        ({"model_type": "qwen3", **SIZES}, "only gpt2, llama, mistral, qwen2, starcoder2 .* and this is qwen3"),
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
            "attention or .* alone are not known",
        ),
        ({"model_type": "starcoder2", **SIZES, "vocab_size": 9, "use_bias": False}, "LayerNorm has biases"),
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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("config", [KNOWN[0], KNOWN[3], KNOWN[5]], ids=lambda config: config["model_type"])
def test_transformers_keeps_at_least_what_is_predicted(config: dict[str, Any], precision: str) -> None:
    """Bytes that autograd keeps of a forward pass with materialised scores, parameters and buffers aside."""
    fields = {"batch": 2, "context": 96, "precision": precision, "pass": "forward_backward"}
    spec = dataclasses.replace(resolve_step(fields), model=model(config))
    predicted = predict_memory(spec).at_peak
    workload = build_workload(spec, torch.device("cpu"))
    assert workload.module is not None
    assert workload.make_batch is not None
    kept, alive = dict[int, int](), list[torch.Tensor]()
    own = {t.untyped_storage().data_ptr() for t in (*workload.module.parameters(), *workload.module.buffers())}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
    ):
        workload.module(**workload.make_batch())
    assert sum(kept.values()) >= predicted["activations"] + predicted.get("autocast_copies", 0)


def test_a_configuration_is_predicted_by_its_sizes_and_traced_where_torch_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(KNOWN[5]))
    of_config = predict_memory(resolve_step({"model": f"hf:{path}", "context": 64}))
    fields = {"model.vocab_size": 200, "model.d_model": 64, "model.d_ff": 256, "model.num_layers": 3,
              "model.num_heads": 4, "model.learned_positions": 128, "model.norm": "layernorm",
              "model.feed_forward": "gelu", "model.biases": "all", "model.head": "tied"}  # fmt: skip
    of_sizes = predict_memory(resolve_step({"model": "tiny", "context": 64} | fields))
    assert of_config.terms == of_sizes.terms
    assert (of_config.kind, of_sizes.kind) == ("at_least", "dry_run")
    assert any("activations are those of steplab's Transformer" in note for note in of_config.notes)
    assert main(["plan", "memory", "--model", f"hf:{path}", "--context", "64"]) == 0
    assert "traced: torch ran the model on tensors without content" in " ".join(capsys.readouterr().out.split())
    for wrong in ({"attention": "flash_triton"}, {"checkpointing": "selective"}):
        with pytest.raises(Unsupported, match=re.escape("predicting the memory of hf:")):
            predict_memory(resolve_step({"model": f"hf:{path}", "context": 64} | wrong))
    assert of_config.spec is not None
    assert dataclasses.asdict(of_config.spec.model)["kind"] == "hf"
