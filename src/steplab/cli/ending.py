"""The signals that ask the program to end: the first stops the work, and later ones do not disturb the tidying up.

It imports next to nothing, so that a signal during the imports of the program is met as well.
"""

import os
import signal
import sys
import time
from types import FrameType

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
_AGAIN_S = 0.01
TIDYING_S = 3.0
"""How long after the first signal further ones are ignored: processes are ended, and what was measured is stored. A
signal after that ends the program at once."""


class Ending:
    """Whether the program was asked to end, and by which signal."""

    def __init__(self) -> None:
        self.number: int = signal.SIGINT
        """The first signal that arrived; SIGINT if none did, because Python makes that one a KeyboardInterrupt."""
        self._arrived_s: float | None = None

    def listen(self) -> None:
        """Raise KeyboardInterrupt in the main thread at the first signal. A signal that the parent chose to ignore, as
        `nohup` does, is ignored."""
        for number in _numbers():
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._arrived)
        if _has_timer:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            sys.unraisablehook = self._lost

    def ignore(self) -> None:
        """Ignore the signals from now on: the exit code is decided."""
        for number in [*_numbers(), *([signal.SIGALRM] if _has_timer else [])]:
            signal.signal(number, signal.SIG_IGN)

    @property
    def exit_code(self) -> int:
        """128 and the number of the signal, as shells report it: 130 for Ctrl-C."""
        return 128 + self.number

    @property
    def words(self) -> str:
        """What happened, for the user."""
        return "interrupted" if self.number == signal.SIGINT else f"ended by {signal.Signals(self.number).name}"

    def _lost(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """Raise a KeyboardInterrupt once more that was raised where Python drops exceptions: in a finalizer, say."""
        if self._arrived_s is not None and issubclass(unraisable.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)  # a thread might need a lock that is held here
        else:
            sys.__unraisablehook__(unraisable)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._arrived_s is None:
            self.number, self._arrived_s = number, now_s
            raise KeyboardInterrupt
        if now_s - self._arrived_s > TIDYING_S:
            os._exit(self.exit_code)  # measuring processes end by themselves when this one is gone


_has_timer = hasattr(signal, "setitimer")  # Windows has none


def _numbers() -> list[signal.Signals]:
    return [number for name in _NAMES if (number := getattr(signal, name, None)) is not None]  # Windows has no SIGHUP
