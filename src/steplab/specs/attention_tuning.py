"""The tile sizes of flash_triton's kernels that tuning tries on a GPU, and the shapes it times them on."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from steplab.errors import UserError
from steplab.ops.attention.implementations import implementation
from steplab.specs.attention import AttentionSpec
from steplab.specs.device import check_device

TunedKernel = Literal["forward", "backward_kv", "backward_q"]
KERNELS: tuple[TunedKernel, ...] = get_args(TunedKernel)
"""forward: the forward pass. backward_kv: the backward sweep that sums dK and dV. backward_q: the one that sums dQ."""
TunedDtype = Literal["bf16", "fp32"]
DTYPES: tuple[TunedDtype, ...] = get_args(TunedDtype)
WIDEST = implementation("flash_triton").widest or 0
"""Largest head dimension that these kernels support."""
LENGTHS: dict[TunedDtype, tuple[int, int]] = {"bf16": (1024, 8192), "fp32": (1024, 4096)}
"""Lengths in tokens of the short and of the long sequences that are timed."""
TOKENS_OF_ALL: dict[TunedDtype, int] = {"bf16": 65_536, "fp32": 8_192}
"""Tokens in a batch; fewer for fp32, whose products do not use tensor cores and take about 100 times as long."""
HEADS = 4
"""Heads per sequence; like most models' (12, 20, 25) no multiple of 16, for which the kernel would be specialised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TileCandidate:
    """Launch parameters of a kernel, as in a row of triton_tiles.toml."""

    kernel: TunedKernel
    """The kernel: forward, backward_kv or backward_q."""
    variant: Literal["hopper", "portable"]
    """Implementation of the kernel."""
    bits: int = 16
    """Bits per number: 16 or 32."""
    box: int
    """Columns of a tile: the smallest power of two that holds the head dimension."""
    queries: int
    """Queries in a tile."""
    keys: int
    """Keys in a tile."""
    stages: int
    """Pipeline stages: tiles that are loaded at the same time."""
    warps: int = 4
    """Warps per program; applies to the portable kernels only."""
    persistent: bool = False
    """In records of the Hopper kernels that could be started otherwise: whether a program a multiprocessor took one
    task after another, which all do now."""

    def row(self) -> dict[str, Any]:
        """Its values in a row of triton_tiles.toml, which says of persistent programs nothing any more."""
        return {name: value for name, value in asdict(self).items() if name != "persistent"}

    @property
    def label(self) -> str:
        """Launch parameters in words, such as 'hopper 128×64, 3 stages'."""
        stages = f"{self.stages} stage{'s' if self.stages > 1 else ''}"
        warps = f", {self.warps} warps" if self.variant == "portable" else ""
        return f"{self.variant} {self.queries}×{self.keys}, {stages}{warps}{', persistent' if self.persistent else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningStudy:
    """The head dimensions and number format to tune tiles for."""

    head_dims: tuple[int, ...] = (64, 80, 128)
    """Head dimensions; those with the same tile width (80 and 128) are tuned together."""
    dtype: TunedDtype = "bf16"
    """bf16: tiles for 16-bit numbers, also used for fp16. fp32: tiles for 32-bit numbers, timed with IEEE products."""
    portable: bool = False
    """Whether the portable kernels are tried even on a GPU that runs the Hopper kernels."""
    device: str = "auto"
    """The device: auto, cuda or cuda:N."""

    def __post_init__(self) -> None:
        if not self.head_dims:
            raise UserError("no head dimension to tune; give at least one, as in --dim 64,128")
        for head_dim in self.head_dims:
            if not 1 <= head_dim <= WIDEST:
                raise UserError(f"head dimension must be from 1 to {WIDEST} for flash_triton, not {head_dim}")
        check_device(self.device)
        if self.device in ("cpu", "mps"):
            raise UserError(f"tiles are tuned on a CUDA GPU, not on {self.device}; use --device auto, cuda or cuda:N")
        if self.dtype not in DTYPES:
            known = "bf16, whose tiles serve fp16 too, or fp32"
            raise UserError(f"tiles are not tuned in '{self.dtype}'; choose {known}")

    @property
    def bits(self) -> int:
        """Bits per number: 16 or 32."""
        return 32 if self.dtype == "fp32" else 16

    @property
    def lengths(self) -> tuple[int, int]:
        """Lengths in tokens of the short and of the long sequences that are timed."""
        return LENGTHS[self.dtype]


def box_of(head_dim: int) -> int:
    """Columns of the tile that holds a head dimension."""
    return max(16, 1 << (head_dim - 1).bit_length())


def timed_shapes(head_dim: int, dtype: TunedDtype = "bf16") -> tuple[AttentionSpec, ...]:
    """The shapes to time: short and long sequences, with and without a causal mask."""
    batches = {tokens: TOKENS_OF_ALL[dtype] // tokens for tokens in LENGTHS[dtype]}
    return tuple(
        AttentionSpec(batch=batch, heads=HEADS, queries=tokens, dim=head_dim, causal=causal, dtype=dtype)
        for tokens, batch in batches.items()
        for causal in (True, False)
    )


def candidates(box: int, *, bits: int = 16, hopper: bool, portable: bool) -> tuple[TileCandidate, ...]:
    """The candidates for a tile width.

    hopper: whether the GPU runs the Hopper kernels. portable: whether the portable kernels are tried even then.

    The Hopper kernels take 16-bit numbers only. A candidate may need more shared memory than the GPU has.
    """
    if bits == 32:
        return tuple(_of_32_bits(box))
    of_hopper = tuple(_of_hopper(box)) if hopper else ()
    # Up to 128 columns the backward kernel for Hopper has one size, which its registers decide.
    served = ({"forward"} if box >= WIDEST else set(KERNELS)) if hopper else set()
    others = tuple(candidate for candidate in _portable(box) if portable or candidate.kernel not in served)
    return of_hopper + others


def _of_hopper(box: int) -> Iterator[TileCandidate]:
    for queries in (128, 192) if box <= 64 else (128,):  # three groups of warps have registers for narrow sums alone
        for stages in (2, 3, 4):
            for keys in (64, 128):
                yield TileCandidate(
                    kernel="forward", variant="hopper", box=box, queries=queries, keys=keys, stages=stages
                )


_FORWARD = ((64, 64, 2, 4), (64, 64, 3, 4), (128, 64, 2, 4), (128, 64, 3, 4), (64, 128, 2, 4), (128, 128, 2, 8))
_BACKWARD = tuple(
    (queries, keys, stages, warps)
    for queries, keys, warps in ((64, 64, 4), (128, 64, 8), (64, 128, 8))
    for stages in (1, 2, 3)
)
_WIDE_FORWARD = ((64, 32, 2, 4), (64, 64, 2, 8), (128, 32, 2, 8))
_WIDE_BACKWARD = ((32, 32, 1, 4), (32, 64, 1, 8), (64, 32, 1, 8), (64, 64, 1, 8))
"""Queries, keys, stages and warps of each candidate."""


def _portable(box: int) -> Iterator[TileCandidate]:
    wide = box >= WIDEST
    for kernel in KERNELS:
        sizes = (_WIDE_FORWARD if wide else _FORWARD) if kernel == "forward" else _WIDE_BACKWARD if wide else _BACKWARD
        for queries, keys, stages, warps in sizes:
            yield TileCandidate(
                kernel=kernel, variant="portable", box=box, queries=queries, keys=keys, stages=stages, warps=warps
            )


_FORWARD_32 = (
    *((16, 16, 4), (32, 32, 4), (32, 64, 4), (64, 16, 4), (64, 32, 4)),
    *((32, 32, 8), (64, 32, 8), (64, 64, 8), (128, 32, 8), (128, 64, 8)),
)
_BACKWARD_32 = (
    *((16, 16, 4), (16, 32, 4), (32, 16, 4), (32, 32, 4)),
    *((16, 16, 8), (32, 32, 8), (32, 64, 8), (64, 32, 8), (64, 64, 16)),
)
_SIZES_32 = {
    "forward": _FORWARD_32,
    "backward_kv": (*_BACKWARD_32, (16, 64, 4), (16, 64, 8)),
    "backward_q": (*_BACKWARD_32, (64, 16, 4), (64, 16, 8)),
}
"""Queries, keys and warps of each candidate."""
_MOST_OF_A_THREAD = {"forward": 2048, "backward_kv": 512, "backward_q": 512}
"""Most multiply-adds per thread for one product of tiles. Without tensor cores each is an instruction of its own: with
more of them a kernel takes tens of seconds to compile and spills most of its sums from registers to memory."""


def _of_32_bits(box: int) -> Iterator[TileCandidate]:
    for kernel in KERNELS:
        for queries, keys, warps in _SIZES_32[kernel]:
            if queries * keys * box <= _MOST_OF_A_THREAD[kernel] * 32 * warps:
                yield TileCandidate(
                    kernel=kernel,
                    variant="portable",
                    bits=32,
                    box=box,
                    queries=queries,
                    keys=keys,
                    stages=1,
                    warps=warps,
                )
