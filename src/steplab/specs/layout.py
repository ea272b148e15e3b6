"""How many processes take a step together, and what each of them has of it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from steplab.errors import UserError
from steplab.specs.device import check_device

MOST_PROCESSES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The axes over which a step is spread; their product is the number of processes, one a GPU."""

    dp: int = 1
    """Data parallel: every rank has the whole model and a batch of its own, gradients are averaged."""
    fsdp: int = 1
    """Fully sharded data parallel: as dp, and parameters, gradients and optimizer state are spread."""
    tp: int = 1
    """Tensor parallel: each matrix is spread, all ranks see the same batch."""
    pp: int = 1
    """Pipeline parallel: each rank has some of the blocks, all work on the same batch."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not 1 <= getattr(self, field.name) <= MOST_PROCESSES:
                raise UserError(f"layout {field.name} must be at least 1, not {getattr(self, field.name)}")

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.dp * self.fsdp * self.tp * self.pp

    @property
    def data_ranks(self) -> int:
        """How many different batches one step takes."""
        return self.dp * self.fsdp

    def __str__(self) -> str:
        axes = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return ",".join(f"{name}={size}" for name, size in axes if size != 1) or "dp=1"


SINGLE = Layout()
"""One process."""
AXES: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Layout))


def parse_layout(text: str) -> Layout:
    """The layout written as `dp=2,fsdp=2`; axes left out are 1. Raises UserError where it is none."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in AXES or name in sizes or not (size.isascii() and size.isdecimal()):
            raise UserError(f"layout '{text}' is not known; write each of {', '.join(AXES)} once, as in dp=2,fsdp=2")
        sizes[name] = int(size)
    return Layout(**sizes)


def with_processes(fields: Mapping[str, object], gpus: int | None, processes: int | None) -> dict[str, object]:
    """The fields of a step that is to run on so many GPUs, or in so many processes on the CPU.

    Without a layout of its own the step is data parallel over them. Raises UserError where layout, device and number
    do not go together.
    """
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
    """How many processes `--gpus` or `--processes` ask for, and the device they are on: cuda or cpu.

    Raises UserError for both, for less than one, and for a device that contradicts them.
    """
    if gpus is not None and processes is not None:
        raise UserError("give --gpus (a process for each) or --processes (on the CPU), not both")
    option, count, kind = ("gpus", gpus, "cuda") if gpus is not None else ("processes", processes, "cpu")
    if count is None:
        raise UserError("give --gpus or --processes")
    if not 1 <= count <= MOST_PROCESSES:
        raise UserError(f"--{option} must be at least 1, not {count}")
    if device not in ("auto", kind):
        why = "is for GPUs" if kind == "cuda" else "is for the CPU"
        raise UserError(f"--{option} {why}, and the device is {device}; leave --device out")
    return count, kind
