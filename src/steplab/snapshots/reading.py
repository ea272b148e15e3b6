"""Reads a file with a memory snapshot, as written by torch.cuda.memory._dump_snapshot, into a History.

Reading executes nothing in the file, whoever made it (see machine).
"""

from pathlib import Path

from steplab.errors import UserError
from steplab.limits import LimitReached, Limits
from steplab.snapshots.building import build_history
from steplab.snapshots.event_runs import EventRuns
from steplab.snapshots.history import History
from steplab.snapshots.machine import Machine
from steplab.snapshots.plausible import refuse_impossible
from steplab.snapshots.refusal import Refused
from steplab.snapshots.stacks import Stacks
from steplab.snapshots.window import WINDOW_BYTES, Window
from steplab.unpacking import OnProgress, Unpacked

_WHAT_IS_READ = "steplab reads what torch.cuda.memory._dump_snapshot writes, plain or compressed by gzip or xz"
_PROTO = b"\x80"
_ZIP = b"PK\x03\x04"


def _unwatched(done_bytes: int, size_bytes: int) -> None:
    """The progress of reading is ignored."""


def read_snapshot(
    path: Path,
    on_progress: OnProgress = _unwatched,
    *,
    limits: Limits | None = None,
    window_bytes: int = WINDOW_BYTES,
) -> History:
    """The memory snapshot in a file.

    `on_progress` is called with the bytes read of the file, and its size. `limits` None are the usual ones.
    `window_bytes` of the pickle, at least 4 MiB, are in memory at a time. Raises UserError, in one line, if the file
    cannot be read, is not a snapshot, asks for anything to be executed, or has more than the limits allow.
    """
    limits = limits or Limits()
    try:
        size_bytes = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            window = Window(
                Unpacked(file, limits, on_progress, size_bytes=size_bytes),
                window_bytes=window_bytes,
            )
            window.move(0)
            _check_head(window.bytes)
            stacks = Stacks(limits)
            history = build_history(Machine(window, EventRuns(stacks, limits), limits).run(), stacks)
            refuse_impossible(history)
            return history
    except LimitReached as error:
        raise UserError(f"{path}: {error}") from error
    except Refused as error:
        raise UserError(f"{path}: {error}; {_WHAT_IS_READ}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _check_head(head: bytes) -> None:
    if not head:
        raise Refused("it is empty")
    if head.startswith(_ZIP):
        raise Refused("it is a zip archive, such as torch.save writes, and no memory snapshot")
    if not head.startswith(_PROTO):
        raise Refused("it is no pickle of protocol 2 or later")
