"""A head start for Python, so that the device never waits for it in what is timed.

In training the host runs ahead of the device. In a loop of a few steps it begins level, and a slow host never gets
ahead: then what is timed has the device's waits for Python in it, and on several ranks each one's waits for all the
others'. Where the time of the device is what is asked for, it is held, idle, before that begins, for longer than Python
takes to start the work; then the ranks meet on the device, and it begins on all of them at once.

How far ahead a host can get is limited by the queue of launches that the driver keeps, some thousand kernels. It can be
asked for a longer one before it is first used.
"""

import os

import torch

from steplab.measurement.machine.device import Device
from steplab.parallel.collectives import Collectives

_QUEUES = "CUDA_SCALE_LAUNCH_QUEUES"
_LONGEST = "4x"
"""The longest launch queue that CUDA offers."""
_MARGIN = 1.5
"""Factor on the time that Python took, because it takes longer at times."""


def lengthen_launch_queues() -> None:
    """Ask CUDA for its longest queue of launches, unless the user has asked for another; before its first use."""
    if torch.version.cuda is not None:
        os.environ.setdefault(_QUEUES, _LONGEST)


class HeadStart:
    """How long a device is held before what is timed: the same on all ranks, which call everything here together.

    Where the host is the device there is nothing to be ahead of, and nothing is held.
    """

    def __init__(self, device: Device, collectives: Collectives, longest_s: float) -> None:
        """`longest_s`: holding for longer has no use, as Python has filled the queue of launches by then, or waits for
        the device in the work itself."""
        self._device, self._collectives, self._longest_s = device, collectives, longest_s
        self._token = torch.zeros(1, device=device.torch_device)
        self.seconds = 0.0
        """For so long."""
        if device.asynchronous:  # the first time of either takes long, and is no part of a hold
            device.hold(1e-3)
            self._meet()
            device.synchronize()

    def hold(self) -> None:
        """Have the device do nothing for that long; returns at once."""
        if self._device.asynchronous:
            self._device.hold(self.seconds)

    def give(self) -> None:
        """The same, and then until every rank's has got so far."""
        self.hold()
        if self._device.asynchronous:
            self._meet()

    def lengthen(self, started_s: float) -> bool:
        """Make it long enough for work that took Python so long to start, on the slowest rank; whether it got longer.

        A collective call.
        """
        slowest_s = max(self._collectives.host_gather(started_s))
        before_s, self.seconds = self.seconds, max(self.seconds, min(_MARGIN * slowest_s, self._longest_s))
        return self.seconds > before_s

    def _meet(self) -> None:
        self._collectives.all_reduce(self._token, average=False).wait()
