"""A collective by itself, as it is benchmarked, and a study of many: what moves, how much, by which backend.

Sizes follow nccl-tests: a size is that of the whole message, for all-gather, reduce-scatter and all-to-all the bytes
of one rank times the ranks. The part of a rank is rounded down to 16 bytes, so that no part is misaligned.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from steplab.errors import UserError
from steplab.units import format_message, parse_bytes

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv"]
CommBackend = Literal["nccl", "gloo", "peer_copy"]
CommDevice = Literal["cuda", "cpu"]
CommDtype = Literal["fp32", "bf16", "fp16"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
"""send_recv: every rank sends to the next and receives from the one before, both at once."""
BACKENDS: tuple[str, ...] = get_args(CommBackend)
"""peer_copy: steplab.parallel's copies between the memories of one host's GPUs, which average as they reduce."""
DEVICES: tuple[str, ...] = get_args(CommDevice)
DTYPES: tuple[str, ...] = get_args(CommDtype)
FIELDS = ("collective", "backend", "device", "size", "world_size", "dtype")
"""What lists can be given for."""
SCATTERED = ("all_gather", "reduce_scatter", "all_to_all")
"""The collectives whose message consists of a part a rank."""
_ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_OWN_DEVICE: dict[str, CommDevice] = {"nccl": "cuda", "gloo": "cpu", "peer_copy": "cuda"}
_SERVES = {"nccl": ("cuda",), "gloo": ("cpu", "cuda"), "peer_copy": ("cuda",)}
_DOES: dict[str, tuple[str, ...]] = {"peer_copy": ("all_reduce",)}
"""Backends that do not do every collective."""
_ALIGNMENT_BYTES = 16
_LARGEST_BYTES = 2**40
_SIZES_BYTES = {"cuda": [10**6, 10**7, 10**8, 10**9], "cpu": [10**4, 10**5, 10**6, 10**7]}


@dataclass(frozen=True, kw_only=True, slots=True)
class CommSpec:
    """One cell."""

    collective: Collective = "all_reduce"
    """What the ranks do together."""
    backend: CommBackend = "gloo"
    """Who moves the bytes."""
    device: CommDevice | None = None
    """Device of the tensors; None for the backend's native device."""
    size_bytes: int = 1_000_000
    """Of the whole message, as asked; `message_bytes` are those that move."""
    world_size: int = 2
    """Ranks that take part."""
    dtype: CommDtype = "fp32"
    """Type of an element."""

    def __post_init__(self) -> None:
        choices = {"collective": COLLECTIVES, "backend": BACKENDS, "dtype": DTYPES}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise UserError(f"{name} '{getattr(self, name)}' is not known; choose one of {', '.join(known)}")
        if self.device is None:
            object.__setattr__(self, "device", _OWN_DEVICE[self.backend])
        _refuse_unknown_device(str(self.device))
        if self.device not in _SERVES[self.backend]:
            raise UserError(f"{self.backend} moves no tensors of a {self.device}; use --backend gloo for those")
        if self.collective not in _DOES.get(self.backend, COLLECTIVES):
            raise UserError(f"{self.backend} does {', '.join(_DOES[self.backend])} alone, and no {self.collective}")
        if self.world_size < 2:
            raise UserError(f"world-size must be at least 2, not {self.world_size}: one rank has nobody to talk to")
        least = _least_bytes(self.world_size)
        if not least <= self.size_bytes <= _LARGEST_BYTES:
            raise UserError(
                f"size must be at least {_ALIGNMENT_BYTES} bytes a rank ({least} B) and at most 1 TB, "
                f"not {format_message(self.size_bytes)}"
            )

    @property
    def element_bytes(self) -> int:
        """Of one element."""
        return _ELEMENT_BYTES[self.dtype]

    @property
    def part_elements(self) -> int:
        """Elements of a rank's part; of a collective without parts, of the message."""
        parts = self.world_size if self.collective in SCATTERED else 1
        part_bytes = self.size_bytes // parts // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
        return part_bytes // self.element_bytes

    @property
    def message_elements(self) -> int:
        """Elements of the message."""
        return self.part_elements * (self.world_size if self.collective in SCATTERED else 1)

    @property
    def message_bytes(self) -> int:
        """Bytes of the message, rounded: S of nccl-tests."""
        return self.message_elements * self.element_bytes

    @property
    def way(self) -> str:
        """Who moves what: 'nccl', 'gloo', 'gloo on cuda'."""
        return self.backend if self.device == _OWN_DEVICE[self.backend] else f"{self.backend} on {self.device}"

    @property
    def label(self) -> str:
        """all_reduce of 1 MB, nccl, 2 ranks."""
        typed = "" if self.dtype == "fp32" else f" {self.dtype}"
        return f"{self.collective} of {format_message(self.size_bytes)}{typed}, {self.way}, {self.world_size} ranks"


@dataclass(frozen=True, kw_only=True, slots=True)
class CommStudy:
    """Cells to measure, and how."""

    name: str = "comm"
    """What it is called."""
    cells: tuple[CommSpec, ...]
    """Without duplicates."""
    num_processes: int
    """Ranks that are started; those that a cell does not need are idle meanwhile."""
    warmup_s: float = 0.1
    """Each cell runs at least so long before it is timed (and five times), about ten times as long at most."""
    measured_s: float = 0.3
    """Time that the samples of a cell may take, between least and most repeats. On a GPU a sample is the mean of as
    many calls as take a millisecond (measurement.comm_back_to_back); by itself a call is timed as often."""
    least_repeats: int = 10
    """However long they take."""
    most_repeats: int = 200
    """However short they are."""

    def __post_init__(self) -> None:
        for name in ("warmup_s", "measured_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UserError(f"{name} must be a time, not {getattr(self, name)}")
        if not 1 <= self.least_repeats <= self.most_repeats:
            raise UserError("the number of repeats must be at least 1")
        if not self.cells:
            raise UserError("no cells to measure; give each list at least one value")
        largest = max(cell.world_size for cell in self.cells)
        if largest > self.num_processes:
            raise UserError(
                f"world-size {largest} needs {largest} processes, and {self.num_processes} are started; "
                f"start more with --gpus {largest} or --processes {largest}"
            )
        object.__setattr__(self, "cells", tuple(dict.fromkeys(self.cells)))


def comm_cells(lists: Mapping[str, Sequence[object]], *, num_processes: int, on_gpus: bool) -> tuple[CommSpec, ...]:
    """The product of the lists, of which FIELDS may be given; what is not given is what suits the machine.

    Cells that need the same group of ranks stand together, and sizes vary fastest. Of several devices
    and collectives that are named, a backend gets those that it can serve.

    Raises UserError naming the field, what is wrong with it and what is valid.
    """
    unknown = [name for name in lists if name not in FIELDS]
    if unknown:
        raise UserError(f"unknown field '{unknown[0]}' of a collective; valid are {', '.join(FIELDS)}")
    texts = {name: [_plain(value) for value in values] for name, values in lists.items()}
    for name in texts.get("device", ()):  # each: a backend passes over those that it does not serve
        _refuse_unknown_device(name)
    worlds = [_whole("world-size", text) for text in texts.get("world_size", ())] or worlds_of(num_processes)
    sizes = [parse_bytes(text) for text in texts.get("size", ())]
    cells = []
    for backend in texts.get("backend") or ["nccl" if on_gpus else "gloo"]:
        for device in _devices_of(backend, texts.get("device")):
            for world, collective, dtype, size_bytes in itertools.product(
                worlds,
                _served(texts.get("collective") or COLLECTIVES, _DOES.get(backend, COLLECTIVES)),
                texts.get("dtype") or ["fp32"],
                sizes or _SIZES_BYTES.get(device or "", [10**6]),
            ):
                if not sizes and size_bytes < _least_bytes(world):
                    continue  # nobody asked for it
                fields = {"collective": collective, "backend": backend, "device": device, "dtype": dtype}
                cells.append(CommSpec(**fields, size_bytes=size_bytes, world_size=world))  # type: ignore[arg-type]
    return tuple(cells)


def _refuse_unknown_device(name: str) -> None:
    if name not in DEVICES:
        raise UserError(f"device '{name}' is not known; choose one of {', '.join(DEVICES)}")


def _least_bytes(world_size: int) -> int:
    """Of a message: a part a rank that is not empty."""
    return _ALIGNMENT_BYTES * world_size


def worlds_of(num_processes: int) -> list[int]:
    """The powers of two among the processes, and all of them: 2, 4, 6 of six."""
    powers = [2**exponent for exponent in range(1, num_processes.bit_length()) if 2**exponent < num_processes]
    return [*powers, num_processes]


def _devices_of(backend: str, named: Sequence[str] | None) -> Sequence[str | None]:
    """Where a backend's tensors are."""
    return _served(named, _SERVES.get(backend, ())) if named else [_OWN_DEVICE.get(backend)]


def _served(named: Sequence[str], known: Sequence[str]) -> list[str]:
    """Those named that a backend can serve; of one that can serve none the first is left, to be refused by name."""
    return [name for name in named if name in known] or [named[0]]


def _plain(value: object) -> str:
    """'all-gather' is all_gather."""
    return str(value).strip().replace("-", "_")


def _whole(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise UserError(f"{name} must be a whole number, not '{text}'")
    return int(text)
