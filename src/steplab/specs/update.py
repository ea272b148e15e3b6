"""When parameters are updated."""

from typing import Final

AFTER: Final = "after"
OVERLAPPED: Final = "overlapped"
IN_FLIGHT = ("overlap", "bucketed")
"""Strategies of data parallelism that send gradients while others are still being made."""
