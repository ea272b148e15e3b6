"""Averages the gradients of one module over ranks, whatever the ranks' backward passes did.

One rule makes it impossible that ranks wait for different things: *buckets are launched in one fixed order, each once,
and then all ranks exchange what they have*. The order in which gradients become ready decides only how early a bucket
may be launched. From the exchange every rank knows two things for each parameter:

- whether any rank has a gradient. If none has, it stays None; if some have, it counts as zero on the others.
- whether any rank has a gradient that came after the launch, from a second backward pass or from a second use of a
  parameter under reentrant checkpointing. Such a bucket is launched again: with the average of the first launch, which
  is equal on all ranks and so its own average, plus what came late. By linearity this gives the average of the sums.

A bucket that is under way holds its gradients (`.grad` is None until the end), so a later backward pass makes new ones
beside it and never writes to memory that is being reduced.

A parameter without a gradient in the last step is not waited for in the next one, so that an unused parameter does not
hold back every bucket behind it. If it gets a gradient after all, that comes late.

Ranks that update their parameters by gradients that were not averaged diverge without an error. So a reducer with
gradients that are not averaged refuses the step of any torch optimizer that has their parameters: torch calls it before
each step. An update by other means is not noticed.
"""

import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any
from weakref import ReferenceType, finalize, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from steplab.errors import UserError
from steplab.parallel.agreement import StepAgreement
from steplab.parallel.buckets import Bucket, Owners
from steplab.parallel.collectives import Collectives
from steplab.parallel.grouping import grouped
from steplab.parallel.launch_order import LaunchOrder
from steplab.parallel.ownership import runs_of
from steplab.parallel.sharded_optimizer import ShardedOptimizer
from steplab.parallel.sparse import refuse_sparse_gradient
from steplab.parallel.strategies import Strategy


class GradientReducer:
    """Averages the gradients of the parameters that require them, given in the order in which they become ready."""

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        strategy: Strategy,
        make_buckets: Callable[[list[list[nn.Parameter]]], Sequence[Bucket]],
        collectives: Collectives,
        launches: LaunchOrder,
        owners: Owners | None = None,
    ) -> None:
        """`owners`: each average is on the rank that owns the parameter alone; filled once the buckets are made."""
        self.active = True
        self._rank, self._owners = collectives.rank, owners
        self._names, self._parameters = names, tuple(parameters)
        self._strategy = strategy
        kinds = [(p.dtype, p.device) for p in parameters]
        self._members = grouped([p.nbytes for p in parameters], strategy.bucket_bytes, kinds)
        self._buckets = make_buckets([[self._parameters[index] for index in group] for group in self._members])
        self._bucket_of = {index: place for place, group in enumerate(self._members) for index in group}
        self.agreement = StepAgreement(collectives, names, launches)
        self._launches = launches
        self._expected = [True] * len(self._parameters)
        self._lock = threading.Lock()  # autograd has a thread a device, and each calls hooks
        self._begin()
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(_hook(ref(self), index))
        finalize(self, register_optimizer_step_pre_hook(_step_hook(ref(self))).remove)

    def __del__(self) -> None:
        if getattr(self, "_next", 0) and not sys.is_finalizing():  # without it, it was never built
            warnings.warn(
                "a DataParallel was dropped with gradients under way: ranks may wait for each other forever; call "
                "finish_gradient_synchronization() on all ranks before",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def buckets(self) -> list[list[int]]:
        """The positions of the parameters in each bucket, in the order of launch."""
        return [list(group) for group in self._members]

    @property
    def shared_bytes(self) -> int:
        """Memory outside of torch's allocator that the buckets hold on this rank."""
        return max((bucket.shared_bytes for bucket in self._buckets), default=0)

    def ready(self, index: int) -> None:
        """Launch the buckets that are complete, now that a backward pass has accumulated a parameter's gradient."""
        with self._lock:
            if not self.active or index in self._ready:
                return
            self._ready.add(index)
            if not self._strategy.during_backward:
                return
            self._order.append(index)
            if self._expected[index]:
                self._missing[self._bucket_of[index]] -= 1
            while self._next < len(self._buckets) and self._missing[self._next] == 0:
                self._launch_next()

    def check_step(self, optimizer: Optimizer) -> None:
        """Raise UserError if the optimizer is about to update parameters by gradients that have not been averaged."""
        if not self._ready and self._owners is None:
            return
        updated = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if self._owners is not None:
            self._check_owned(optimizer, updated)
        if any(self._parameters[index] in updated for index in self._ready):
            raise UserError(
                "an optimizer's step would update parameters whose gradients are not averaged yet: call "
                "finish_gradient_synchronization() after backward, before the step"
            )

    def _check_owned(self, optimizer: Optimizer, updated: set[Any]) -> None:
        """The owners by a sharded optimizer are known to all ranks, which so raise together; else some would wait for
        those that raise, in the exchange of parameters."""
        assert self._owners is not None
        for parameter in updated:
            by = optimizer.owner(parameter) if isinstance(optimizer, ShardedOptimizer) else self._rank
            if self._owners.get(parameter, by) == by:
                continue
            raise UserError(
                "an optimizer's step would update parameters whose gradients are averaged on other ranks alone: use "
                "ShardedOptimizer(..., owners=model.owners), or build DataParallel without to_owners"
            )

    def finish(self, parts: int = 1) -> Generator[list[nn.Parameter], None, None]:
        """Average every gradient; a collective call. Gives the parameters of each part as soon as they have their
        averages, which optimizers may then use, while those of later parts are still on their way.

        A part is some buckets in the order of launch; there are at most so many, of about equal sizes.
        """
        while self._next < len(self._buckets):
            self._launch_next()
            if self._strategy.one_at_a_time:
                self._buckets[self._next - 1].wait()
        late = [parameter.grad is not None for parameter in self._parameters]
        present = [sent or came_late for sent, came_late in zip(self._sent, late, strict=True)]
        agreed = self.agreement.exchange(present, late, self._order)
        self._launch_again(agreed.late)
        sizes = [sum(self._parameters[index].nbytes for index in group) for group in self._members]
        arriving = deque(runs_of(sizes, sum(sizes) / parts))
        try:
            while arriving:
                yield self._arrived(arriving.popleft(), agreed.present)
        finally:  # the rest as well, if the caller takes no more
            for places in arriving:
                self._arrived(places, agreed.present)
            self._expected = present
            self._begin()

    def _arrived(self, places: Sequence[int], present: Sequence[bool]) -> list[nn.Parameter]:
        """Wait for the averages of some buckets and give them to their parameters."""
        found: list[nn.Parameter] = []
        self._buckets[places[-1]].wait()  # the others of the part have arrived before: one wait serves them all
        for place in places:
            for index, average in zip(self._members[place], self._buckets[place].wait(), strict=True):
                self._parameters[index].grad = average if present[index] else None
                found.append(self._parameters[index])
            self._buckets[place].release()
            self._ready.difference_update(self._members[place])
        return found

    def _begin(self) -> None:
        """Prepare for the next step, of which nothing has happened yet."""
        self._next = 0
        self._ready: set[int] = set()
        self._sent = [False] * len(self._parameters)
        self._order: list[int] = []
        self._missing = [sum(self._expected[index] for index in group) for group in self._members]

    @torch.no_grad()  # a backward pass with create_graph records what its hooks do
    def _launch_next(self) -> None:
        gradients = self._take(self._members[self._next])
        for index, gradient in zip(self._members[self._next], gradients, strict=True):
            self._sent[index] = gradient is not None
        self._launches.note(self.agreement.module)
        self._buckets[self._next].launch(gradients)
        self._next += 1

    @torch.no_grad()
    def _launch_again(self, late: Sequence[bool]) -> None:
        for bucket, members in zip(self._buckets, self._members, strict=True):
            if any(late[index] for index in members):
                self._launches.note(self.agreement.module)
                bucket.launch(bucket.add(self._take(members)))

    def _take(self, indices: Sequence[int]) -> list[Tensor | None]:
        """The gradients, which are removed from their parameters."""
        gradients = [self._parameters[index].grad for index in indices]
        for index, gradient in zip(indices, gradients, strict=True):
            if gradient is not None:
                refuse_sparse_gradient(self._names[index], gradient)
        for index in indices:
            self._parameters[index].grad = None
        return gradients


def _hook(reducer: "ReferenceType[GradientReducer]", index: int) -> Callable[[Tensor], None]:
    """A hook that calls the reducer while it exists: a parameter may outlive it and get another one."""

    def gradient_is_ready(_: Tensor) -> None:
        living = reducer()
        if living is not None:
            living.ready(index)

    return gradient_is_ready


def _step_hook(reducer: "ReferenceType[GradientReducer]") -> Callable[[Optimizer, Any, Any], None]:
    """Have the reducer check every step of an optimizer, while the reducer exists."""

    def step_begins(optimizer: Optimizer, _: Any, __: Any) -> None:
        living = reducer()
        if living is not None:
            living.check_step(optimizer)

    return step_begins
