"""Looks up the kernel and its tiles for a GPU and a shape in a committed table; nothing is tuned at first use.

The table (triton_tiles.toml) has rows for GPUs by name, for a compute capability ("sm90"), and for "any" GPU, in this
order of preference. `python -m benchmarks.tune_attention` measures candidates and writes the rows of the present GPU.
"""

import math
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

import torch

from ..errors import Unsupported
from .triton_tensors import columns
from .triton_trial import hopper_kernels_run, known_to_run

Kernel = Literal["forward", "backward", "backward_kv", "backward_q"]
Variant = Literal["hopper", "portable"]
TABLE = "triton_tiles.toml"
WIDEST_TILE = 128
"""Most queries of any tile; data kept for each query is padded to a multiple of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    kernel: Kernel
    """backward makes all gradients in one sweep; backward_kv and backward_q are two sweeps."""
    gpu: str
    """A GPU's name in torch, a compute capability such as sm90, or any."""
    bits: int
    """Bits of an element: 16 or 32."""
    box: int
    """Columns of a tile: the power of two that holds the head dimension."""
    columns: int | None = None
    """Largest head dimension for this row; None if any that `box` holds."""
    tokens: int | None = None
    """Longest sequence for this row; None if any."""
    variant: Variant
    queries: int
    keys: int
    stages: int
    """Tiles that load at the same time."""
    warps: int = 4
    """Warps of a program; the Hopper kernels fix theirs by role."""


def tiles_for(kernel: Kernel, x: torch.Tensor, tokens: int) -> Tiles:
    """The tiles of a kernel for tensors like x [..., D]. Raises Unsupported if the table has no row."""
    bits, head_dim = x.element_size() * 8, x.shape[-1]
    found = tiles_if_any(kernel, x.device, bits, head_dim, tokens)
    if found is None:
        why = f"{TABLE} has no {kernel} for {head_dim} columns of {bits} bits"
        raise Unsupported(f"attention 'flash_triton' on {_gpu(x.device)[0]}", why, "choose sdpa")
    return found


def tiles_if_any(kernel: Kernel, device: torch.device, bits: int, head_dim: int, tokens: int) -> Tiles | None:
    hopper = bits == 16 and hopper_kernels_on(device, head_dim)
    return _found(kernel, *_gpu(device), hopper, bits, head_dim, tokens)


def hopper_kernels_on(device: torch.device, head_dim: int = 64) -> bool:
    return _gpu(device)[1] == (9, 0) and hopper_kernels_run(head_dim)


def kernels_known(device: torch.device) -> Variant | None:
    """The kernels that a GPU runs in 16 bits, without a trial; None if unknown before flash_triton has run."""
    if _gpu(device)[1] != (9, 0):
        return "portable"
    runs = known_to_run()
    return None if runs is None else "hopper" if runs else "portable"


@cache
def _gpu(device: torch.device) -> tuple[str, tuple[int, int]]:
    if device.type != "cuda":
        return "cpu", (0, 0)
    return torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)


@cache
def _found(
    kernel: Kernel, name: str, capability: tuple[int, int], hopper: bool, bits: int, head_dim: int, tokens: int
) -> Tiles | None:
    rows = [row for row in table() if (row.kernel, row.bits, row.box) == (kernel, bits, columns(head_dim).box)]
    rows = [row for row in rows if head_dim <= _most(row.columns) and tokens <= _most(row.tokens)]
    if not hopper:
        rows = [row for row in rows if row.variant == "portable"]
    for gpu in (name, f"sm{capability[0]}{capability[1]}", "any"):
        of_gpu = [row for row in rows if row.gpu == gpu]
        if of_gpu:
            return min(of_gpu, key=lambda row: (_most(row.columns), _most(row.tokens)))
    return None


def _most(stated: int | None) -> float:
    return math.inf if stated is None else stated


@cache
def table() -> tuple[Tiles, ...]:
    return read_table(files(__package__).joinpath(TABLE).read_text(encoding="utf-8"))


def read_table(text: str) -> tuple[Tiles, ...]:
    return tuple(Tiles(**row) for row in tomllib.loads(text)["tiles"])
