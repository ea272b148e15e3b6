"""One attention cell of a benchmark: its shape, its number format and its implementation."""

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from steplab.errors import UserError
from steplab.specs.step import CHOICES, CompileMode
from steplab.specs.step_fields import LARGEST

AttentionDtype = Literal["fp32", "tf32", "bf16", "fp16"]
AttentionPass = Literal["forward", "backward", "both"]
PASSES: tuple[AttentionPass, ...] = get_args(AttentionPass)
"""forward: without gradients. backward: the backward pass alone, after an untimed forward pass. both: a forward and a
backward pass."""
DTYPES: tuple[str, ...] = get_args(AttentionDtype)
SIZES = ("batch", "heads", "kv_heads", "queries", "keys", "dim")
"""The fields that are sizes, from the outermost dimension to the innermost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """One cell: queries of shape [batch, heads, queries, dim], keys and values of [batch, kv_heads, keys, dim]."""

    batch: int = 1
    """Sequences."""
    heads: int = 1
    """Number of query heads."""
    kv_heads: int | None = None
    """Number of key and value heads, a divisor of `heads`; None: as many as `heads`."""
    queries: int = 1024
    """Number of query positions."""
    keys: int | None = None
    """Number of key positions; None: as many as `queries`."""
    dim: int = 64
    """Dimension of a head."""
    causal: bool = False
    """Whether a query attends only to keys up to its own position; both positions count from the first."""
    dtype: AttentionDtype = "bf16"
    """fp32: IEEE products. tf32: fp32 tensors, TF32 products. bf16, fp16: tensors of that type."""
    implementation: str = "plain"
    """A name of steplab.ops.attention."""
    compile: CompileMode = "off"
    """The mode of torch.compile; off: not compiled."""

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
        """Number of key and value heads; equals `heads` where `kv_heads` was not given."""
        return self.kv_heads or self.heads

    @property
    def num_keys(self) -> int:
        """Number of key positions; equals `queries` if `keys` was not given."""
        return self.keys or self.queries

    @property
    def shape(self) -> "AttentionSpec":
        """The spec with implementation and compile mode left out: equal for cells that may be compared."""
        return dataclasses.replace(self, implementation="plain", compile="off")

    @property
    def sizes_label(self) -> str:
        """batch×heads×sequence×dimension, such as 1×16×16384×64.

        16/4 heads means 4 key and value heads; 1/512 positions means 1 query and 512 keys.
        """
        heads = f"{self.heads}" if self.num_kv_heads == self.heads else f"{self.heads}/{self.num_kv_heads}"
        length = f"{self.queries}" if self.num_keys == self.queries else f"{self.queries}/{self.num_keys}"
        return f"{self.batch}×{heads}×{length}×{self.dim}"

    @property
    def label(self) -> str:
        """Sizes, mask and number format, such as 1×16×16384×64 causal bf16."""
        return f"{self.sizes_label}{' causal' if self.causal else ''} {self.dtype}"

    @property
    def column(self) -> str:
        """Implementation and compile mode as a column's header, such as 'plain' or 'plain, compiled'."""
        if self.compile == "off":
            return self.implementation
        mode = "" if self.compile == "default" else f" ({self.compile})"
        return f"{self.implementation}, compiled{mode}"
