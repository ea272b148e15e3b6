"""One attention cell of a benchmark: its shape, its number format and its implementation."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from steplab.errors import UserError
from steplab.ops.attention.implementations import NAMES
from steplab.specs.step_choices import CompileMode
from steplab.specs.step_fields import Declared, declared_fields

AttentionDtype = Literal["fp32", "tf32", "bf16", "fp16"]
AttentionPass = Literal["forward", "backward", "both"]
PASSES: tuple[AttentionPass, ...] = get_args(AttentionPass)
"""forward: without gradients. backward: the backward pass alone, after an untimed forward pass. both: a forward and a
backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """One cell: queries of shape [batch, heads, queries, dim], keys and values of [batch, kv_heads, keys, dim]."""

    batch: Annotated[int, Declared(help="Sequences", least=1)] = 1
    heads: Annotated[int, Declared(help="Query heads", least=1)] = 1
    kv_heads: Annotated[
        int | None,
        Declared(
            help="Heads of keys and values, a divisor of the query heads",
            default_words="as many as there are query heads",
            least=1,
        ),
    ] = None
    queries: Annotated[int, Declared(help="Sequence length of the queries", least=1)] = 1024
    keys: Annotated[
        int | None,
        Declared(help="Sequence length of the keys and values", default_words="that of the queries", least=1),
    ] = None
    dim: Annotated[int, Declared(help="Head dimension", least=1)] = 64
    causal: Annotated[
        bool,
        Declared(
            help="Apply the causal mask: a query attends to keys up to its own position, both counted from the first",
            default_words="as the grid says, else no",
        ),
    ] = False
    dtype: Annotated[
        AttentionDtype,
        Declared(
            help="Number format",
            meanings={"fp32": "IEEE products", "tf32": "fp32 tensors, TF32 products"},
            default_words="bf16 on a GPU, else fp32",
        ),
    ] = "bf16"
    implementation: Annotated[
        str,
        Declared(help="Implementation of attention", choices=NAMES, default_words="those that suit the device"),
    ] = "plain"
    compile: Annotated[CompileMode, Declared(help="Mode of torch.compile, or off")] = "off"

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.heads if self.kv_heads is None else self.kv_heads)
        object.__setattr__(self, "keys", self.queries if self.keys is None else self.keys)
        for field in CELL_FIELDS:
            field.refuse_invalid(getattr(self, field.attribute))
        if self.heads % self.num_kv_heads:
            raise UserError(f"heads must be a multiple of kv-heads, not {self.heads} of {self.kv_heads}")

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


CELL_FIELDS = declared_fields(AttentionSpec)
"""The fields of a cell."""
