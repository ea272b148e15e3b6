"""Activation checkpointing: blocks save only their input, and recompute activations in the backward pass.

`auto` is resolved before anything is built or recorded (lab.checkpointing), and per layout by plan.layout.search.
every_N recomputes blocks 0, N, 2N and so on; first_K is Megatron-LM's recompute method "block".

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", for the selective kind.
"""

import re

from steplab.errors import UserError

CHECKPOINTING = {
    "none": "",
    "full": "every block's",
    "every_N": "every Nth block's, as every_2",
    "first_K": "the first K blocks', as first_12",
    "selective": "all except outputs of matmuls and fused attention",
    "selective_2": "the same, and every second linear layer of a block, as in torchtitan",
    "auto": "the first of none, selective, first_K and full with a fitting predicted memory",
}
"""The choices, each with the activations that it recomputes. N is at least 2, K at least 1."""
AUTO = "auto"
SELECTIVE = ("selective", "selective_2")

_NUMBERED = re.compile(r"(every|first)_([1-9][0-9]{0,8})")


def check_checkpointing(name: str) -> None:
    if name == "every_1":
        raise UserError("checkpointing 'every_1' would recompute every block; use full for that")
    if name not in ("none", "full", *SELECTIVE, AUTO) and not _NUMBERED.fullmatch(name):
        choices = ", ".join(CHECKPOINTING)
        raise UserError(
            f"checkpointing '{name}' is not known; choose one of {choices} (every_2, with N at least 2; first_12)"
        )


def is_recomputed(checkpointing: str, block: int) -> bool:
    """True if the whole block is recomputed, matmuls included; blocks count from 0. False for selective. Raises
    UserError for auto, which must be resolved first."""
    if checkpointing == AUTO:
        raise UserError("checkpointing auto is not chosen here; name none, selective, full, first_K or every_N")
    if (first := num_first(checkpointing)) is not None:
        return block < first
    return (checkpointing == "full" or checkpointing.startswith("every_")) and block % period_of(checkpointing) == 0


def num_recomputed(checkpointing: str, num_layers: int) -> int:
    if (first := num_first(checkpointing)) is not None:
        return min(first, num_layers)
    return -(-num_layers // period_of(checkpointing)) if is_recomputed(checkpointing, 0) else 0


def differs_by_block(checkpointing: str) -> bool:
    return _NUMBERED.fullmatch(checkpointing) is not None


def checkpointing_remark(checkpointing: str, *, num_layers: int | None, gradients: bool) -> str | None:
    """Note if checkpointing has less effect than its name suggests, else None. `num_layers`: None if unknown.
    `gradients`: there is a backward pass."""
    if checkpointing != "none" and not gradients:
        return "checkpointing: no effect, because without gradients no activation is saved"
    if num_layers is not None and num_layers < (num_first(checkpointing) or 0):
        return f"checkpointing {checkpointing}: there are {num_layers} blocks, and all of them are recomputed"
    if num_layers is not None and 1 < num_layers <= period_of(checkpointing):
        return (
            f"checkpointing {checkpointing}: only the first of {num_layers} blocks is recomputed; "
            f"take N below {num_layers} for more"
        )
    return None


def period_of(checkpointing: str) -> int:
    return _number("every", checkpointing) or 1


def num_first(checkpointing: str) -> int | None:
    return _number("first", checkpointing)


def _number(kind: str, name: str) -> int | None:
    found = _NUMBERED.fullmatch(name)
    return int(found[2]) if found and found[1] == kind else None
