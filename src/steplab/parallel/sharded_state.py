"""Optimizer state between ranks and files.

A *full* state dict has the form that torch gives an unsharded optimizer: `state` by the parameter's position over all
groups, and `param_groups`. A *shard* is one rank's: the same form, with the state of what that rank owns alone, and
under `shard` its rank, the number of ranks, and the positions that it owns (a parameter without a gradient has no state
yet, so the positions cannot be read from `state`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .collectives import Collectives
from .errors import UserError

StateDict = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Sent:
    """Stands in a description of state for a tensor that is sent separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def merge_shards(shards: Sequence[StateDict]) -> StateDict:
    """The full state dict made of every rank's shard, to be loaded on any number of ranks, or without sharding.

    Tensors are not copied. Raises UserError unless the shards are those of all ranks of one run, each once.
    """
    if not all("shard" in shard for shard in shards) or not shards:
        raise UserError("only shards can be merged; give what state_dict() returned on each rank")
    marks = sorted((shard["shard"]["world_size"], shard["shard"]["rank"]) for shard in shards)
    size = marks[0][0]
    if marks != [(size, rank) for rank in range(size)]:
        had = ", ".join(f"rank {rank} of {world_size}" for world_size, rank in marks)
        raise UserError(f"these shards are not all of one run: {had}; give the shard of every rank, each once")
    state = {key: value for shard in shards for key, value in shard["state"].items()}
    return {"state": _in_order(state), "param_groups": shards[0]["param_groups"]}


def gather(shard: StateDict, device: torch.device, ranks: Collectives) -> StateDict:
    """The full state dict on rank 0, as a copy in host memory; an empty dict on other ranks. All ranks must call it.

    Tensors go one at a time and by broadcast, so no device holds more than one of them beyond its own, and no
    communicators for pairs of ranks are set up. `device` is where the parameters are.
    """
    sent: list[Tensor] = []

    def described(tensor: Tensor) -> Any:
        if tensor.device != device:  # step counters stay on the host, where NCCL cannot read them: small, so pickled
            return tensor.detach().cpu()
        sent.append(tensor.detach())
        return _Sent(tuple(tensor.shape), tensor.dtype)

    described_state = _replace(shard["state"], Tensor, described)
    following = iter(sent)
    state: dict[Any, Any] = {}
    for owner, description in enumerate(ranks.host_gather(described_state)):

        def received(mark: _Sent, owner: int = owner) -> Tensor | None:
            tensor = torch.empty(mark.shape, dtype=mark.dtype, device=device)
            if owner == ranks.rank:
                tensor.copy_(next(following))
            ranks.broadcast(tensor, source=owner).wait()
            return tensor.cpu() if ranks.rank == 0 else None

        state.update(_replace(description, _Sent, received))
    return {"state": _in_order(state), "param_groups": shard["param_groups"]} if ranks.rank == 0 else {}


def _replace(value: Any, kind: type, replacement: Callable[[Any], Any]) -> Any:
    """The value with each leaf of a kind replaced, in the containers that optimizers keep their state in."""
    if isinstance(value, kind):
        return replacement(value)
    if isinstance(value, dict):
        return {key: _replace(item, kind, replacement) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replace(item, kind, replacement) for item in value)
    return value


def _in_order(state: dict[Any, Any]) -> dict[Any, Any]:
    """The state by position, followed by what belongs to no parameter."""
    return dict(sorted(state.items(), key=lambda item: (not isinstance(item[0], int), str(item[0]).zfill(12))))


def pack(groups: Sequence[dict[str, Any]], position: Callable[[Any], int]) -> list[dict[str, Any]]:
    """Parameter groups with positions in place of the parameters."""
    return [
        {**options(group, names=True), "params": [position(param) for param in group["params"]]} for group in groups
    ]


def options(group: dict[str, Any], names: bool = False) -> dict[str, Any]:
    """The options of a parameter group, without its parameters."""
    hidden = ("params",) if names else ("params", "param_names")
    return {key: value for key, value in group.items() if key not in hidden}


def check_loadable(state_dict: StateDict, groups: Sequence[dict[str, Any]], owned: Sequence[int]) -> None:
    """Raise UserError unless the state dict is for these groups and has what this rank owns."""
    saved = [len(group["params"]) for group in state_dict.get("param_groups", [])]
    present = [len(group["params"]) for group in groups]
    if saved != present:
        raise UserError(
            f"the state to load has parameter groups of {saved} parameters, and this optimizer has {present}; "
            "build the optimizer with the groups it was saved with"
        )
    mark = state_dict.get("shard")
    if mark is not None and not set(owned) <= set(mark["params"]):
        raise UserError(
            f"this is the shard of rank {mark['rank']} of {mark['world_size']}, and parameters are assigned otherwise "
            "here; load what merge_shards makes of all shards, or what state_dict(gather=True) gave"
        )
