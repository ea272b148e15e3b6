"""Average one module's gradients over ranks, even if ranks' backward passes differ.

All ranks launch each bucket once, in one order, then exchange two flags per parameter, so their collectives match. A
gradient that is absent on some ranks counts as zero there. A bucket with a late gradient, one that came after its
launch, is launched again, with its average plus the late gradients; by linearity the result is the average of the sums.

A launched bucket holds its gradients (`.grad` is None until the end), so later backward passes never write to them. A
hook refuses optimizer steps with unaveraged gradients. The exchange also compares the ranks' orders of launches, over
all modules of a group.
"""

import sys
import threading
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .buckets import Bucket, Owners, refuse_sparse_gradient, with_late
from .collectives import Collectives
from .errors import UserError
from .sharded_optimizer import ShardedOptimizer
from .sizes import grouped, runs_of


class Strategy(NamedTuple):
    bucket_bytes: float
    """Largest size of a bucket with several gradients; 0: one bucket per gradient."""
    during_backward: bool
    one_at_a_time: bool
    """Wait for each collective before launching the next."""


def strategy_of(name: str, bucket_size_mb: float) -> Strategy:
    """The strategy of this name; `bucket_size_mb` (1e6 bytes) applies to `bucketed`. Raises UserError for an unknown
    name or a size that is not positive.
    """
    if not bucket_size_mb > 0:
        raise UserError(f"a bucket of {bucket_size_mb} MB holds nothing: give a positive bucket_size_mb")
    strategies = {
        "naive": Strategy(0, during_backward=False, one_at_a_time=True),
        "flat": Strategy(float("inf"), during_backward=False, one_at_a_time=False),
        "overlap": Strategy(0, during_backward=True, one_at_a_time=False),
        "bucketed": Strategy(bucket_size_mb * 1e6, during_backward=True, one_at_a_time=False),
    }
    if name not in strategies:
        raise UserError(f"there is no strategy {name!r}: choose {', '.join(strategies)}")
    return strategies[name]


class LaunchOrder:
    def __init__(self) -> None:
        self._num_modules = 0
        self.checksum = 0

    def join(self) -> int:
        """Register a module and return its number, equal on all ranks."""
        self._num_modules += 1
        return self._num_modules

    def note(self, module: int) -> None:
        self.checksum = zlib.crc32(module.to_bytes(8, "little"), self.checksum)


_orders: WeakKeyDictionary[Any, LaunchOrder] = WeakKeyDictionary()


def launch_order_of(group: dist.ProcessGroup | Collectives | None) -> LaunchOrder:
    key = dist.group.WORLD if group is None else group
    return _orders.setdefault(key, LaunchOrder())


_PADDED = 4096
"""Exchanges are padded to a multiple of this, to compare modules of different sizes."""


class GradientReducer:
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
        """With `owners`, which `make_buckets` fills, only a parameter's owner gets its average."""
        self.active = True
        self._owners = owners
        self._names, self._parameters = names, tuple(parameters)
        self._strategy = strategy
        kinds = [(p.dtype, p.device) for p in parameters]
        self.members = grouped([p.nbytes for p in parameters], strategy.bucket_bytes, kinds)
        self._buckets = make_buckets([[self._parameters[index] for index in group] for group in self.members])
        self._bucket_of = {index: place for place, group in enumerate(self.members) for index in group}
        self._collectives, self._launches, self._module = collectives, launches, launches.join()
        self._expected = [True] * len(self._parameters)
        self._lock = threading.Lock()  # autograd has a thread a device, and each calls hooks
        self._begin()
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(_hook(ref(self), GradientReducer.ready, index))
        checks = _hook(ref(self), GradientReducer.check_step)
        finalize(self, register_optimizer_step_pre_hook(checks).remove)

    def __del__(self) -> None:
        under_way = getattr(self, "_next", 0)  # missing if construction failed
        if under_way and not self._has_failed and not sys.is_finalizing():
            warnings.warn(
                "a DataParallel was dropped with gradients under way: ranks may wait for each other forever; call "
                "finish_gradient_synchronization() on all ranks before",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def shared_bytes(self) -> int:
        return max((bucket.shared_bytes for bucket in self._buckets), default=0)

    def ready(self, index: int, _: Tensor) -> None:
        with self._lock:
            if not self.active or index in self._ready:
                return
            self._ready.add(index)
            if not self._strategy.during_backward:
                return
            if self._expected[index]:
                self._missing[self._bucket_of[index]] -= 1
            with self._told_by_its_error():
                while self._next < len(self._buckets) and self._missing[self._next] == 0:
                    self._launch_next()

    def check_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Raise UserError if unaveraged gradients would update parameters."""
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
        """Raise UserError if the optimizer would update a parameter on a rank without its average. A ShardedOptimizer
        raises on all ranks alike: no rank may wait alone in the exchange of parameters.
        """
        assert self._owners is not None
        for parameter in updated:
            by = optimizer.owner(parameter) if isinstance(optimizer, ShardedOptimizer) else self._collectives.rank
            if self._owners.get(parameter, by) == by:
                continue
            raise UserError(
                "an optimizer's step would update parameters whose gradients are averaged only on other ranks: use "
                "ShardedOptimizer(..., owners=model.owners), or build DataParallel without to_owners"
            )

    def finish(self, parts: int = 1) -> Generator[list[nn.Parameter], None, None]:
        """Average all gradients; a collective call. Yields the parameters in at most `parts` parts, as their averages
        arrive.
        """
        with self._told_by_its_error():
            while self._next < len(self._buckets):
                self._launch_next()
                if self._strategy.one_at_a_time:
                    self._buckets[self._next - 1].wait()
            late = [parameter.grad is not None for parameter in self._parameters]
            present = [sent or came_late for sent, came_late in zip(self._sent, late, strict=True)]
            on_any, late_on_any = self._exchange(present, late)
            self._launch_again(late_on_any)
        sizes = [sum(self._parameters[index].nbytes for index in group) for group in self.members]
        arriving = deque(runs_of(sizes, sum(sizes) / parts))
        try:
            while arriving:
                yield self._arrived(arriving.popleft(), on_any)
        finally:  # the rest as well, if the caller stops early
            with self._told_by_its_error():
                for places in arriving:
                    self._arrived(places, on_any)
            self._expected = present
            self._begin()

    def _exchange(self, present: Sequence[bool], late: Sequence[bool]) -> tuple[list[bool], list[bool]]:
        """Combine two flags per parameter over ranks: present, and late (after its bucket's launch). Returns flags that
        hold on any rank. Raises UserError on all ranks if modules or launch orders differ.
        """
        compared = self._module, self._launches.checksum
        values = [*compared, *(-value for value in compared), *present, *late]
        values += [0] * (-len(values) % _PADDED)
        largest = self._collectives.host_maximum(torch.tensor(values, dtype=torch.int64)).tolist()
        same_module, same_launches = largest[0] == -largest[2], largest[1] == -largest[3]
        if not same_module or not same_launches:
            different = "sent gradients of several DataParallel in different orders"
            raise UserError(
                f"the ranks {different if same_module else 'synchronise different DataParallel'}: run their backward "
                "passes and finish_gradient_synchronization() in one order on all ranks, one module after the other"
            )
        flags, count = [bool(flag) for flag in largest[4:]], len(present)
        return flags[:count], flags[count : 2 * count]

    @contextmanager
    def _told_by_its_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._has_failed = True
            raise

    def _arrived(self, places: Sequence[int], present: Sequence[bool]) -> list[nn.Parameter]:
        found: list[nn.Parameter] = []
        self._buckets[places[-1]].wait()  # the others of the part have arrived before: one wait serves all
        for place in places:
            for index, average in zip(self.members[place], self._buckets[place].wait(), strict=True):
                self._parameters[index].grad = average if present[index] else None
                found.append(self._parameters[index])
            self._buckets[place].release()
            self._ready.difference_update(self.members[place])
        return found

    def _begin(self) -> None:
        self._next, self._has_failed = 0, False
        self._ready: set[int] = set()
        self._sent = [False] * len(self._parameters)
        self._missing = [sum(self._expected[index] for index in group) for group in self.members]

    @torch.no_grad()  # a backward pass with create_graph records what its hooks do
    def _launch_next(self) -> None:
        gradients = self._take(self.members[self._next])
        for index, gradient in zip(self.members[self._next], gradients, strict=True):
            self._sent[index] = gradient is not None
        self._launches.note(self._module)
        self._buckets[self._next].launch(gradients)
        self._next += 1

    @torch.no_grad()
    def _launch_again(self, late: Sequence[bool]) -> None:
        size = 1 if self._owners is None else self._collectives.size
        for bucket, members in zip(self._buckets, self.members, strict=True):
            if any(late[index] for index in members):
                self._launches.note(self._module)
                gradients = self._take(members)
                bucket.launch(with_late(bucket.wait(), gradients, size))

    def _take(self, indices: Sequence[int]) -> list[Tensor | None]:
        gradients = [self._parameters[index].grad for index in indices]
        for index, gradient in zip(indices, gradients, strict=True):
            if gradient is not None:
                refuse_sparse_gradient(self._names[index], gradient)
        for index in indices:
            self._parameters[index].grad = None
        return gradients


def _hook(reducer: "ReferenceType[GradientReducer]", method: Callable[..., None], *given: Any) -> Callable[..., None]:
    """A hook that does nothing once the reducer is gone: a parameter may outlive it."""

    def called(*arguments: Any) -> None:
        living = reducer()
        if living is not None:
            method(living, *given, *arguments)

    return called
