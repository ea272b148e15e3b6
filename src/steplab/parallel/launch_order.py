"""The order in which the modules of one group of ranks launch their buckets, which has to be the same on all ranks.

Collectives are matched by their order alone: if ranks run the backward passes of two modules in different orders,
gradients of different modules are averaged and nothing fails. So each group numbers its modules and keeps a checksum of
whose buckets were launched when, and the ranks compare both at every synchronisation (agreement.py).
"""

import zlib
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from steplab.parallel.collectives import Collectives


class LaunchOrder:
    """What the modules of one group have launched on this rank."""

    def __init__(self) -> None:
        self._num_modules = 0
        self.checksum = 0
        """A checksum of the modules' numbers, one for each launch in order."""

    def join(self) -> int:
        """The number of a new module; the same on all ranks, as they build their modules together."""
        self._num_modules += 1
        return self._num_modules

    def note(self, module: int) -> None:
        """Count a launch of this module."""
        self.checksum = zlib.crc32(module.to_bytes(8, "little"), self.checksum)


_orders: WeakKeyDictionary[Any, LaunchOrder] = WeakKeyDictionary()


def launch_order_of(group: dist.ProcessGroup | Collectives | None) -> LaunchOrder:
    """The order of launches in a group, which all modules of this process that were given the group share."""
    key = dist.group.WORLD if group is None else group
    return _orders.setdefault(key, LaunchOrder())
