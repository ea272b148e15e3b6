"""Builds models of the transformers library from a configuration, with random weights and a loss.

`architectures` in the configuration names the model. Without it, the model is causal, except for encoders (BERT: masked
tokens), encoder-decoders (T5: sequences) and vision models (ViT: classification).
"""

import importlib.util
from collections.abc import Iterator
from functools import partial
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from steplab.errors import Unsupported, UserError
from steplab.model.checkpointing import selective_contexts
from steplab.model.workload import Workload, num_parameters, random_tokens
from steplab.ops.attention.peers import SDPA_BACKENDS
from steplab.specs.checkpointing import SELECTIVE, differs_by_block
from steplab.specs.step import StepSpec

_SERVED = ("plain", "sdpa", *(f"sdpa_{name}" for name in SDPA_BACKENDS))
"""Attention choices for transformers models: plain is their own code, the others are torch's kernels."""
_MOST_LAYERS = 10_000
_INNER = ("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim")
_LONGEST_REASON = 300
"""Most characters quoted from an error: transformers may list all types that it knows."""


def build_hf(spec: StepSpec, device: torch.device) -> Workload:
    """Build the model of a config.json. Raises Unsupported without transformers, and unless it is a language model or
    an image classifier.
    """
    if importlib.util.find_spec("transformers") is None:
        raise Unsupported(f"model {spec.model.name}", "transformers is not installed", "pip install 'steplab[hf]'")
    import transformers

    content = dict(spec.model.hf_config or {})
    if spec.attention not in _SERVED:
        what = f"attention '{spec.attention}' for {spec.model.name}"
        raise Unsupported(what, "transformers computes its models' attention", f"choose one of {', '.join(_SERVED)}")
    size = content.get("vocab_size")
    if isinstance(size, int) and size < 1:  # torch builds it, and then has no token to choose
        raise UserError(f"vocab_size in {spec.model.name} must be at least 1, not {size}")
    layers = content.get("num_hidden_layers")
    if isinstance(layers, int) and layers > _MOST_LAYERS:  # transformers builds them one by one
        raise UserError(f"num_hidden_layers in {spec.model.name} must be at most {_MOST_LAYERS}, not {layers}")
    attention = "eager" if spec.attention == "plain" else "sdpa"
    try:
        config = transformers.AutoConfig.for_model(content.pop("model_type"), **content)
        config.use_cache = False
        task = _task_of(config, spec.model.name)
        if task == "sequence" and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = 0
        with device:
            model = getattr(transformers, _TASKS[task][0]).from_config(config, attn_implementation=attention)
    except (RuntimeError, Unsupported):  # such as running out of memory, which is no fault of the configuration
        raise
    except Exception as error:  # the libraries' validators have their own errors
        said = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"transformers cannot build {spec.model.name}: {shorten(said, _LONGEST_REASON)}") from error
    if spec.checkpoints_apply:
        _checkpoint(model, spec)
    backend = spec.attention.removeprefix("sdpa_")
    module: nn.Module = WithSdpaBackend(model, backend) if backend in SDPA_BACKENDS else model
    text = config.get_text_config()
    num_layers, attention_width = _sizes(text) if task in ("causal", "masked") else (None, None)
    heads = getattr(text, "num_attention_heads", None)
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    experts = list(_experts(model, config))
    inactive = sum(num_parameters(part) * (1 - chosen / number) for part, number, chosen in experts)
    inner = next((n for key in _INNER if (n := getattr(text, key, None))), None)
    return Workload(
        module=module,
        make_batch=partial(_batch, task, config, spec, device),
        knows_tokens=task != "image",
        num_layers=num_layers,
        attention_width=attention_width,
        key_width=attention_width * key_heads // heads if attention_width and heads and key_heads else None,
        inner_width=inner or 4 * text.hidden_size if attention_width else None,
        is_causal=task == "causal",
        num_active_parameters=round(num_parameters(model) - inactive) if inactive else None,
        experts=experts[0][1:] if experts else None,
    )


_TASKS = {
    "causal": ("AutoModelForCausalLM", "CAUSAL_LM"),
    "sequence": ("AutoModelForSeq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM"),
    "masked": ("AutoModelForMaskedLM", "MASKED_LM"),
    "image": ("AutoModelForImageClassification", "IMAGE_CLASSIFICATION"),
}
"""For each task, transformers' class of models and its name in the library's tables."""


def _task_of(config: Any, name: str) -> str:
    from transformers.models.auto import modeling_auto

    tables = {task: getattr(modeling_auto, f"MODEL_FOR_{part}_MAPPING_NAMES") for task, (_, part) in _TASKS.items()}
    for architecture in config.architectures or ():
        for task, table in tables.items():
            if table.get(config.model_type) == architecture:
                return task
    can = [task for task, table in tables.items() if config.model_type in table]
    if config.is_encoder_decoder and "sequence" in can:
        return "sequence"
    if "masked" in can and not getattr(config, "is_decoder", False):
        return "masked"
    if not can:
        why = "it is neither a language model nor a classifier of images"
        raise Unsupported(f"model {name}", why, "build it in a factory, and give package.module:function")
    return can[0]


def _batch(task: str, config: Any, spec: StepSpec, device: torch.device) -> dict[str, Tensor]:
    if task == "image":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        images_BCHW = torch.rand(spec.batch, config.num_channels, height, width, device=device)
        return {"pixel_values": images_BCHW, "labels": torch.randint(config.num_labels, (spec.batch,), device=device)}
    tokens_BT = random_tokens(config.get_text_config().vocab_size, spec.batch, spec.context, device)
    return {"input_ids": tokens_BT, "labels": tokens_BT}


def _sizes(text: Any) -> tuple[int | None, int | None]:
    heads = getattr(text, "num_attention_heads", None)
    head_dim = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else None)
    return getattr(text, "num_hidden_layers", None), heads * head_dim if heads and head_dim else None


def _experts(model: nn.Module, config: Any) -> Iterator[tuple[nn.Module, int, int]]:
    """For each module of experts: (module, number of experts, experts that a token uses)."""
    text = config.get_text_config()
    chosen: int = next((n for key in _CHOSEN if (n := getattr(text, key, None))), 0)
    for part in model.modules() if chosen else ():
        experts = getattr(part, "experts", None)
        if isinstance(experts, nn.Module):
            number = len(experts) if isinstance(experts, nn.ModuleList) else next(experts.parameters()).shape[0]
            yield experts, number, min(chosen, number)


_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")


def _checkpoint(model: Any, spec: StepSpec) -> None:
    if spec.checkpointing == "none":
        return
    what = f"checkpointing {spec.checkpointing} for {spec.model.name}"
    if differs_by_block(spec.checkpointing):
        why = "steplab checkpoints every layer of a transformers model, or none"
        raise Unsupported(what, why, f"use --checkpointing none, full, {' or '.join(SELECTIVE)}")
    # the name since transformers 5.23
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    backend = SDPA_BACKENDS.get(spec.attention.removeprefix("sdpa_"))
    if spec.checkpointing in SELECTIVE:
        options["context_fn"] = partial(selective_contexts, spec.checkpointing, is_compiled=spec.compile != "off")
    elif (
        backend is not None and spec.compile == "off"
    ):  # a compiler traces a layer once, and runs the same kernels again
        options["context_fn"] = lambda: (sdpa_kernel(backend), sdpa_kernel(backend))
    try:
        enable(options)
    except ValueError as error:
        raise Unsupported(what, " ".join(str(error).split()), "use --checkpointing none") from error


class WithSdpaBackend(nn.Module):
    """Runs a model with scaled_dot_product_attention limited to one kernel."""

    def __init__(self, model: nn.Module, backend: str) -> None:
        super().__init__()
        self.model = model
        self.backend = SDPA_BACKENDS[backend]

    def forward(self, **batch: Tensor) -> Any:
        with sdpa_kernel(self.backend):
            return self.model(**batch)
