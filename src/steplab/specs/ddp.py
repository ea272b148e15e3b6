"""The data-parallel study: one step, and the ways of keeping ranks together that are set side by side on it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from steplab.errors import UserError
from steplab.specs.layout import SINGLE
from steplab.specs.step import StepSpec

Kind = Literal["none", "naive", "flat", "overlap", "bucketed", "torch_ddp", "sharded", "fsdp2"]
KINDS: tuple[str, ...] = get_args(Kind)
WITH_BUCKETS = ("bucketed", "torch_ddp", "sharded")
"""Those that have a bucket size."""
WITH_TRANSPORT = ("bucketed", "sharded")
"""Those whose gradients can travel by more than one way."""
OWN = ("naive", "flat", "overlap", *WITH_TRANSPORT)
"""Those whose gradients steplab.parallel.DataParallel averages."""
COLLECTIVES = "collectives"
"""The transport that works everywhere."""
TRANSPORTS = (COLLECTIVES, "peer_copy")
"""Ways that gradients travel, by DataParallel's names for them."""
_SIZED = ("bucketed", "torch_ddp")
"""Those that stand once for each of the study's bucket sizes."""
DEFAULT_BUCKET_MB = 25.0
BYTES_PER_MB = 1e6
STUDY_BUCKETS_MB = (1.0, 10.0, 100.0, 1000.0)
SMALL_BUCKETS_MB = (0.1, 1.0, 10.0)
"""For the tiny model, whose gradients are 3 MB."""
_WORDS = {
    "none": "no communication",
    "naive": "naive",
    "flat": "flat",
    "overlap": "overlap",
    "bucketed": "bucketed",
    "torch_ddp": "torch DDP",
    "sharded": "sharded",
    "fsdp2": "FSDP2",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way in which data-parallel ranks average their gradients."""

    kind: Kind
    """none: ranks do not communicate. naive, flat, overlap, bucketed: DataParallel's strategies. torch_ddp:
    DistributedDataParallel. sharded: bucketed, with ShardedOptimizer. fsdp2: torch's fully_shard, block by block."""
    bucket_size_mb: float | None = None
    """Gradients that travel together, in 1e6 bytes; None for kinds that have no such size."""
    transport: str | None = None
    """How bucketed gradients travel, as DataParallel names it; None for kinds that have no choice."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"variant '{self.kind}' is not known; choose some of {', '.join(KINDS)}")
        if self.kind not in WITH_BUCKETS:
            if self.bucket_size_mb is not None:
                raise UserError(f"{self.kind} has no bucket size; those that have are {', '.join(WITH_BUCKETS)}")
        elif self.bucket_size_mb is None:
            object.__setattr__(self, "bucket_size_mb", DEFAULT_BUCKET_MB)
        elif not 0 < self.bucket_size_mb < float("inf"):
            raise UserError(f"a bucket of {self.bucket_size_mb} MB holds nothing; give a positive size in MB")
        if self.kind not in WITH_TRANSPORT:
            if self.transport is not None:
                raise UserError(
                    f"{self.kind} has no choice of transport; those that have are {', '.join(WITH_TRANSPORT)}"
                )
        elif self.transport is None:
            object.__setattr__(self, "transport", COLLECTIVES)
        elif self.transport not in TRANSPORTS:
            raise UserError(f"transport '{self.transport}' is not known; choose some of {', '.join(TRANSPORTS)}")

    @property
    def family(self) -> str:
        """What it is called without its bucket size."""
        other = self.transport is not None and self.transport != COLLECTIVES
        return f"{_WORDS[self.kind]}, {self.transport}" if other else _WORDS[self.kind]

    @property
    def label(self) -> str:
        """What tells it from the others: bucketed 25 MB."""
        size = f" {self.bucket_size_mb:g} MB" if self.bucket_size_mb is not None else ""
        other = f", {self.transport}" if self.transport not in (None, COLLECTIVES) else ""
        return f"{_WORDS[self.kind]}{size}{other}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpStudy:
    """What is set side by side, and how it is measured."""

    step: StepSpec
    """The step of each rank: `batch` sequences a rank; `warmup` and `steps` are those of each variant."""
    processes: int = 2
    """Ranks."""
    compile: Literal["off", "block"] = "off"
    """Read from records of before a step's own `compile` could be block, and put there."""
    contenders: tuple[Variant, ...]
    """In the order they are measured, without duplicates; `none`, which they are compared with, is put first."""
    turn: int = 5
    """Steps of a variant before it is the baseline's turn again."""
    profiled_steps: int = 2
    """Steps more of each variant under a profiler, once it is timed; 0: no traces and no pictures of them."""
    repeats: int = 10
    """How often its communication is timed by itself."""

    def __post_init__(self) -> None:
        for name, least in (("processes", 2), ("turn", 1), ("profiled_steps", 0), ("repeats", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name.replace('_', ' ')} must be at least {least}, not {getattr(self, name)}")
        if self.compile != "off":
            object.__setattr__(self, "step", replace(self.step, compile=self.compile))
            object.__setattr__(self, "compile", "off")
        if self.step.compile not in ("off", "block"):
            raise UserError(
                f"compile '{self.step.compile}' is not compared here, for a model compiled as a whole gives all its "
                "gradients at the end; choose one of off, block"
            )
        if self.step.pass_name != "train":
            raise UserError(f"pass '{self.step.pass_name}' has no gradients to send and no optimizer; use --pass train")
        if self.step.layout != SINGLE:
            raise UserError("the study itself spreads the step over ranks; leave --layout out")
        if self.step.precision == "fp16":
            raise UserError("precision fp16 needs a gradient scaler, which this study has not; use --precision bf16")
        baseline = Variant(kind="none")
        object.__setattr__(self, "contenders", tuple(dict.fromkeys((baseline, *self.contenders))))

    def trace_name(self, number: int) -> str:
        """The file name of a variant's trace: 1_bucketed_25_MB.json."""
        return f"{number}_{self.contenders[number].label.replace(', ', '_').replace(' ', '_')}.json"

    @property
    def tokens(self) -> int:
        """Tokens of one step of all ranks."""
        return self.step.tokens_of_all * self.processes


def refuse_what_none_uses(
    names: Sequence[str], bucket_sizes_mb: Sequence[float] | None, transports: Sequence[str] | None
) -> None:
    """Raise UserError for sizes or transports that are given and that none of the variants has a use for."""
    kinds, whose = [name.strip().partition(":")[0] for name in names], ", ".join(map(str.strip, names))
    if bucket_sizes_mb is not None and not any(name.strip() in _SIZED for name in names):
        raise UserError(
            f"bucket sizes have no effect on {whose}; leave --bucket-sizes out, or add {' or '.join(_SIZED)} to "
            "--contenders"
        )
    if transports is not None and "bucketed" not in kinds:
        raise UserError(f"a transport has no effect on {whose}; leave --transport out, or add bucketed to --contenders")


def variants_of(
    names: Sequence[str], bucket_sizes_mb: Sequence[float], transports: Sequence[str] = (COLLECTIVES,)
) -> tuple[Variant, ...]:
    """The variants of these names: `bucketed` and `torch_ddp` once for each bucket size, or as `bucketed:25` for one;
    `bucketed` once for each transport too; `sharded` with 25 MB unless it names another size.

    Raises UserError for a name that is none, or a size that is no number.
    """
    found: dict[Variant, None] = {}
    for name in names:
        kind, _, size = name.strip().partition(":")
        if size:
            sizes: Sequence[float | None] = [_megabytes(size)]
        elif kind in _SIZED:
            sizes = bucket_sizes_mb
        else:
            sizes = [None]
        for size_mb in sizes:
            for transport in transports if kind == "bucketed" else [None]:
                found[Variant(kind=kind, bucket_size_mb=size_mb, transport=transport)] = None  # type: ignore[arg-type]
    return tuple(found)


def bucket_sizes(text: str) -> tuple[float, ...]:
    """The sizes in '1,10,100', in MB. Raises UserError for what is no number above zero."""
    return tuple(_megabytes(part) for part in text.split(","))


def _megabytes(text: str) -> float:
    try:
        size_mb = float(text)
    except ValueError as error:
        raise UserError(f"a bucket size must be a number of MB, not '{text}'") from error
    if not 0 < size_mb < float("inf"):
        raise UserError(f"a bucket of {text} MB holds nothing; give a positive size in MB")
    return size_mb
