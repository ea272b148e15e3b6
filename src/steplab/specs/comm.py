"""A benchmark of collectives: its cells, and how to measure them.

Message sizes follow nccl-tests: for all-gather, reduce-scatter and all-to-all, one rank's bytes times the number of
ranks. Each rank's part is rounded down to a multiple of 16 bytes, for alignment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from steplab.errors import UserError
from steplab.specs.benchmark import GPUS, Benchmark
from steplab.specs.resolve import Grid, products
from steplab.specs.step_fields import Declared, check_declared, declared_fields
from steplab.units import format_message, parse_bytes

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv"]
CommBackend = Literal["nccl", "gloo", "peer_copy"]
CommDevice = Literal["cuda", "cpu"]
CommDtype = Literal["fp32", "bf16", "fp16"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
"""Names of the collectives. send_recv: every rank sends to the next while it receives from the previous."""
SCATTERED = ("all_gather", "reduce_scatter", "all_to_all")
"""Collectives whose message has one part per rank."""
_ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_SERVES: dict[str, tuple[CommDevice, ...]] = {"nccl": ("cuda",), "gloo": ("cpu", "cuda"), "peer_copy": ("cuda",)}
"""Devices whose tensors each backend sends; the first is its native one."""
_DOES: dict[str, tuple[str, ...]] = {"peer_copy": ("all_reduce",)}
_ALIGNMENT_BYTES = 16
_LARGEST_BYTES = 2**40
_SIZES_BYTES = {"cuda": [10**6, 10**7, 10**8, 10**9], "cpu": [10**4, 10**5, 10**6, 10**7]}


@dataclass(frozen=True, kw_only=True, slots=True)
class CommSpec:
    """One cell: a collective, its message, the backend and the number of ranks."""

    collective: Collective = Declared(help="Collective", default_words="all of them").field("all_reduce")
    backend: CommBackend = Declared(
        help="Backend",
        meanings={
            "peer_copy": "steplab's copies between one host's GPUs, which average as they reduce; all_reduce only"
        },
        default_words="nccl, or gloo on a CPU",
    ).field("gloo")
    device: CommDevice | None = Declared(
        help="Device of the tensors", default_words="the backend's native device, cuda for nccl"
    ).field(None)
    size_bytes: int = Declared(
        help="Size of the whole message before rounding, such as 64kB,1MB",
        key="size",
        default_words="on GPUs 1MB,10MB,100MB,1GB; on a CPU 10kB,100kB,1MB,10MB",
    ).field(1_000_000)
    world_size: int = Declared(
        help="Number of ranks that take part",
        default_words="powers of two up to the number of processes, and all: of 6, 2, 4 and 6",
        least=2,
    ).field(2)
    dtype: CommDtype = Declared(help="Number format of an element").field("fp32")

    def __post_init__(self) -> None:
        if self.device is None and self.backend in _SERVES:
            object.__setattr__(self, "device", _SERVES[self.backend][0])
        check_declared(FIELDS.values(), self)
        if self.device not in _SERVES[self.backend]:
            raise UserError(f"{self.backend} cannot send tensors on {self.device}; use --backend gloo for those")
        if self.collective not in _DOES.get(self.backend, COLLECTIVES):
            raise UserError(
                f"backend {self.backend} has no {self.collective}; choose {', '.join(_DOES[self.backend])}, "
                "or another backend"
            )
        least = _least_bytes(self.world_size)
        if not least <= self.size_bytes <= _LARGEST_BYTES:
            raise UserError(
                f"size must be at least {_ALIGNMENT_BYTES} bytes per rank ({least} B) and at most 1 TB, "
                f"not {format_message(self.size_bytes)}"
            )

    @property
    def element_bytes(self) -> int:
        return _ELEMENT_BYTES[self.dtype]

    @property
    def part_elements(self) -> int:
        """Elements in one rank's part; in the whole message if it has no parts."""
        parts = self.world_size if self.collective in SCATTERED else 1
        part_bytes = self.size_bytes // parts // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
        return part_bytes // self.element_bytes

    @property
    def message_elements(self) -> int:
        return self.part_elements * (self.world_size if self.collective in SCATTERED else 1)

    @property
    def message_bytes(self) -> int:
        """Message size after rounding, in bytes; S in nccl-tests."""
        return self.message_elements * self.element_bytes

    @property
    def transport(self) -> str:
        """Backend, and device if it is not the backend's native one: 'nccl', 'gloo', 'gloo on cuda'."""
        return self.backend if self.device == _SERVES[self.backend][0] else f"{self.backend} on {self.device}"

    @property
    def label(self) -> str:
        typed = "" if self.dtype == "fp32" else f" {self.dtype}"
        return (
            f"{self.collective} of {format_message(self.size_bytes)}{typed}, {self.transport}, {self.world_size} ranks"
        )


FIELDS = {field.key: field for field in declared_fields(CommSpec)}


@dataclass(frozen=True, kw_only=True, slots=True)
class CommOptions:
    """Options of `steplab comm` outside cells."""

    gpus: int | None = GPUS.field(None)
    """Number of processes, each on its own GPU."""
    processes: Sequence[object] | None = Declared(
        help="Processes to start on the CPU (gloo); 2,4,6 measures these world sizes",
        group="processes",
    ).field(None)
    repeats: int | None = Declared(
        help="Samples of each cell; on a GPU a sample of short calls is the mean of many",
        default_words="10 to 200, by their duration",
        least=1,
    ).field(None)


COMM = Benchmark(name="comm", what="collectives", timeout="5min", cells=FIELDS, options=CommOptions)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommStudy:
    """The collective cells to measure, and their timing."""

    name: str = "comm"
    """Name of the study."""
    cells: tuple[CommSpec, ...]
    """The cells, without duplicates."""
    num_processes: int
    """Ranks to start; a cell's unused ones are idle."""
    warmup_s: float = 0.1
    """Shortest warm-up of each cell, in seconds; at least five calls run, for at most about ten times as long."""
    measured_s: float = 0.3
    """Time for the samples of a cell, in seconds; `least_repeats` and `most_repeats` bound their number. On a GPU a
    sample is a mean over a millisecond of calls (measurement.comm.back_to_back); single calls are timed too."""
    least_repeats: int = 10
    """Smallest number of samples, however long they take."""
    most_repeats: int = 200
    """Largest number of samples, however short they are."""

    def __post_init__(self) -> None:
        if not self.cells:
            raise UserError("no cells to measure; give each list at least one value")
        largest = max(cell.world_size for cell in self.cells)
        if largest > self.num_processes:
            raise UserError(
                f"world-size {largest} needs {largest} processes, but only {self.num_processes} are started; "
                f"start more with --gpus {largest} or --processes {largest}"
            )
        object.__setattr__(self, "cells", tuple(dict.fromkeys(self.cells)))


def numbers_of(processes: object) -> list[int]:
    """Numbers in one text or a list. Raises UserError for text that is not a whole number."""
    listed = processes if isinstance(processes, (list, tuple)) else [processes]
    texts = [str(number).strip() for number in listed if number is not None]
    if wrong := [text for text in texts if not (text.isascii() and text.isdecimal())]:
        raise UserError(f"processes must be a whole number, not '{wrong[0]}'")
    return list(map(int, texts))


def comm_cells(lists: Mapping[str, Sequence[object]], *, num_processes: int, on_gpus: bool) -> tuple[CommSpec, ...]:
    """Cells for all combinations of values, by default those that suit the machine. Cells on the same ranks are
    adjacent; sizes vary fastest. A backend skips unsupported devices and collectives. Raises UserError with an invalid
    field, its value and the valid ones."""
    unknown = [name for name in lists if name not in FIELDS]
    if unknown:
        raise UserError(f"unknown field '{unknown[0]}' of a collective; choose one of {', '.join(FIELDS)}")
    texts = {name: [str(value).strip().replace("-", "_") for value in values] for name, values in lists.items()}
    for name in texts.get("device", ()):  # each, because a backend skips devices that it does not support
        FIELDS["device"].refuse_invalid(name)
    worlds = [FIELDS["world_size"].parsed(text) for text in texts.get("world_size", ())] or worlds_of(num_processes)
    sizes = [parse_bytes(text) for text in texts.get("size", ())]
    cells: list[CommSpec] = []

    def fits(fields: Mapping[str, Any]) -> bool:  # skips sizes that were not requested
        return bool(sizes) or fields["size_bytes"] >= _least_bytes(fields["world_size"])

    for backend in texts.get("backend") or ["nccl" if on_gpus else "gloo"]:
        for device in _devices_of(backend, texts.get("device")):
            grid: Grid = {
                "world_size": worlds,
                "collective": _served(texts.get("collective") or COLLECTIVES, _DOES.get(backend, COLLECTIVES)),
                "dtype": texts.get("dtype") or ["fp32"],
                "size_bytes": sizes or _SIZES_BYTES.get(device or "", [10**6]),
            }
            cells += [CommSpec(backend=backend, device=device, **fields) for fields in products(grid) if fits(fields)]  # type: ignore[arg-type]
    return tuple(cells)


def _least_bytes(world_size: int) -> int:
    return _ALIGNMENT_BYTES * world_size


def worlds_of(num_processes: int) -> list[int]:
    """World sizes to measure: powers of two, and the number of processes. For six: 2, 4 and 6."""
    powers = [2**exponent for exponent in range(1, num_processes.bit_length()) if 2**exponent < num_processes]
    return [*powers, num_processes]


def _devices_of(backend: str, named: Sequence[str] | None) -> Sequence[str | None]:
    served = _SERVES.get(backend, ())
    return _served(named, served) if named else served[:1] or [None]


def _served(named: Sequence[str], known: Sequence[str]) -> list[str]:
    return [name for name in named if name in known] or [named[0]]
