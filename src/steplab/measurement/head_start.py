"""A head start for Python, so that the device never waits for it in what is timed.

In training the host runs ahead of the device. In a loop of a few steps it begins level, and a slow host never gets
ahead: then what is timed has the device's waits for Python in it, and on several ranks each one's waits for all the
others'. Where the time of the device is what is asked for, it is held, idle, before that begins, for about as long as
Python takes to start the work; then the ranks meet on the device, and it begins on all of them at once.

How far ahead a host can get is limited by the queue of launches that the driver keeps, some thousand kernels. It can be
asked for a longer one before it is first used.
"""

import os

import torch

from steplab.measurement.device import Device
from steplab.parallel.collectives import Collectives

_QUEUES = "CUDA_SCALE_LAUNCH_QUEUES"
_LONGEST = "4x"
"""Of the lengths that CUDA offers."""


def lengthen_launch_queues() -> None:
    """Ask CUDA for its longest queue of launches, unless the user has asked for another; before its first use."""
    os.environ.setdefault(_QUEUES, _LONGEST)


class HeadStart:
    """Given by all ranks together, each to its own host."""

    def __init__(self, device: Device, collectives: Collectives) -> None:
        self._device, self._collectives = device, collectives
        self._token = torch.zeros(1, device=device.torch_device)

    def give(self, seconds: float) -> None:
        """Hold the device for about that long, and then until every rank's has got so far; returns at once.

        Where the host is the device there is nothing to be ahead of, and nothing is done.
        """
        if self._device.asynchronous:
            self._device.hold(seconds)
            self._collectives.all_reduce(self._token, average=False).wait()
