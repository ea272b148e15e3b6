"""Devices and parallelism of a step: valid device names, and sizes of the parallel axes. measurement.machine.device
checks that a device exists."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from steplab.errors import Unsupported, UserError

MOST_PROCESSES = 1 << 20
DEVICES_TOLD = "auto (cuda, else mps, else cpu), cpu, mps, cuda or cuda:N"
_KNOWN = "auto, cpu, mps, cuda or cuda:N"
_PLAIN = ("auto", "cpu", "mps", "cuda")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Sizes of the parallel axes of a step; their product is the number of processes, one per GPU."""

    dp: int = 1
    """Size of the data-parallel axis: every rank has the whole model and its own batch; gradients are averaged."""
    fsdp: int = 1
    """Size of the fully sharded axis: as dp, with sharded parameters, gradients and optimizer state."""
    tp: int = 1
    """Size of the tensor-parallel axis: each matrix is split over the ranks; all ranks see the same batch."""
    pp: int = 1
    """Size of the pipeline-parallel axis: each rank has some of the blocks; all ranks work on the same batch."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if not 1 <= size <= MOST_PROCESSES:
                raise UserError(f"layout {field.name} must be from 1 to {MOST_PROCESSES}, not {size}")

    @property
    def world_size(self) -> int:
        return self.dp * self.fsdp * self.tp * self.pp

    @property
    def data_ranks(self) -> int:
        return self.dp * self.fsdp

    def __str__(self) -> str:
        axes = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return ",".join(f"{name}={size}" for name, size in axes if size != 1) or "dp=1"


SINGLE = Layout()
AXES: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Layout))


def parse_layout(text: str) -> Layout:
    """Parse text such as `dp=2,fsdp=2`; missing axes are 1. Raises UserError for invalid text, and Unsupported for
    context parallelism."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name == "cp":
            why = "attention over a context that is split over ranks is not built here"
            raise Unsupported(
                f"context parallelism (layout {text})", why, "use tp, which splits tokens between products"
            )
        if name not in AXES or name in sizes or not (size.isascii() and size.isdecimal()):
            raise UserError(f"layout '{text}' is not known; write each of {', '.join(AXES)} once, as in dp=2,fsdp=2")
        sizes[name] = int(size)
    return Layout(**sizes)


def blocks_of_stage(number: int, num_stages: int, num_layers: int) -> range:
    """Blocks of a pipeline stage; the first stages have one more if they cannot be equal."""
    least, more = divmod(num_layers, num_stages)
    first = number * least + min(number, more)
    return range(first, first + least + (number < more))


def check_device(name: str, there: Sequence[str] = ()) -> None:
    """Raise UserError for an invalid name, with the existing devices, `there`."""
    kind, colon, index = name.partition(":")
    if name in _PLAIN or (colon and kind == "cuda" and index.isascii() and index.isdecimal()):
        return
    has = f"; this machine has {', '.join(there)}" if there else ""
    raise UserError(f"device '{name}' is not known; choose one of {_KNOWN}{has}")


def with_processes(fields: Mapping[str, object], gpus: int | None, processes: int | None) -> dict[str, object]:
    """Fields with device and layout, by default data-parallel, for `gpus` GPUs or `processes` CPU processes. Raises
    UserError if the given layout or device contradicts the number."""
    given = dict(fields)
    check_device(str(given.get("device", "auto")))
    if gpus is None and processes is None:
        return given
    count, device = process_count(gpus, processes, str(given.get("device", "auto")))
    if "layout" not in given:
        given["layout"] = f"dp={count}"
    size = parse_layout(str(given["layout"])).world_size
    if size != count:
        option = "gpus" if gpus is not None else "processes"
        raise UserError(f"layout {given['layout']} takes {size} processes, not {count}; use --{option} {size}")
    return given | {"device": device}


def process_count(gpus: int | None, processes: int | None, device: str = "auto") -> tuple[int, str]:
    """Processes and their device, cuda or cpu. Raises UserError for two numbers or none, one below 1, and a
    contradicting device."""
    if gpus is not None and processes is not None:
        raise UserError("give --gpus (one process per GPU) or --processes (on the CPU), not both")
    option, count, kind = ("gpus", gpus, "cuda") if gpus is not None else ("processes", processes, "cpu")
    if count is None:
        raise UserError("give --gpus or --processes")
    if not 1 <= count <= MOST_PROCESSES:
        raise UserError(f"--{option} must be at least 1, not {count}")
    if device not in ("auto", kind):
        why = "is for GPUs" if kind == "cuda" else "is for the CPU"
        raise UserError(f"--{option} {why}, and the device is {device}; leave --device out")
    return count, kind
