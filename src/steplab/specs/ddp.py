"""The data-parallel study: variants of gradient averaging, compared on one training step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal, get_args

from steplab.errors import UserError
from steplab.specs.benchmark import Benchmark, Spread
from steplab.specs.layout import SINGLE
from steplab.specs.step import FIELDS, StepSpec
from steplab.specs.step_choices import AFTER, OVERLAPPED, WITH_MASTERS
from steplab.specs.step_choices import IN_FLIGHT as WITH_UPDATE
from steplab.specs.step_fields import Declared, StepField

Kind = Literal["none", "naive", "flat", "overlap", "bucketed", "torch_ddp", "sharded", "fsdp2"]
KINDS: tuple[str, ...] = get_args(Kind)
WITH_BUCKETS = ("bucketed", "torch_ddp", "sharded")
WITH_TRANSPORT = ("bucketed", "sharded")
OWN = ("naive", "flat", "overlap", *WITH_TRANSPORT)
"""Kinds of variant that use steplab.parallel.DataParallel."""
_CHOSEN_HERE = frozenset(key for key, field in FIELDS.items() if field.about.group == "processes") | {
    "device",
    "update",
}
SMALL_STEP = {"context": 64, "batch": 2}
"""Default context and batch on a CPU."""
_TOLD = {
    "batch": ("Sequences in a micro-step, on each rank", "4; on a CPU 2"),
    "context": ("Tokens per sequence", "128; on a CPU 64"),
    "compile": (
        "Compile off (eager), or block (each block alone, so that gradients appear as the backward pass proceeds)",
        "off",
    ),
}
"""Help and default of step fields that differ in this study."""
COLLECTIVES = "collectives"
TRANSPORTS = (COLLECTIVES, "peer_copy")
"""Ways to send gradients, by their names in DataParallel."""
UPDATES = (AFTER, OVERLAPPED)
"""When parameters are updated: after all gradients, or in parts as these arrive."""
_SIZED = ("bucketed", "torch_ddp")
DEFAULT_BUCKET_MB = 25.0
_CHOICES: dict[str, tuple[tuple[str, ...], tuple[str, ...], object]] = {
    "bucket_size_mb": (WITH_BUCKETS, (), DEFAULT_BUCKET_MB),
    "transport": (WITH_TRANSPORT, TRANSPORTS, COLLECTIVES),
    "update": (WITH_UPDATE, UPDATES, AFTER),
}
"""Options of some kinds of variant: the kinds, the values (empty: any number), the default."""
BYTES_PER_MB = 1e6
STUDY_BUCKETS_MB = (1.0, 10.0, 100.0, 1000.0)
SMALL_BUCKETS_MB = (0.1, 1.0, 10.0)
"""Default bucket sizes for the tiny model with 3 MB of gradients."""
_WORDS = dict(zip(KINDS, KINDS, strict=True)) | {"none": "no communication", "torch_ddp": "torch DDP", "fsdp2": "FSDP2"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to average gradients over data-parallel ranks."""

    kind: Kind
    """none: ranks do not communicate. naive, flat, overlap, bucketed: DataParallel's strategies. torch_ddp:
    DistributedDataParallel. sharded: buckets; a gradient is averaged only on the rank that owns its parameter, for
    ShardedOptimizer. fsdp2: torch's fully_shard on each block."""
    bucket_size_mb: float | None = None
    """Largest bucket of gradients, in units of 1e6 bytes; None for kinds without buckets."""
    transport: str | None = None
    """How buckets of gradients are sent, one of TRANSPORTS; None for kinds without this option."""
    update: str | None = None
    """When parameters are updated, one of UPDATES; None for kinds without this option."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"variant '{self.kind}' is not known; choose some of {', '.join(KINDS)}")
        for name, (kinds, known, default) in _CHOICES.items():
            chosen = getattr(self, name)
            if chosen is None and self.kind in kinds:
                object.__setattr__(self, name, default)
            elif chosen is not None and self.kind not in kinds:
                has = f"variants that have one: {', '.join(kinds)}"
                raise UserError(f"{self.kind} has no choice of {name}; {has}")
            elif chosen is not None and known and chosen not in known:
                raise UserError(f"{name} '{chosen}' is not known; choose some of {', '.join(known)}")
        if self.bucket_size_mb is not None:
            _megabytes(self.bucket_size_mb)

    @property
    def family(self) -> str:
        return f"{_WORDS[self.kind]}{self._choices}"

    @property
    def label(self) -> str:
        size = f" {self.bucket_size_mb:g} MB" if self.bucket_size_mb is not None else ""
        return f"{_WORDS[self.kind]}{size}{self._choices}"

    @property
    def _choices(self) -> str:
        transport = f", {self.transport}" if self.transport not in (None, COLLECTIVES) else ""
        return f"{transport}, update overlapped" if self.update == OVERLAPPED else transport


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpStudy:
    """Variants to compare, and how to measure them."""

    step: StepSpec
    """Training step of each rank: `batch` is per rank, `warmup` and `steps` are per variant."""
    processes: int = 2
    """Number of ranks."""
    contenders: tuple[Variant, ...]
    """Variants in the order of measurement, without duplicates; the baseline `none` is first."""
    turn: int = 5
    """Consecutive steps of a variant between two turns of the baseline."""
    profiled_steps: int = 2
    """Profiled steps of each variant, after the timed ones; 0: no traces, no timelines."""
    repeats: int = 10
    """Samples of each variant's communication without computation."""

    def __post_init__(self) -> None:
        step = self.step
        if self.processes < 2:
            raise UserError(f"processes must be at least 2, not {self.processes}")
        if step.layout != SINGLE:
            raise UserError("the study itself spreads the step over ranks; leave --layout out")
        whole = "a model compiled as a whole delivers all gradients at the end; choose one of off, block"
        masters = "ranks would add up their gradients in bf16; use --precision bf16"
        for is_refused, what, why in (
            (step.compile not in ("off", "block"), f"compile '{step.compile}'", whole),
            (step.pass_name != "train", f"pass '{step.pass_name}'", "whole steps are compared; use --pass train"),
            (step.precision == "fp16", "precision fp16", "it needs a gradient scaler; use --precision bf16"),
            (step.precision in WITH_MASTERS, f"precision {step.precision}", masters),
            (step.cuda_graph == "step", "cuda_graph step", "ranks communicate; use --cuda-graph off"),
        ):
            if is_refused:
                raise UserError(f"{what} is not supported here, because {why}")
        baseline = Variant(kind="none")
        object.__setattr__(self, "contenders", tuple(dict.fromkeys((baseline, *self.contenders))))

    def trace_name(self, number: int) -> str:
        return f"{number}_{self.contenders[number].label.replace(', ', '_').replace(' ', '_')}.json"

    @property
    def tokens(self) -> int:
        return self.step.tokens_of_all * self.processes


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpOptions(Spread):
    """Options of `steplab ddp` outside the step's fields."""

    variants: Sequence[str] = Declared(
        help="Variants to compare: naive, flat, overlap, bucketed, torch_ddp, sharded, fsdp2; bucketed:25 is one "
        "bucket size",
        group="variants",
    ).field(KINDS[1:])
    bucket_sizes: Sequence[object] | None = Declared(
        help="Bucket sizes of bucketed and torch_ddp, in units of 1e6 bytes",
        default_words="1,10,100,1000; on a CPU 0.1,1,10",
        group="variants",
    ).field(None)
    transport: Sequence[str] | None = Declared(
        help="Transport of bucketed and sharded: collectives, peer_copy (between GPUs of one host), or both",
        default_words=COLLECTIVES,
        group="variants",
    ).field(None)
    update: Sequence[str] | None = Declared(
        help="When overlap and bucketed update parameters: after (all gradients have arrived), overlapped (a "
        "fourth of them at a time, as soon as its gradients have arrived), or both",
        default_words=AFTER,
        group="variants",
    ).field(None)
    profiled_steps: int = Declared(
        help="Number of steps of each variant that are traced for its timeline; 0 traces none", least=0
    ).field(2)
    traces: str | None = Declared(help="Folder for traces, one file per variant", parse=Path).field(None)


def _of_rank(field: StepField) -> StepField:
    if field.key not in _TOLD:
        return field
    told, default = _TOLD[field.key]
    return replace(field, choices=(), about=replace(field.about, help=told, meanings={}, default_words=default))


DDP = Benchmark(
    name="ddp",
    what="data parallelism",
    timeout="10min",
    cells={key: _of_rank(field) for key, field in FIELDS.items() if key not in _CHOSEN_HERE},
    options=DdpOptions,
)


def asked_variants(asked: DdpOptions, *, small: bool) -> tuple[Variant, ...]:
    """Requested variants. `small`: default bucket sizes of a CPU. Raises UserError for invalid or unused options."""
    given_mb = tuple(map(_megabytes, asked.bucket_sizes or ()))
    sizes_mb = given_mb or (SMALL_BUCKETS_MB if small else STUDY_BUCKETS_MB)
    found = variants_of(asked.variants, sizes_mb, asked.transport or (COLLECTIVES,), asked.update or (AFTER,))
    names = [name.strip() for name in asked.variants]
    kinds = {name.partition(":")[0] for name in names}
    for what, option, given, having, used in (
        ("bucket sizes have", "--bucket-sizes", given_mb or None, _SIZED, set(names)),
        ("a transport has", "--transport", asked.transport, WITH_TRANSPORT, kinds),
        ("an update has", "--update", asked.update, WITH_UPDATE, kinds),
    ):
        if given is not None and used.isdisjoint(having):
            whose, others = ", ".join(names), " or ".join(having)
            raise UserError(f"{what} no effect on {whose}; leave {option} out, or add {others} to --variants")
    return found


def variants_of(
    names: Sequence[str],
    bucket_sizes_mb: Sequence[float],
    transports: Sequence[str] = (COLLECTIVES,),
    updates: Sequence[str] = (AFTER,),
) -> tuple[Variant, ...]:
    """Variants of these names, without duplicates.

    `bucketed` and `torch_ddp` yield one variant for each bucket size; `bucketed:25` yields only 25 MB. `bucketed` and
    `sharded` are repeated for each transport, `overlap` and `bucketed` for each update. `sharded` has 25 MB by default.
    Raises UserError for an unknown name and an invalid size.
    """
    found: list[Variant] = []
    for name in names:
        kind, _, size = name.strip().partition(":")
        if size:
            sizes: Sequence[float | None] = [_megabytes(size)]
        elif kind in _SIZED:
            sizes = bucket_sizes_mb
        else:
            sizes = [None]
        choices = product(
            sizes, transports if kind in WITH_TRANSPORT else [None], updates if kind in WITH_UPDATE else [None]
        )
        for size_mb, transport, update in choices:
            found.append(Variant(kind=kind, bucket_size_mb=size_mb, transport=transport, update=update))  # type: ignore[arg-type]
    return tuple(dict.fromkeys(found))


def _megabytes(text: object) -> float:
    try:
        size_mb = float(str(text))
    except ValueError as error:
        raise UserError(f"a bucket size must be a number of MB, not '{text}'") from error
    if not 0 < size_mb < float("inf"):
        raise UserError(f"a bucket size must be a positive number of MB, not {text}")
    return size_mb
