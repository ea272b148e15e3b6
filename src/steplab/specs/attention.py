"""An attention by itself, as it is benchmarked: its shape, its number format, and who computes it."""

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from steplab.errors import UserError
from steplab.specs.step import CHOICES, CompileMode
from steplab.specs.step_fields import LARGEST

AttentionDtype = Literal["fp32", "tf32", "bf16", "fp16"]
AttentionPass = Literal["forward", "backward", "both"]
PASSES: tuple[AttentionPass, ...] = get_args(AttentionPass)
"""forward: without gradients. backward: alone, after a forward pass that is not timed. both: one after the other."""
DTYPES: tuple[str, ...] = get_args(AttentionDtype)
SIZES = ("batch", "heads", "kv_heads", "queries", "keys", "dim")
"""The fields that are sizes, from the outermost in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """One cell: queries of shape [batch, heads, queries, dim], keys and values of [batch, kv_heads, keys, dim]."""

    batch: int = 1
    """Sequences."""
    heads: int = 1
    """Query heads."""
    kv_heads: int | None = None
    """Heads of keys and values, of which `heads` is a multiple; None: as many as `heads`."""
    queries: int = 1024
    """Query positions."""
    keys: int | None = None
    """Key positions; None: as many as queries."""
    dim: int = 64
    """Dimension of a head."""
    causal: bool = False
    """Whether keys after the query's own position are hidden, both counted from the first."""
    dtype: AttentionDtype = "bf16"
    """fp32: IEEE products. tf32: fp32 tensors, TF32 products. bf16, fp16: tensors of that type."""
    implementation: str = "plain"
    """A name of steplab.ops.attention."""
    compile: CompileMode = "off"
    """off: called as it is. Otherwise the mode of torch.compile it is called through."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.heads if self.kv_heads is None else self.kv_heads)
        object.__setattr__(self, "keys", self.queries if self.keys is None else self.keys)
        for name in SIZES:
            if not 1 <= getattr(self, name) <= LARGEST:
                raise UserError(f"{name} must be at least 1 and below 2^63, not {getattr(self, name)}")
        if self.heads % self.num_kv_heads:
            raise UserError(f"heads must be a multiple of kv-heads, not {self.heads} of {self.kv_heads}")
        choices = {"dtype": DTYPES, "implementation": CHOICES["attention"], "compile": CHOICES["compile"]}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise UserError(f"{name} '{getattr(self, name)}' is not known; choose one of {', '.join(known)}")

    @property
    def num_kv_heads(self) -> int:
        """kv_heads, which is set once the spec is made."""
        return self.kv_heads or self.heads

    @property
    def num_keys(self) -> int:
        """keys, which are set once the spec is made."""
        return self.keys or self.queries

    @property
    def shape(self) -> "AttentionSpec":
        """The same for whoever computes it: cells that are compared have equal ones."""
        return dataclasses.replace(self, implementation="plain", compile="off")

    @property
    def sizes_label(self) -> str:
        """1×16×16384×64: batch, heads, sequence, dimension; 16/4 heads are 4 of keys and values, 1/512 positions are
        512 keys."""
        heads = f"{self.heads}" if self.num_kv_heads == self.heads else f"{self.heads}/{self.num_kv_heads}"
        length = f"{self.queries}" if self.num_keys == self.queries else f"{self.queries}/{self.num_keys}"
        return f"{self.batch}×{heads}×{length}×{self.dim}"

    @property
    def label(self) -> str:
        """1×16×16384×64 causal bf16."""
        return f"{self.sizes_label}{' causal' if self.causal else ''} {self.dtype}"

    @property
    def column(self) -> str:
        """Who computes it: 'plain', 'plain, compiled'."""
        if self.compile == "off":
            return self.implementation
        mode = "" if self.compile == "default" else f" ({self.compile})"
        return f"{self.implementation}, compiled{mode}"
