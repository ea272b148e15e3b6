"""Models of the transformers library: their configuration, random weights."""

import importlib.util
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from steplab.errors import Unsupported, UserError
from steplab.model.workload import Workload, random_tokens
from steplab.ops.attention.sdpa import SDPA_BACKENDS
from steplab.specs.step import StepSpec

_SERVED = ("plain", "sdpa", *(f"sdpa_{name}" for name in SDPA_BACKENDS))
"""The values of StepSpec's attention that transformers supports: its own code, or torch's kernels."""
_MOST_LAYERS = 10_000
_LONGEST_REASON = 300
"""The longest error in characters: for an unknown model_type transformers lists all that it knows."""


def build_hf(spec: StepSpec, device: torch.device) -> Workload:
    """The causal language model a config.json describes; raises Unsupported without transformers."""
    if importlib.util.find_spec("transformers") is None:
        raise Unsupported(f"model {spec.model.name}", "transformers is not installed", "pip install 'steplab[hf]'")
    from transformers import AutoConfig, AutoModelForCausalLM

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
        config = AutoConfig.for_model(content.pop("model_type"), **content)
        config.use_cache = False
        with device:
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    except RuntimeError:  # such as no memory, which is no fault of the configuration
        raise
    except Exception as error:  # the libraries' validators have errors of their own
        said = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"transformers cannot build {spec.model.name}: {shorten(said, _LONGEST_REASON)}") from error
    if spec.checkpoints_apply:
        _checkpoint(model, spec)
    backend = spec.attention.removeprefix("sdpa_")
    module: nn.Module = WithSdpaBackend(model, backend) if backend in SDPA_BACKENDS else model
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    head_dim = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else None)

    def make_batch() -> dict[str, Tensor]:
        tokens_BT = random_tokens(text.vocab_size, spec.batch, spec.context, device)
        return {"input_ids": tokens_BT, "labels": tokens_BT}

    return Workload(
        module=module,
        make_batch=make_batch,
        num_layers=getattr(text, "num_hidden_layers", None),
        attention_width=heads * head_dim if heads and head_dim else None,
    )


def _checkpoint(model: Any, spec: StepSpec) -> None:
    """Switch on transformers' own checkpointing, which covers every layer or none."""
    if spec.checkpointing == "none":
        return
    what = f"checkpointing {spec.checkpointing} for {spec.model.name}"
    if spec.checkpointing != "full":
        why = "steplab checkpoints every layer of a transformers model, or none"
        raise Unsupported(what, why, "use --checkpointing full or none")
    # the name since transformers 5.23
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    backend = SDPA_BACKENDS.get(spec.attention.removeprefix("sdpa_"))
    if backend is not None and spec.compile == "off":  # a compiler traces a layer once, and runs the same kernels again
        options["context_fn"] = lambda: (sdpa_kernel(backend), sdpa_kernel(backend))
    try:
        enable(options)
    except ValueError as error:
        raise Unsupported(what, " ".join(str(error).split()), "use --checkpointing none") from error


class WithSdpaBackend(nn.Module):
    """A model whose scaled_dot_product_attention calls use one kernel only."""

    def __init__(self, model: nn.Module, backend: str) -> None:
        super().__init__()
        self.model = model
        self.backend = SDPA_BACKENDS[backend]

    def forward(self, **batch: Tensor) -> Any:
        with sdpa_kernel(self.backend):
            return self.model(**batch)
