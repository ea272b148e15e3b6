"""Data parallelism: each rank has the whole module and its part of the batch; gradients are averaged.

    model = DataParallel(module, strategy="bucketed")
    for batch in batches:
        model(batch).mean().backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()

Four strategies give the same gradients and differ in their collectives:

| strategy   | collectives                                    | launched                                       |
|------------|------------------------------------------------|------------------------------------------------|
| `naive`    | one a parameter, each waited for               | after backward                                 |
| `flat`     | one a dtype and device                         | after backward                                 |
| `overlap`  | one a parameter                                | as its gradient is ready                       |
| `bucketed` | one a bucket of at most `bucket_size_mb`       | as a bucket's gradients are ready              |

Buckets shrink towards the end of the backward pass, so that little is sent after it (sizes.py). If the loss is a mean
over the rank's batch and batches have equal sizes, averages are gradients of the mean over the whole batch.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .buckets import Bucket, CollectiveBucket, OwnedBucket, Owners, refuse_sparse
from .collectives import Collectives, check_alike, collectives_of
from .errors import UserError
from .peer_memory import PeerMemory, open_peer_memory
from .reduction import GradientReducer, launch_order_of, strategy_of
from .sizes import owners_in

TRANSPORTS = ("collectives", "peer_copy")
Groups = list[list[nn.Parameter]]
_PREFIX = "module."


class DataParallel(nn.Module):
    """Wrap a module, and average its gradients over the ranks of a group.

    All ranks construct it together, after moving the module to its device. They check that modules and settings are
    equal, and take rank 0's parameters and buffers. Buffers are not synchronised after that.

    `forward`, every attribute and the names in `state_dict()`, `named_parameters()` and `named_buffers()` are the inner
    module's, so a checkpoint of either loads into the other.

    A parameter without a gradient on a rank counts as zero there; if no rank has one, it stays None. Parameters that
    require no gradient at the start are not averaged.

    Args:
        transport: `collectives` (NCCL, gloo), or `peer_copy`, by the copy engines of one host's GPUs
            (peer_copies.py), with device memory for a second copy of all gradients, outside torch's allocator.
        to_owners: each gradient is averaged only on its parameter's owner, with half the traffic, and becomes None
            elsewhere, for `ShardedOptimizer(..., owners=model.owners)`. Gradients must be dropped or zeroed before
            the next backward pass. Code that needs all gradients (a norm for clipping) must combine all ranks'.

    Several DataParallel modules in one group must run backward and synchronise in the same order on all ranks. Every
    synchronisation compares orders and raises UserError on all ranks if they differ. Ranks already in a collective wait
    until its timeout.

    Synchronise after every backward pass before dropping this: freeing peer copies' memory waits for messages that
    would never be sent. A RuntimeWarning reports this.
    """

    def __init__(
        self,
        module: nn.Module,
        strategy: str = "bucketed",
        bucket_size_mb: float = 25.0,
        group: dist.ProcessGroup | Collectives | None = None,
        transport: str | PeerMemory = "collectives",
        to_owners: bool = False,
    ) -> None:
        """Raises UserError for an invalid setting, without a process group, or if ranks differ. Raises Unsupported for
        sparse gradients or an unsupported transport.
        """
        super().__init__()
        chosen = strategy_of(strategy, bucket_size_mb)
        check_transport(transport)
        self.module = module
        collectives = collectives_of(group)
        named = transport if isinstance(transport, str) else "peer_copy"
        settings = {
            "strategy": strategy, "bucket_size_mb": bucket_size_mb, "transport": named, "to_owners": to_owners,
        }  # fmt: skip
        check_alike(collectives, settings, [*module.named_parameters(), *module.named_buffers()])
        refuse_sparse(module, "data parallelism", "buckets")
        _broadcast_from_first(module, collectives)
        trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        trained.reverse()  # backward reaches last what forward used first
        self._frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        self._trained_names = [name for name, _ in trained]
        # Backward's threads have the gradients' device as current, and the caller may have another; the driver and
        # Triton use the current one for peer copies. A negative number is no device and has no effect.
        self._gpu = next((p.get_device() for _, p in trained if p.is_cuda), -1)
        self._owners: dict[Tensor, int] | None = {} if to_owners else None

        def make_buckets(groups: list[list[nn.Parameter]]) -> Sequence[Bucket]:
            if self._owners is not None:
                found = owners_in([[p.numel() for p in members] for members in groups], collectives.size)
                self._owners.update(zip(chain(*groups), chain(*found), strict=True))
            return buckets_of(groups, transport, collectives, group, self._owners)

        with torch.cuda.device(self._gpu):
            self._reducer = GradientReducer(
                self._trained_names,
                [p for _, p in trained],
                chosen,
                make_buckets,
                collectives,
                launch_order_of(group),
                self._owners,
            )
        nn.Module.register_load_state_dict_pre_hook(self, _with_prefix)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Average the gradients since the last call; every rank calls it before the optimizer's step.

        Until then `.grad` lacks gradients in transit, and optimizers' `step` raises UserError. To discard a failed
        backward pass, call this on all ranks, then `zero_grad`.

        Raises UserError within `no_sync`, for a parameter unfrozen since, and for ranks that synchronise other modules
        or orders.
        """
        for _ in self.finish_in_parts(1):
            pass

    def finish_in_parts(self, parts: int = 4) -> Generator[list[nn.Parameter], None, None]:
        """Like finish_gradient_synchronization, but yield parameters as soon as they have averages, to update them
        early:

            for parameters in model.finish_in_parts():
                update.of(parameters)  # steplab.ops.update.UpdateByParts(optimizer)

        Parts are whole buckets of about equal sizes; more than a few leave the GPU idle between updates. If the caller
        stops early, the rest is still waited for.
        """
        if not self._reducer.active:
            raise UserError("gradients cannot be synchronised within no_sync: leave it first")
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise UserError(f"{name} required no gradient when DataParallel was built: build it again")
        arriving = self._reducer.finish(parts)
        try:
            while True:
                with torch.cuda.device(self._gpu):
                    parameters = next(arriving, None)
                if parameters is None:
                    return
                yield parameters
        finally:
            with torch.cuda.device(self._gpu):
                arriving.close()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._reducer.active = self._reducer.active, False
        try:
            yield
        finally:
            self._reducer.active = before

    @property
    def buckets(self) -> list[list[str]]:
        return [[self._trained_names[index] for index in group] for group in self._reducer.members]

    @property
    def owners(self) -> Mapping[Tensor, int]:
        """Map each parameter to the rank that has its averaged gradient; empty without `to_owners`."""
        return self._owners or {}

    @property
    def shared_bytes(self) -> int:
        """Device bytes that `peer_copy` allocates outside torch's allocator; else 0."""
        return self._reducer.shared_bytes

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the same state on every rank. Raises UserError for `assign=True`, which would separate parameters from
        buckets.
        """
        if assign:
            raise UserError("assign=True would replace parameters: load into the module before building DataParallel")
        return self.module.load_state_dict(state_dict, strict)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def __getstate__(self) -> Any:
        raise UserError(
            "a DataParallel cannot be copied or pickled: copy its `module` and build another, or save state_dict()"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not there yet
                raise
            return getattr(self.module, name)


@torch.no_grad()
def _broadcast_from_first(module: nn.Module, collectives: Collectives) -> None:
    tensors = [*module.parameters(), *module.buffers()]
    sent = [tensor.detach().contiguous() for tensor in tensors]
    for pending in [collectives.broadcast(tensor, source=0) for tensor in sent]:
        pending.wait()
    for tensor, received in zip(tensors, sent, strict=True):
        if received.data_ptr() != tensor.data_ptr():
            _each_element_once(tensor).copy_(_each_element_once(received, tensor.stride()))


def _each_element_once(tensor: Tensor, strides: Sequence[int] | None = None) -> Tensor:
    for dim, stride in enumerate(tensor.stride() if strides is None else strides):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _with_prefix(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    for key in list(state):
        if key.startswith(prefix):
            state[prefix + _PREFIX + key.removeprefix(prefix)] = state.pop(key)


def check_transport(transport: str | PeerMemory) -> None:
    if isinstance(transport, str) and transport not in TRANSPORTS:
        raise UserError(f"there is no transport {transport!r}: choose {', '.join(TRANSPORTS)}")


def buckets_of(
    groups: Groups,
    transport: str | PeerMemory,
    collectives: Collectives,
    group: dist.ProcessGroup | Collectives | None,
    owners: Owners | None = None,
) -> Sequence[Bucket]:
    """Build the buckets; for peer_copy a collective call."""
    if transport != "collectives" and groups and collectives.size > 1:
        from .peer_copies import peer_buckets  # it needs Triton

        memory = open_peer_memory(transport, collectives, group, list(chain(*groups)))
        return peer_buckets(groups, memory, owners)
    if owners is not None:
        return [OwnedBucket(members, [owners[p] for p in members], collectives) for members in groups]
    return [CollectiveBucket(members, collectives) for members in groups]
