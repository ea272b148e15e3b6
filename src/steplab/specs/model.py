"""The model under test: a built-in size, a transformers configuration, or the user's own factory."""

import dataclasses
import difflib
import os.path
import re
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

import msgspec

from steplab.errors import Unsupported, UserError
from steplab.specs.step_fields import Declared, StepField, check_declared, declared_fields
from steplab.unpacking import small_file

ModelKind = Literal["transformer", "hf", "factory"]
Norm = Literal["rmsnorm", "layernorm"]
FeedForward = Literal["swiglu", "gelu"]
Biases = Literal["none", "qkv", "all"]
Head = Literal["untied", "tied"]
Projections = Literal["separate", "merged"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerShape:
    """The plain pre-norm Transformer; by default LLaMA's parts: RMSNorm, rotary embedding, SwiGLU, an untied head, no
    biases."""

    vocab_size: int = Declared(help="Rows of the embedding and of the output head", group="sizes", least=0).field()
    d_model: int = Declared(help="Width of the residual stream", group="sizes", least=1).field()
    d_ff: int = Declared(help="Inner width of the feed-forward blocks", group="sizes", least=1).field()
    num_layers: Annotated[int, msgspec.Meta(le=10_000)] = Declared(
        help="Number of blocks", group="sizes", least=1
    ).field()
    # 0: only feed-forward blocks, without norms and attention, as in the planning-only size xxl.
    num_heads: int = Declared(
        help="Number of attention heads, each d-model / num-heads wide", group="sizes", least=0
    ).field()
    num_kv_heads: int | None = Declared(
        help="Heads of keys and values", default_words="num-heads", group="sizes", least=1
    ).field(None)
    learned_positions: int = Declared(
        help="Rows of learned positions; 0: rotary embedding", group="sizes", least=0
    ).field(0)
    norm: Norm = Declared(help="Normalisation before each part of a block", group="sizes").field("rmsnorm")
    feed_forward: FeedForward = Declared(
        help="Feed-forward block",
        meanings={"swiglu": "three linear layers", "gelu": "two linear layers"},
        group="sizes",
    ).field("swiglu")
    biases: Biases = Declared(
        help="Biases",
        meanings={
            "qkv": "of the projections to queries, keys and values",
            "all": "of all linear layers of the blocks, and of LayerNorm",
        },
        group="sizes",
    ).field("none")
    head: Head = Declared(
        help="Output head", meanings={"tied": "shares the token embedding's weight"}, group="sizes"
    ).field("untied")
    projections: Projections = Declared(
        help="Linear layers of a block that read the same tensor",
        meanings={"separate": "one each", "merged": "one for queries, keys and values, one for gate and up"},
        group="sizes",
    ).field("separate")

    def __post_init__(self) -> None:
        check_declared(SIZE_FIELDS, self)
        if self.num_heads == 0:
            self._refuse_parts_of_attention()
            return
        if self.vocab_size == 0:
            raise UserError("model.vocab_size must be at least 1, not 0")
        self._refuse_uneven_heads()
        if self.num_kv_heads == self.num_heads:  # one spec for the same model, however it was given
            object.__setattr__(self, "num_kv_heads", None)

    def _refuse_parts_of_attention(self) -> None:
        for field in SIZE_FIELDS:
            given = getattr(self, field.attribute)
            if field.attribute in _PARTS_WITH_ATTENTION and given != field.default:
                raise UserError(f"{field.key} {given} has no effect on a model without attention heads; leave it out")

    def _refuse_uneven_heads(self) -> None:
        if self.num_heads % self.kv_heads:
            raise UserError(
                f"model.num_kv_heads {self.num_kv_heads} must divide the {self.num_heads} attention heads; "
                "choose a divisor of model.num_heads"
            )
        factor, even = (1, "") if self.learned_positions else (2, " of an even width, which the rotary embedding needs")
        if self.d_model % (factor * self.num_heads):
            raise UserError(
                f"model.d_model {self.d_model} cannot be split into {self.num_heads} heads{even}; "
                f"choose a multiple of {'2 x ' if even else ''}model.num_heads"
            )

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def kv_width(self) -> int:
        """Width of the keys over all heads."""
        return self.kv_heads * self.head_dim

    @property
    def query_key_value_widths(self) -> tuple[int, int, int]:
        """Widths of queries, keys and values over all heads."""
        return self.d_model, self.kv_width, self.kv_width

    @property
    def feed_forward_layers(self) -> tuple[str, ...]:
        """Names of the feed-forward block's linear layers, in order."""
        return ("gate", "up", "down") if self.feed_forward == "swiglu" else ("up", "down")

    @property
    def has_norm_biases(self) -> bool:
        return self.norm == "layernorm" and self.biases == "all"


_PARTS_WITH_ATTENTION = ("num_kv_heads", "learned_positions", "norm", "biases", "head", "projections")

SIZE_FIELDS: tuple[StepField, ...] = declared_fields(TransformerShape, "model.", lambda spec: spec.model.shape)


MODEL_SIZES: dict[str, TransformerShape] = {
    "tiny": TransformerShape(vocab_size=1_000, d_model=128, d_ff=512, num_layers=2, num_heads=4),
    "small": TransformerShape(vocab_size=10_000, d_model=768, d_ff=3072, num_layers=12, num_heads=12),
    "medium": TransformerShape(vocab_size=10_000, d_model=1024, d_ff=4096, num_layers=24, num_heads=16),
    "large": TransformerShape(vocab_size=10_000, d_model=1280, d_ff=5120, num_layers=36, num_heads=20),
    "xl": TransformerShape(vocab_size=10_000, d_model=1600, d_ff=6400, num_layers=48, num_heads=25),
    "2.7b": TransformerShape(vocab_size=10_000, d_model=2560, d_ff=10240, num_layers=32, num_heads=32),
    "8b": TransformerShape(vocab_size=151_936, d_model=4096, d_ff=11008, num_layers=34, num_heads=32),
    "xxl": TransformerShape(vocab_size=0, d_model=16384, d_ff=53248, num_layers=126, num_heads=0, feed_forward="gelu"),
}
"""Built-in sizes by name. tiny is for a CPU; xxl is for planning only: it has feed-forward blocks, no attention."""

PLANNING_ONLY = ("xxl",)

EXAMPLES = {"toy": "steplab.model.toy:toy"}

MEASURED = tuple(name for name in (*MODEL_SIZES, *EXAMPLES) if name not in PLANNING_ONLY)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A model by name, with everything needed to rebuild it on another machine."""

    name: str
    """A built-in size, `hf:PATH/config.json`, or `package.module:function`."""
    kind: ModelKind
    """Builder: transformer (steplab's own), hf (the transformers library) or factory (the user's function)."""
    shape: TransformerShape | None = None
    """Sizes of a built-in model; None for other kinds, whose parameters are counted after building."""
    hf_config: dict[str, Any] | None = dataclasses.field(default=None, hash=False)
    """Content of the transformers config.json, so that a record is complete without the file. A dict cannot be part of
    the hash."""

    @property
    def label(self) -> str:
        """Short name for tables: a built-in name with changed sizes, or a configuration file's name; for a config.json
        the folder's, because a family's sizes share a model type."""
        if self.kind == "factory":
            return next((short for short, factory in EXAMPLES.items() if factory == self.name), self.name)
        if self.kind == "hf":
            path = PurePath(self.name.removeprefix("hf:"))
            name = (path.parent if path.name == "config.json" else path).name.removesuffix(".json")
            return f"hf:{name if name.strip('.') else (self.hf_config or {}).get('model_type', self.name)}"
        base = MODEL_SIZES.get(self.name)
        if base is None or self.shape is None or base == self.shape:
            return self.name
        changed = [
            f"{field.name}={getattr(self.shape, field.name)}"
            for field in dataclasses.fields(base)
            if getattr(self.shape, field.name) != getattr(base, field.name)
        ]
        return f"{self.name}[{','.join(changed)}]"

    @property
    def max_context(self) -> int | None:
        """Longest context that the position embedding supports, in tokens; None: unknown or unlimited."""
        if self.shape is not None:
            return self.shape.learned_positions or None
        return self.configured("max_position_embeddings") or self.configured("n_positions")

    def configured(self, name: str) -> int | None:
        """Whole number in a transformers configuration; None: absent, or another kind of model."""
        config = self.hf_config or {}
        text = config.get("text_config", config)  # models that also take images nest the language model's part
        value = text.get(name) if isinstance(text, dict) else None
        return value if isinstance(value, int) else None


def model_spec(name: str, overrides: dict[str, Any] | None = None) -> ModelSpec:
    """Spec of a model; `overrides` replace built-in sizes. Raises UserError for an unknown name, an unreadable
    configuration, or an override that does not apply."""
    overrides = overrides or {}
    if name in MODEL_SIZES:
        valid = [field.name for field in dataclasses.fields(TransformerShape)]
        for key in overrides:
            if key not in valid:
                raise UserError(f"model.{key} is not a size of the model; choose one of {', '.join(valid)}")
        return ModelSpec(name=name, kind="transformer", shape=dataclasses.replace(MODEL_SIZES[name], **overrides))
    if overrides:
        raise UserError(
            f"model.{next(iter(overrides))} applies to the built-in sizes only, not to '{name}'; "
            "change its configuration or factory instead"
        )
    if name.startswith("hf:"):
        return ModelSpec(name=name, kind="hf", hf_config=_read_hf_config(Path(name[3:])))
    if re.fullmatch(r"[\w.]+:\w+", EXAMPLES.get(name, name)):
        return ModelSpec(name=EXAMPLES.get(name, name), kind="factory")
    raise UserError(
        f"unknown model '{name}'; {_meant(name)}choose one of {', '.join(MEASURED)}, "
        "a transformers configuration as hf:PATH/config.json, or your own factory as package.module:function"
    )


def _meant(name: str) -> str:
    file, _, function = name.partition(":")
    if PurePath(file).suffix == ".py":
        parts = [part for part in PurePath(file).with_suffix("").parts if part != "."]
        if all(part.isidentifier() for part in parts):
            return f"did you mean {'.'.join(parts)}:{function or 'build'}, with the name of its function? Else "
        return "a Python file is named as its module, which needs a name without dashes, dots and absolute paths. Else "
    near = difflib.get_close_matches(name, MEASURED, n=1)
    return f"did you mean {near[0]}? Else " if near else ""


def refuse_planning_only(model: ModelSpec) -> None:
    if model.shape is not None and model.shape.num_heads == 0:
        raise Unsupported(
            f"measuring '{model.name}'",
            "it is a size for planning only, which has feed-forward blocks without attention",
            f"choose a model other than {', '.join(PLANNING_ONLY)}",
        )


def _read_hf_config(path: Path) -> dict[str, Any]:
    path = path / "config.json" if os.path.isdir(path) else path
    try:
        config = msgspec.json.decode(small_file(path), type=dict[str, Any])
    except OSError as error:
        raise UserError(
            f"cannot read the model configuration {path}: {error.strerror}; hf: takes the path of a config.json"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not a transformers configuration: {error}") from error
    if not isinstance(config.get("model_type"), str):
        raise UserError(f"{path} is not a transformers configuration: it names no model_type")
    return config
