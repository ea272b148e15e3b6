"""A benchmark of attention. A cell is a shape, dtype, implementation and compile mode.

Cells come from a preset grid, a TOML file, or lists of values. A TOML grid has a description and `[[grid]]` tables,
each a product of lists. `sequence` sets both queries and keys.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import msgspec

from steplab.errors import UserError
from steplab.ops.attention.implementations import NAMES
from steplab.specs.benchmark import DEVICE, Benchmark
from steplab.specs.resolve import Grid, as_grid, cells_of_grids, products
from steplab.specs.step_choices import CompileMode
from steplab.specs.step_fields import Declared, check_declared, declared_fields, parse_declared
from steplab.specs.study import GRIDS, content_of

AttentionDtype = Literal["fp32", "tf32", "bf16", "fp16"]
AttentionPass = Literal["forward", "backward", "both"]
PASSES: tuple[AttentionPass, ...] = get_args(AttentionPass)
"""Passes to time. forward: without gradients. backward: without its untimed forward pass. both: a forward and a
backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """One cell: queries of shape [batch, heads, queries, dim]; keys and values of [batch, kv_heads, keys, dim]."""

    batch: int = Declared(help="Sequences", least=1).field(1)
    heads: int = Declared(help="Query heads", least=1).field(1)
    kv_heads: int | None = Declared(
        help="Heads of keys and values, a divisor of the query heads",
        default_words="as many as there are query heads",
        least=1,
    ).field(None)
    queries: int = Declared(help="Sequence length of the queries", least=1).field(1024)
    keys: int | None = Declared(
        help="Sequence length of the keys and values", default_words="the queries'", least=1
    ).field(None)
    dim: int = Declared(help="Head dimension", least=1).field(64)
    causal: bool = Declared(
        help="Apply the causal mask: a query attends to keys up to its own position, both counted from the first",
        default_words="the grid's, else no",
    ).field(False)
    dtype: AttentionDtype = Declared(
        help="Number format",
        meanings={"fp32": "IEEE products", "tf32": "fp32 tensors, TF32 products"},
        default_words="bf16 on a GPU, else fp32",
    ).field("bf16")
    implementation: str = Declared(
        help="Implementation of attention", choices=NAMES, default_words="those that suit the device"
    ).field("plain")
    compile: CompileMode = Declared(help="Mode of torch.compile, or off").field("off")

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.heads if self.kv_heads is None else self.kv_heads)
        object.__setattr__(self, "keys", self.queries if self.keys is None else self.keys)
        check_declared(CELL_FIELDS, self)
        if self.heads % self.num_kv_heads:
            raise UserError(f"heads must be a multiple of kv-heads, not {self.heads} of {self.kv_heads}")

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def num_keys(self) -> int:
        return self.keys or self.queries

    @property
    def shape(self) -> "AttentionSpec":
        """Copy with default implementation and compile mode; it is equal for comparable cells."""
        return dataclasses.replace(self, implementation="plain", compile="off")

    @property
    def sizes_label(self) -> str:
        """batch×heads×sequence×dim, such as 1×16×16384×64. Heads 16/4: 4 key and value heads. Sequence 1/512: 1 query,
        512 keys."""
        heads = f"{self.heads}" if self.num_kv_heads == self.heads else f"{self.heads}/{self.num_kv_heads}"
        length = f"{self.queries}" if self.num_keys == self.queries else f"{self.queries}/{self.num_keys}"
        return f"{self.batch}×{heads}×{length}×{self.dim}"

    @property
    def label(self) -> str:
        return f"{self.sizes_label}{' causal' if self.causal else ''} {self.dtype}"

    @property
    def column(self) -> str:
        if self.compile == "off":
            return self.implementation
        mode = "" if self.compile == "default" else f" ({self.compile})"
        return f"{self.implementation}, compiled{mode}"


CELL_FIELDS = declared_fields(AttentionSpec)


_PLACE = next(place for place, field in enumerate(CELL_FIELDS) if field.key == "queries")
_SEQUENCE = replace(
    CELL_FIELDS[_PLACE],
    key="sequence",
    attribute="sequence",
    about=Declared(help="Sequence length of both queries and keys"),
)
FIELDS = {field.key: field for field in (*CELL_FIELDS[:_PLACE], _SEQUENCE, *CELL_FIELDS[_PLACE:])}
"""A grid's fields by name, in the order of options; the first varies slowest. `sequence` is the default of `queries`
and `keys`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionOptions:
    """Options of `steplab attention` outside cells."""

    grid: str | None = Declared(
        help="Preset (peers, study, long, choice, tiny) or TOML file", default_words="peers on a GPU, else tiny"
    ).field(None)
    passes: Sequence[str] = Declared(help="Passes to time", key="pass").field(PASSES)
    repeats: int | None = Declared(
        help="Samples of each pass", default_words="10 to 100, by its duration", least=1
    ).field(None)
    errors: bool = Declared(help="Measure the error of each result against float64").field(True)
    device: str = DEVICE.field("auto")
    """The device of all cells."""
    seed: int = Declared(help="Seed of the random inputs", least=-(2**63)).field(0)


ATTENTION = Benchmark(name="attention", what="attention alone", timeout="10min", cells=FIELDS, options=AttentionOptions)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionStudy:
    """Attention cells to measure, with timing and checks."""

    name: str
    """Name of the grid; 'attention' for cells given on the command line."""
    description: str = ""
    """Purpose of the grid, in one line."""
    cells: tuple[AttentionSpec, ...]
    """The cells without duplicates; cells of equal shape are adjacent and are measured together."""
    passes: tuple[AttentionPass, ...] = PASSES
    """The passes that are timed."""
    device: str = "auto"
    """The device: auto, cpu, mps, cuda or cuda:N."""
    warmup_s: float = 0.1
    """Shortest warm-up of each cell and pass, in seconds; at least three calls run."""
    measured_s: float = 0.3
    """Time for the repeats of a cell and pass, in seconds; `least_repeats` and `most_repeats` bound their number."""
    least_repeats: int = 10
    """Smallest number of repeats, however long they take."""
    most_repeats: int = 100
    """Largest number of repeats, however short they are."""
    errors: bool = True
    """True to compare results with a float64 reference."""
    seed: int = 0
    """Seed of the random inputs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cells", tuple(cell for group in self.groups() for cell in group))

    def groups(self) -> list[tuple[AttentionSpec, ...]]:
        found: dict[AttentionSpec, list[AttentionSpec]] = {}
        for cell in self.cells:
            found.setdefault(cell.shape, []).append(cell)
        return [tuple(cells) for cells in found.values()]


class _File(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    description: str = ""
    grid: list[dict[str, Any]] = []


def cells_of_grid(
    source: str, overrides: Grid, defaults: Grid = MappingProxyType({})
) -> tuple[str, str, tuple[AttentionSpec, ...]]:
    """Name, description and cells of a preset grid or a TOML file. `overrides` replace its fields, `defaults` fill
    missing ones. Raises UserError for an unknown or invalid grid."""
    content = content_of("grid", source, GRIDS, _File)
    cells = cells_of([{**defaults, **_overridden(grid, overrides)} for grid in content.grid])
    return Path(source).stem, content.description, cells


def _overridden(grid: Mapping[str, object], overrides: Grid) -> dict[str, Sequence[object]]:
    lists = as_grid(grid)
    if "sequence" in overrides:
        lists.pop("queries", None)
        lists.pop("keys", None)
    if "queries" in overrides or "keys" in overrides:
        lists.pop("sequence", None)
    return {**lists, **overrides}


def cells_of(grids: Sequence[Grid]) -> tuple[AttentionSpec, ...]:
    """Cells of all grids; the first field varies slowest. Raises UserError without cells."""
    cells = cells_of_grids(grids, lambda grid: map(resolve_attention, products(grid)))
    if not cells:
        raise UserError("no cells to measure; give each field of the grid at least one value")
    return cells


def resolve_attention(fields: Mapping[str, object]) -> AttentionSpec:
    """The cell. Raises UserError with an invalid field, its value and the valid ones."""
    found = parse_declared(fields, FIELDS, " of an attention cell")
    if "sequence" in found:
        found = dict.fromkeys(("queries", "keys"), found.pop("sequence")) | found
    return AttentionSpec(**found)
