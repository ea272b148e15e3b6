"""The ways in which gradients are sent, by name: collectives, or copies between GPUs of one host."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from steplab.errors import Unsupported, UserError
from steplab.parallel.buckets import Bucket, Owners
from steplab.parallel.collective_buckets import CollectiveBucket
from steplab.parallel.collectives import Collectives
from steplab.parallel.owned_buckets import OwnedBucket
from steplab.parallel.peer_copies import peer_buckets
from steplab.parallel.peer_memory import PeerMemory
from steplab.parallel.symmetric_memory import SymmetricMemory

TRANSPORTS = ("collectives", "peer_copy")
WIRE_DTYPES = {None: None, "bf16": torch.bfloat16}

Groups = list[list[nn.Parameter]]
_PEER_COPY, _INSTEAD = "the transport peer_copy", "use transport='collectives'"


def check_transport(transport: str | PeerMemory, compress: str | None, to_owners: bool = False) -> None:
    """Raise UserError for an unknown name, and Unsupported for a combination that does not work."""
    if isinstance(transport, str) and transport not in TRANSPORTS:
        raise UserError(f"there is no transport {transport!r}: choose {', '.join(TRANSPORTS)}")
    if compress not in WIRE_DTYPES:
        raise UserError(f"there is no compression {compress!r}: choose bf16, or None to send gradients as they are")
    if compress is not None and transport != "collectives":
        what = f"compression to {compress} with the transport peer_copy"
        raise Unsupported(what, "it copies gradients as they are", "use transport='collectives', or no compression")
    if compress is not None and to_owners:
        what = f"compression to {compress} of gradients that go to owners"
        raise Unsupported(what, "they are reduced as they are", "leave compress or to_owners out")


def bucket_maker(
    transport: str | PeerMemory,
    compress: str | None,
    collectives: Collectives,
    group: dist.ProcessGroup | Collectives | None,
    owners: Owners | None = None,
) -> Callable[[Groups], Sequence[Bucket]]:
    """The function that makes the buckets of groups of parameters; a collective call if the transport is peer_copy.

    With a PeerMemory as the transport, gradients are copied through that. With `owners`, of all parameters, each
    gradient is averaged on its parameter's owner alone.
    """

    def by_collectives(groups: Groups) -> Sequence[Bucket]:
        if owners is not None:
            return [OwnedBucket(members, [owners[p] for p in members], collectives) for members in groups]
        return [CollectiveBucket(members, WIRE_DTYPES[compress], collectives) for members in groups]

    def by_copies(groups: Groups) -> Sequence[Bucket]:
        if not groups or collectives.size == 1:
            return by_collectives(groups)
        parameters = [parameter for members in groups for parameter in members]
        return peer_buckets(groups, open_peer_memory(transport, collectives, group, parameters), owners)

    return by_collectives if transport == "collectives" else by_copies


def open_peer_memory(
    transport: str | PeerMemory,
    collectives: Collectives,
    group: dist.ProcessGroup | Collectives | None,
    parameters: Sequence[nn.Parameter],
) -> PeerMemory:
    """The given PeerMemory, or that of the GPUs on which these parameters, or their gradients, are; a collective call.

    Raises Unsupported where they cannot be copied, or the ranks do not reach each other's memory.
    """
    _refuse_uncopied(parameters)
    if not isinstance(transport, str):
        return transport
    process_group = group if isinstance(group, dist.ProcessGroup) else None
    if process_group is None and collectives.size != dist.get_world_size():
        what = f"{_PEER_COPY} among {collectives.size} of {dist.get_world_size()} processes"
        raise Unsupported(what, "it has to know their group", "give the process group, not its collectives")
    return SymmetricMemory(collectives, process_group, parameters[0].device)


def _refuse_uncopied(parameters: Sequence[nn.Parameter]) -> None:
    devices = sorted({str(parameter.device) for parameter in parameters})
    if len(devices) > 1:
        what, why = f"{_PEER_COPY} of gradients on {' and '.join(devices)}", "a process's gradients are on one device"
        raise Unsupported(what, why, _INSTEAD)
    if any(parameter.is_complex() for parameter in parameters):
        raise Unsupported(f"{_PEER_COPY} of complex gradients", "it makes means of real numbers", _INSTEAD)
