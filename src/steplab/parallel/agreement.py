"""What the ranks have to agree on, once at the start and then at every step, exchanged from CPU to CPU."""

import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from steplab.errors import UserError, warn_caller
from steplab.parallel.collectives import Collectives
from steplab.parallel.launch_order import LaunchOrder

_PADDED = 4096
"""Numbers in an exchange are padded to a multiple of it, so that modules of different sizes are told apart as well."""


def check_alike(collectives: Collectives, settings: Mapping[str, Any], tensors: Mapping[str, str]) -> None:
    """Raise UserError, on all ranks, if they differ in a setting, in their tensors, or in the form of a tensor.

    `settings` are the user's, by name; `tensors` has the form of each parameter and buffer in words, by name.
    """
    everyone = collectives.host_gather((dict(settings), dict(tensors)))
    first_settings, first_tensors = everyone[0]
    for rank, (others_settings, others_tensors) in enumerate(everyone):
        for name, value in first_settings.items():
            if others_settings[name] != value:
                raise UserError(
                    f"{name} is {value!r} on rank 0 and {others_settings[name]!r} on rank {rank}: "
                    "give every rank the same"
                )
        for name in [*first_tensors, *others_tensors]:
            here, there = first_tensors.get(name, "absent"), others_tensors.get(name, "absent")
            if here != there:
                raise UserError(
                    f"{name} is {here} on rank 0 and {there} on rank {rank}: every rank has to build the same module"
                )
        if list(first_tensors) != list(others_tensors):
            raise UserError(
                f"rank 0 and rank {rank} have their parameters and buffers in another order: "
                "every rank has to build the same module in the same way"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreed:
    """What all ranks know of a step."""

    present: list[bool]
    """For each parameter, whether any rank has a gradient."""
    late: list[bool]
    """For each parameter, whether any rank has a gradient that came after its bucket was launched."""


class StepAgreement:
    """One exchange per step, which also compares the order in which gradients became ready.

    Orders are compared by a checksum in that exchange; the ranks send each other the orders only if it differs. The
    first difference is kept and warned of; after that orders are no longer compared. Whether the ranks synchronise the
    same module, and have launched the buckets of all modules in one order, is compared every time.
    """

    def __init__(self, collectives: Collectives, names: Sequence[str], launches: LaunchOrder) -> None:
        self._collectives = collectives
        self._names = names
        self._launches = launches
        self.module = launches.join()
        """The module's number in its group."""
        self.difference: str | None = None

    def exchange(self, present: Sequence[bool], late: Sequence[bool], order: Sequence[int]) -> Agreed:
        """Give a flag per parameter and the order of readiness on this rank; get the flags that hold on any rank.

        Raises UserError, on all ranks, if they synchronise different modules or have launched in different orders.
        """
        checksum = 0 if self.difference else zlib.crc32(array("q", order).tobytes())
        compared = self.module, self._launches.checksum, checksum
        values = [*compared, *(-value for value in compared), *present, *late]
        values += [0] * (-len(values) % _PADDED)
        largest = self._collectives.host_maximum(torch.tensor(values, dtype=torch.int64)).tolist()
        count, num_compared = len(present), len(compared)
        same_module, same_launches, same_order = (
            largest[place] == -largest[place + num_compared] for place in range(num_compared)
        )
        if not same_module or not same_launches:
            different = "sent gradients of several DataParallel in different orders"
            raise UserError(
                f"the ranks {different if same_module else 'synchronise different DataParallel'}: run their backward "
                "passes and finish_gradient_synchronization() in one order on all ranks, one module after the other"
            )
        if not same_order:
            self._compare(self._collectives.host_gather(list(order)))
        flags = [bool(flag) for flag in largest[2 * num_compared :]]
        return Agreed(present=flags[:count], late=flags[count : 2 * count])

    def _compare(self, orders: list[list[int]]) -> None:
        common = set(orders[0]).intersection(*orders)  # a parameter without a gradient has no place in the order
        alike = [[index for index in order if index in common] for order in orders]
        for rank, order in enumerate(alike):
            for place, (expected, found) in enumerate(zip(alike[0], order, strict=True), start=1):
                if expected != found:
                    self.difference = (
                        f"gradients become ready in another order on rank {rank} than on rank 0: as number {place} "
                        f"came {self._names[found]} there and {self._names[expected]} on rank 0"
                    )
                    told = (
                        f"{self.difference}; buckets are still launched in one fixed order, so the result is correct, "
                        "but a rank that is early waits for the others"
                    )
                    warn_caller(RuntimeWarning(told))
                    return
