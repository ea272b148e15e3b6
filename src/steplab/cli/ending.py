"""Handles signals that end the program: the first stops the work, later ones do not disturb tidying up.

It imports almost nothing, so a signal during the program's imports is handled too.
"""

import os
import signal
import sys
import time
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN_S = 0.01
TIDYING_S = 3.0
"""Time after the first signal in which further ones are ignored, while processes end and results are stored."""


class Ending:
    """Turns the first signal that asks the program to end into a KeyboardInterrupt, and remembers its number."""

    def __init__(self) -> None:
        self.number: int = signal.SIGINT
        """The first signal; SIGINT if none arrived, because Python turns that one into KeyboardInterrupt."""
        self._arrived_s: float | None = None

    def listen(self) -> None:
        """Raise KeyboardInterrupt in the main thread at the first signal. Signals that the parent ignored, as `nohup`
        does, stay ignored.
        """
        for number in _NUMBERS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._arrived)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        sys.unraisablehook = self._lost

    def ignore(self) -> None:
        for number in (*_NUMBERS, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)

    @property
    def exit_code(self) -> int:
        """128 plus the signal's number, as in shells: 130 for Ctrl-C."""
        return 128 + self.number

    @property
    def words(self) -> str:
        return "interrupted" if self.number == signal.SIGINT else f"ended by {signal.Signals(self.number).name}"

    def _lost(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """Raise a lost KeyboardInterrupt again: Python drops exceptions in finalizers, for example."""
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
            os._exit(self.exit_code)  # measuring processes end with this one
