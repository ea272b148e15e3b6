"""Which tiles of flash_triton's kernels are tried on a GPU, and on which shapes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from steplab.errors import UserError
from steplab.specs.attention import AttentionSpec

TunedKernel = Literal["forward", "backward_kv", "backward_q"]
KERNELS: tuple[TunedKernel, ...] = get_args(TunedKernel)
"""forward; the backward sweep that sums dK and dV; the one that sums dQ."""
WIDEST = 256
"""Largest head dimension of these kernels."""
SHORT, LONG = 1024, 8192
"""Tokens of the sequences that are timed."""
TOKENS_OF_ALL = 65_536
"""Of a batch together."""
HEADS = 4
"""Of each sequence; the kernel is compiled for a number that is no multiple of 16, like most models' (12, 20, 25)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TileCandidate:
    """One way to start a kernel, as a row of triton_tiles.toml has it."""

    kernel: TunedKernel
    """Which of the three."""
    variant: Literal["hopper", "portable"]
    """Which implementation of it."""
    bits: int = 16
    """Of a number: 16 or 32."""
    box: int
    """Columns of a tile: the power of two that holds the head dimension."""
    queries: int
    """Queries of a tile."""
    keys: int
    """Keys of a tile."""
    stages: int
    """Tiles on their way at a time."""
    warps: int = 4
    """Warps of a program of the portable kernels."""
    persistent: bool = False
    """Whether a program a multiprocessor takes one task after another (the Hopper kernels alone)."""

    @property
    def label(self) -> str:
        """hopper 128×64, 3 stages."""
        stages = f"{self.stages} stage{'s' if self.stages > 1 else ''}"
        warps = f", {self.warps} warps" if self.variant == "portable" else ""
        return f"{self.variant} {self.queries}×{self.keys}, {stages}{warps}{', persistent' if self.persistent else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningStudy:
    """What is to be tuned."""

    head_dims: tuple[int, ...] = (64, 80, 128)
    """Those of one box (80 and 128) choose their tiles together."""
    portable: bool = False
    """Whether the portable kernels are tried where the GPU has others of its own as well."""
    device: str = "auto"
    """auto, cuda or cuda:N."""

    def __post_init__(self) -> None:
        if not self.head_dims:
            raise UserError("no head dimension to tune; give at least one, as in --dim 64,128")
        for head_dim in self.head_dims:
            if not 1 <= head_dim <= WIDEST:
                raise UserError(f"flash_triton has head dimensions from 1 to {WIDEST}, not {head_dim}")


def box_of(head_dim: int) -> int:
    """Columns of the tiles that hold a head dimension."""
    return max(16, 1 << (head_dim - 1).bit_length())


def timed_shapes(head_dim: int) -> tuple[AttentionSpec, ...]:
    """Short and long sequences, whole and causal."""
    return tuple(
        AttentionSpec(batch=TOKENS_OF_ALL // tokens, heads=HEADS, queries=tokens, dim=head_dim, causal=causal)
        for tokens in (SHORT, LONG)
        for causal in (True, False)
    )


def candidates(box: int, *, hopper: bool, portable: bool) -> tuple[TileCandidate, ...]:
    """What is tried for a box: `hopper`, the GPU runs the Hopper kernels; `portable`, the others are tried even so.

    Not all will fit: shared memory is the GPU's to know.
    """
    of_hopper = tuple(_of_hopper(box)) if hopper else ()
    served = {candidate.kernel for candidate in of_hopper}
    others = tuple(candidate for candidate in _portable(box) if portable or candidate.kernel not in served)
    return of_hopper + others


def _of_hopper(box: int) -> Iterator[TileCandidate]:
    for stages in (2, 3, 4):
        for keys in (64, 128):
            for persistent in (False, True):
                yield TileCandidate(
                    kernel="forward",
                    variant="hopper",
                    box=box,
                    queries=128,
                    keys=keys,
                    stages=stages,
                    persistent=persistent,
                )
        if box < WIDEST:  # keys, values and both gradients 256 wide are more than a multiprocessor has room for
            yield TileCandidate(kernel="backward_kv", variant="hopper", box=box, queries=64, keys=128, stages=stages)
            for keys in (64, 128):
                yield TileCandidate(
                    kernel="backward_q", variant="hopper", box=box, queries=128, keys=keys, stages=stages
                )


_FORWARD = ((64, 64, 2, 4), (64, 64, 3, 4), (128, 64, 2, 4), (128, 64, 3, 4), (64, 128, 2, 4), (128, 128, 2, 8))
_BACKWARD = tuple(
    (queries, keys, stages, warps)
    for queries, keys, warps in ((64, 64, 4), (128, 64, 8), (64, 128, 8))
    for stages in (1, 2, 3)
)
_WIDE_FORWARD = ((64, 32, 2, 4), (64, 64, 2, 8), (128, 32, 2, 8))
_WIDE_BACKWARD = ((32, 32, 1, 4), (32, 64, 1, 8), (64, 32, 1, 8), (64, 64, 1, 8))
"""Queries, keys, stages, warps."""


def _portable(box: int) -> Iterator[TileCandidate]:
    wide = box >= WIDEST
    for kernel in KERNELS:
        sizes = (_WIDE_FORWARD if wide else _FORWARD) if kernel == "forward" else _WIDE_BACKWARD if wide else _BACKWARD
        for queries, keys, stages, warps in sizes:
            yield TileCandidate(
                kernel=kernel, variant="portable", box=box, queries=queries, keys=keys, stages=stages, warps=warps
            )
