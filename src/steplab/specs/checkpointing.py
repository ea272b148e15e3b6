"""Activation checkpointing: which blocks save only their input and recompute their activations in the backward pass.

    none       every block saves its activations
    full       every block is recomputed
    every_N    blocks 0, N, 2N, ... are recomputed, the others save theirs
    selective  every block saves the outputs of its matmuls and of fused attention, and recomputes the rest

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", for the selective kind.
"""

import re

from steplab.errors import UserError

CHECKPOINTING = ("none", "full", "every_N", "selective")
"""The choices; N is a whole number of at least 2."""

_EVERY = re.compile(r"every_([1-9][0-9]{0,8})")


def check_checkpointing(name: str) -> None:
    """Raise UserError, listing the choices, for a name that is not one of them."""
    if _every(name) == 1:
        raise UserError("checkpointing 'every_1' would recompute every block; use full for that")
    if name not in ("none", "full", "selective") and _every(name) is None:
        choices = ", ".join(CHECKPOINTING)
        raise UserError(f"checkpointing '{name}' is not known; choose one of {choices} (with N at least 2: every_2)")


def is_recomputed(checkpointing: str, block: int) -> bool:
    """Whether a block, counted from 0, is recomputed in the backward pass, matmuls included; never for selective."""
    every = _every(checkpointing)
    return checkpointing == "full" or (every is not None and block % every == 0)


def num_recomputed(checkpointing: str, num_layers: int) -> int:
    """How many of `num_layers` blocks are recomputed in the backward pass."""
    every = 1 if checkpointing == "full" else _every(checkpointing)
    return -(-num_layers // every) if every is not None else 0


def checkpointing_remark(checkpointing: str, *, num_layers: int | None, gradients: bool) -> str | None:
    """A note that a choice has less effect than its name suggests; None if it has its full effect.

    num_layers: number of blocks of the model; None: not known. gradients: whether there is a backward pass.
    """
    if checkpointing != "none" and not gradients:
        return "checkpointing: changes nothing, because without gradients no activation is saved"
    if num_layers is not None and 1 < num_layers <= (_every(checkpointing) or 0):
        return (
            f"checkpointing {checkpointing}: only the first of {num_layers} blocks is recomputed; "
            f"take N below {num_layers} for more"
        )
    return None


def _every(name: str) -> int | None:
    """The N of every_N."""
    found = _EVERY.fullmatch(name)
    return int(found[1]) if found else None
