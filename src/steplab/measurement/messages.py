"""The messages between processes that measure and the process that started them, as lines of JSON.

A line is a Message, `{"kind": ..., "value": ...}`. The first line of a connection over TCP is a Hello, and the line on
standard input of a process that was started is a Request or an Order.
"""

import msgspec

from steplab.records.run import Failure
from steplab.specs.attention_study import AttentionStudy
from steplab.specs.attention_tuning import TuningStudy
from steplab.specs.comm import CommStudy
from steplab.specs.ddp import DdpStudy
from steplab.specs.step import StepSpec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding a line raises when it is not the message it should be."""
_NULL = msgspec.Raw(b"null")


class Message(msgspec.Struct):
    """A line of a connection."""

    kind: str
    value: msgspec.Raw = _NULL


class Hello(msgspec.Struct):
    """The first line of a rank that connects over TCP: who speaks, and the proof that it was asked to."""

    token: str
    rank: int
    host: str


class Request(msgspec.Struct):
    """What the parent wants measured."""

    step: StepSpec | None = None
    """A step; or, without one, the ceilings of"""
    device: str = "auto"
    """this device."""
    profiled_steps: int = 0
    """How many steps more are to be recorded once the step is timed; 0: none."""
    trace: str | None = None
    """File for the trace of those; None: nsys records them, from outside."""
    snapshot: str | None = None
    """File for the history of the memory of one step more, once the step is timed; None: it is not asked for."""
    marks: str | None = None
    """File for what that history does not know."""
    numerics: bool = False
    """Whether the step's types and losses are wanted in place of its time; without a step, sums on the device."""
    attention: AttentionStudy | None = None
    """A benchmark of attention, in place of a step; of its cells, by their numbers,"""
    groups: list[list[int]] = []
    """these are wanted, those of a group timed in turns."""
    tuning: TuningStudy | None = None
    """Candidates for the tiles of flash_triton, in place of a step."""
    comm: CommStudy | None = None
    """A benchmark of collectives, in place of a step; of its cells"""
    cells: list[int] = []
    """those of these numbers are wanted."""
    ddp: DdpStudy | None = None
    """A data-parallel study, in place of a step; of its contenders, by their numbers,"""
    contenders: list[int] = []
    """these are wanted,"""
    traces: str | None = None
    """and this is the folder for their traces; None: none are."""
    processes: int = 1
    """How many are to do this together; each then calls `answer` in a world of so many."""


class Order(msgspec.Struct):
    """What a rank's process finds on its standard input."""

    request: Request
    folder: str | None = None
    """The private folder in which the ranks of one command line meet; None: torchrun's variables say where."""
    hub: tuple[int, str] | None = None
    """Port and token at which this command line hears the ranks of others, where torchrun started one for each."""


class Verdict(msgspec.Struct):
    """What became of all ranks, for each to tell its own command line; neither: all went well."""

    failure: Failure | None = None
    refused: tuple[int, str] | None = None
    """Exit code and text."""


class Whereabouts(msgspec.Struct):
    """Where a process stands when it is asked."""

    state: str
    """`collective`: it waits for other ranks; `device`: it waits for its device; `code`: neither."""
    line: str
    """The innermost line that is not torch's or Python's own."""
