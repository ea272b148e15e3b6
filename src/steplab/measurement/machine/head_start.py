"""A head start for Python, so that the device never waits for it during a timed step.

In training the host runs ahead of the device. In a loop of a few steps both begin together, and a slow host never gets
ahead: the measured time then contains the device's waits for Python, and with several ranks each rank's waits for all
others. Where only the device's time is asked for, the device is held idle before the work begins, for longer than
Python takes to launch it; then the ranks meet on the device, and the work begins on all of them at once.

How far ahead a host can get is limited by the driver's launch queue, which holds about a thousand kernels. A longer
queue can be requested before the device is first used.
"""

import os

import torch

from steplab.measurement.machine.device import Device
from steplab.parallel.collectives import Collectives

_QUEUES = "CUDA_SCALE_LAUNCH_QUEUES"
_LONGEST = "4x"
"""The longest launch queue that CUDA offers."""
_MARGIN = 1.5
"""Factor on the time that Python took to launch the work; the next launch may take longer."""


def lengthen_launch_queues() -> None:
    """Ask CUDA for its longest launch queue, unless the user has set another. To be called before CUDA is first
    used."""
    if torch.version.cuda is not None:
        os.environ.setdefault(_QUEUES, _LONGEST)


class HeadStart:
    """Holds a device before timed work, for the same time on all ranks; all methods are collective.

    On a device that is the host itself there is nothing to get ahead of, and nothing is held.
    """

    def __init__(self, device: Device, collectives: Collectives, longest_s: float) -> None:
        """Take the ranks of `collectives`; `longest_s` is the longest useful hold, after which Python has filled the
        launch queue or waits for the device."""
        self._device, self._collectives, self._longest_s = device, collectives, longest_s
        self._token = torch.zeros(1, device=device.torch_device)
        self.seconds = 0.0
        """The length of the hold, in seconds."""
        if device.asynchronous:  # the first call of either takes long and is not part of a hold
            device.hold(1e-3)
            self._meet()
            device.synchronize()

    def give(self) -> None:
        """Hold the device for `seconds`, and then wait on it until the holds of all ranks are over; returns at once."""
        if self._device.asynchronous:
            self._device.hold(self.seconds)
            self._meet()

    def lengthen(self, started_s: float) -> bool:
        """Lengthen the hold for work that Python took `started_s` to launch on the slowest rank; returns whether it
        grew.

        A collective call.
        """
        slowest_s = max(self._collectives.host_gather(started_s))
        before_s, self.seconds = self.seconds, max(self.seconds, min(_MARGIN * slowest_s, self._longest_s))
        return self.seconds > before_s

    def _meet(self) -> None:
        self._collectives.all_reduce(self._token, average=False).wait()
