"""The sizes and parts of a transformers configuration, read from its config.json without transformers.

A configuration is known if the plain Transformer can have the same parts, so that its parameters are counted exactly.
Others are refused with the unknown part.
"""

from collections.abc import Callable, Mapping
from typing import Any

from steplab.errors import Unsupported, UserError
from steplab.specs.model import Biases, ModelSpec, TransformerShape

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")
_GELU = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast")
Config = Mapping[str, Any]


def shape_of(model: ModelSpec, doing: str) -> TransformerShape:
    """The sizes and parts of a model: a built-in one's own, or its configuration's. Raises Unsupported for a factory's
    model, and for a configuration with a part that the plain Transformer lacks; `doing` is the action that this
    prevents."""
    if model.shape is not None:
        return model.shape
    if model.hf_config is None:
        why = "its factory's model is not known before it runs"
        raise Unsupported(doing, why, "measure it with `steplab memory`, or replace the sizes of a built-in model")
    config = model.hf_config
    family = str(config.get("model_type"))
    refuse_experts(model, doing)
    if family not in _FAMILIES:
        raise _unknown(doing, f"it is {family}; transformers models with known parts are {', '.join(_FAMILIES)}")
    reader = _Reader(config, doing, model.name)
    try:
        return _FAMILIES[family](reader)
    except UserError as error:
        if isinstance(error, Unsupported):
            raise
        raise UserError(f"{model.name}: {error}") from error


def refuse_experts(model: ModelSpec, doing: str) -> None:
    """Raise Unsupported for a configuration of a mixture of experts."""
    if any((model.hf_config or {}).get(key) for key in _EXPERTS):
        raise _unknown(doing, f"{model.name} is a mixture of experts")


class _Reader:
    """A configuration with checked access to its values."""

    def __init__(self, config: Config, doing: str, name: str) -> None:
        self._config, self._doing, self._name = config, doing, name

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number; raises UserError without a valid value or default."""
        value = self._config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"its configuration must give {key} as a whole number of at least 1, not {value!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._config.get(key, default))

    def require(self, key: str, default: str, known: tuple[str, ...]) -> None:
        """Raise Unsupported for an activation function that the plain Transformer lacks."""
        value = self._config.get(key, default)
        if value not in known:
            raise self.unknown(f"{self._name} has {key} {value!r}, and known are {', '.join(known)}")

    def whole_heads(self, width: int, heads: int) -> None:
        """Raise Unsupported for heads of another width than the residual stream divided by their number."""
        own = self._config.get("head_dim")
        if own is not None and own * heads != width:
            raise self.unknown(f"{self._name} has heads {own} wide, which are not its width {width} divided by {heads}")

    def unknown(self, why: str) -> Unsupported:
        return _unknown(self._doing, why)


def _unknown(doing: str, why: str) -> Unsupported:
    return Unsupported(doing, why, "measure it with `steplab memory`")


def _like_llama(read: _Reader, *, kv_heads: int | None, biases: Biases) -> TransformerShape:
    read.require("hidden_act", "silu", ("silu",))
    width, heads = read.count("hidden_size"), read.count("num_attention_heads")
    read.whole_heads(width, heads)
    return TransformerShape(
        vocab_size=read.count("vocab_size"),
        d_model=width,
        d_ff=read.count("intermediate_size"),
        num_layers=read.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=read.count("num_key_value_heads", kv_heads or heads),
        biases=biases,
        head="tied" if read.flag("tie_word_embeddings", False) else "untied",
    )


def _llama(read: _Reader) -> TransformerShape:
    of_attention, of_feed_forward = read.flag("attention_bias", False), read.flag("mlp_bias", False)
    if of_attention != of_feed_forward:
        raise read.unknown("biases in only its attention or its feed-forward blocks are not supported")
    return _like_llama(read, kv_heads=None, biases="all" if of_attention else "none")


def _mistral(read: _Reader) -> TransformerShape:
    return _like_llama(read, kv_heads=8, biases="none")


def _qwen2(read: _Reader) -> TransformerShape:
    return _like_llama(read, kv_heads=32, biases="qkv")


def _gpt2(read: _Reader) -> TransformerShape:
    read.require("activation_function", "gelu_new", _GELU)
    width = read.count("n_embd")
    return TransformerShape(
        vocab_size=read.count("vocab_size"),
        d_model=width,
        d_ff=read.count("n_inner", 4 * width),
        num_layers=read.count("n_layer"),
        num_heads=read.count("n_head"),
        learned_positions=read.count("n_positions"),
        norm="layernorm",
        feed_forward="gelu",
        biases="all",
        head="tied" if read.flag("tie_word_embeddings", True) else "untied",
    )


def _starcoder2(read: _Reader) -> TransformerShape:
    read.require("hidden_act", "gelu_pytorch_tanh", _GELU)
    if not read.flag("use_bias", True):
        raise read.unknown("biases in its LayerNorm but not in its linear layers are not supported")
    return TransformerShape(
        vocab_size=read.count("vocab_size"),
        d_model=read.count("hidden_size"),
        d_ff=read.count("intermediate_size"),
        num_layers=read.count("num_hidden_layers"),
        num_heads=read.count("num_attention_heads"),
        num_kv_heads=read.count("num_key_value_heads", 2),
        norm="layernorm",
        feed_forward="gelu",
        biases="all",
        head="tied" if read.flag("tie_word_embeddings", True) else "untied",
    )


_FAMILIES: dict[str, Callable[[_Reader], TransformerShape]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "starcoder2": _starcoder2,
}
"""Model types of transformers in config.json's spelling; defaults are its configuration classes'."""
