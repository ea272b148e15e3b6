"""Which steps can update parameters before all gradients are there. It imports no spec, as the specs ask here."""

from typing import Final

from steplab.errors import Unsupported
from steplab.specs.layout import Layout

AFTER: Final = "after"
OVERLAPPED: Final = "overlapped"
IN_FLIGHT = ("overlap", "bucketed")
"""Strategies of data parallelism that send gradients while others are still being made."""
_AFTER = "or --update after"


def refuse_unserved_update(*, layout: Layout, data_parallel: str, precision: str, compile: str) -> None:
    """Raise Unsupported for a step whose update needs all gradients first, or gets them all at once."""
    what = "update overlapped with"
    if precision == "fp16":
        why = "its gradient scaler looks for overflows in all gradients before an update"
        raise Unsupported(f"{what} precision fp16", why, f"use --precision bf16, {_AFTER}")
    if layout.world_size > layout.dp:
        why = "torch's engines finish all gradients at the end"
        raise Unsupported(f"{what} layout {layout}", why, f"use dp={layout.world_size}, {_AFTER}")
    if layout.dp > 1 and data_parallel not in IN_FLIGHT:
        why = "it sends all gradients after the backward pass"
        raise Unsupported(f"{what} data_parallel {data_parallel}", why, f"use --data-parallel bucketed, {_AFTER}")
    if layout.world_size == 1 and compile not in ("off", "block"):
        why = "a model compiled as a whole makes all gradients at the end of its backward pass"
        raise Unsupported(f"{what} compile {compile}", why, f"use --compile block, {_AFTER}")
