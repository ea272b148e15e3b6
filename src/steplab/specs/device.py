"""The valid names of devices. Whether a device exists is checked where it is opened (measurement.machine.device)."""

from collections.abc import Sequence

from steplab.errors import UserError

DEVICES_TOLD = "auto (cuda, else mps, else cpu), cpu, mps, cuda or cuda:N"
"""The valid names, for the help of an option."""
_KNOWN = "auto, cpu, mps, cuda or cuda:N"
_PLAIN = ("auto", "cpu", "mps", "cuda")


def check_device(name: str, there: Sequence[str] = ()) -> None:
    """Raise UserError for a name that no device has; it lists the devices that are `there`, if they are known."""
    kind, colon, index = name.partition(":")
    if name in _PLAIN or (colon and kind == "cuda" and index.isascii() and index.isdecimal()):
        return
    has = f"; this machine has {', '.join(there)}" if there else ""
    raise UserError(f"device '{name}' is not known; choose one of {_KNOWN}{has}")
