"""Which implementation is fastest on a device, for a type and a shape: by a committed table of measurements.

The table (attention_choice.toml) has times on the GPUs that it names, of forward and backward together. An unknown GPU
gets sdpa, torch's own choice, and never another GPU's best; so does a head dimension beyond the largest that was
measured, for which implementations have other kernels (flash_triton's backward pass from 129 on). It needs no torch.
"""

import math
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from .hopper_kernels import planned_on
from .implementations import DTYPES, TABLE, why_not

FALLBACK = "sdpa"
"""Where nothing was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An implementation, and why that one."""

    implementation: str
    """A name that attention() takes, never auto."""
    reason: str
    """Half a sentence: 'fastest of 4 on NVIDIA H200 at 1024 tokens (...)'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Times of several implementations on one GPU, for one type, head dimension and causality."""

    gpu: str
    """Name of the GPU, as torch gives it."""
    dtype: str
    """float32, bfloat16 or float16."""
    head_dim: int
    """The head dimension that was measured."""
    causal: bool
    """Whether with the causal mask."""
    source: str
    """Where the times are from, and with which versions."""
    implementations: tuple[str, ...]
    """The implementations that were measured, in the order of the times."""
    rows: tuple[tuple[float, ...], ...]
    """Tokens of a sequence, then milliseconds of forward and backward together of each implementation; inf: it could
    not be run."""

    def __post_init__(self) -> None:
        if not self.rows or any(len(row) != 1 + len(self.implementations) for row in self.rows):
            raise ValueError(f"attention_choice.toml: a row of {self.gpu} has not one time for each implementation")


def choose(
    *,
    device: str,
    dtype: str,
    head_dim: int,
    num_queries: int,
    num_keys: int,
    causal: bool,
    grouped: bool = False,
    hopper: bool | None = None,
) -> Choice:
    """The implementation that was fastest on this device for the nearest measured shape; sdpa where none is near.

    `device` is a GPU's name as torch gives it, or cpu, mps, ...; `dtype` is spelled as torch's: bfloat16. `grouped`:
    several query heads read one key head, which torch's memory-efficient kernel does not take. The length that counts
    is the geometric mean of queries and keys: the work goes by their product. `hopper`: whether flash_triton's kernels
    for Hopper run there; None: as a plan assumes. The portable ones are slower than cuDNN, so without the former it is
    no candidate in 16 bits. Raises ValueError for another dtype, and for a head dimension below 1.
    """
    if dtype not in DTYPES or head_dim < 1:
        taken = f"one of {', '.join(DTYPES)} and a head dimension of 1 or more"
        raise ValueError(f"attention is chosen for {taken}, not for {dtype} and {head_dim}")
    portable = dtype != "float32" and not (planned_on(device) if hopper is None else hopper)
    return choose_from(
        table(),
        device=device,
        dtype=dtype,
        head_dim=head_dim,
        tokens=math.sqrt(max(num_queries, 1) * max(num_keys, 1)),
        causal=causal,
        without=unfit(
            dtype=dtype,
            head_dim=head_dim,
            num_queries=num_queries,
            num_keys=num_keys,
            causal=causal,
            grouped=grouped,
        )
        | ({"flash_triton"} if portable else set()),
    )


def unfit(
    *, dtype: str, head_dim: int, num_queries: int, num_keys: int, causal: bool, grouped: bool = False
) -> set[str]:
    """Implementations that do not take such inputs on every GPU: the nearest shape, which they took, says nothing."""
    return {
        row.name
        for row in TABLE
        if why_not(
            row.name,
            device="cuda",
            dtype=DTYPES.get(dtype, dtype),
            head_dim=head_dim,
            num_queries=num_queries,
            num_keys=num_keys,
            causal=causal,
            grouped=grouped,
            on_every_gpu=True,
        )
    }


def choose_from(
    measured: tuple[Measured, ...],
    *,
    device: str,
    dtype: str,
    head_dim: int,
    tokens: float,
    causal: bool,
    without: set[str],
) -> Choice:
    """The same from a table of one's own, and without some of it.

    Nearness is by factors: 96 columns are nearer to 128 than to 64. Beyond the largest head dimension of the table
    nothing is near.
    """
    of_gpu = [m for m in measured if m.gpu == device and m.dtype == dtype and m.causal == causal]
    widest = max((m.head_dim for m in of_gpu), default=0)
    if not of_gpu or head_dim > widest:
        kind = "causal" if causal else "full"
        beyond = f", beyond head dimension {widest}" if of_gpu else ""
        reason = f"nothing was measured on {device} for {dtype}, {kind}{beyond}"
        return Choice(implementation=FALLBACK, reason=reason)
    nearest = min(of_gpu, key=lambda m: abs(math.log(m.head_dim / head_dim)))
    row = min(nearest.rows, key=lambda row: abs(math.log(row[0] / tokens)))
    times = {name: ms for name, ms in zip(nearest.implementations, row[1:], strict=True) if name not in without}
    best = min(times, key=lambda name: times[name], default=None)
    if best is None or math.isinf(times[best]):
        return Choice(implementation=FALLBACK, reason=f"nothing that was measured on {device} takes such inputs")
    num_run = sum(map(math.isfinite, times.values()))
    reason = (
        f"fastest of {num_run} on {device} at {row[0]:.0f} tokens, head dimension {nearest.head_dim}, {dtype} "
        f"({nearest.source})"
    )
    return Choice(implementation=best, reason=reason)


@cache
def table() -> tuple[Measured, ...]:
    """The committed measurements."""
    text = files(__package__).joinpath("attention_choice.toml").read_text(encoding="utf-8")
    return tuple(
        Measured(
            **{
                **entry,
                "implementations": tuple(entry["implementations"]),
                "rows": tuple(map(tuple, entry["rows"])),
            }
        )
        for entry in tomllib.loads(text)["measured"]
    )
