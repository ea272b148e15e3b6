"""The memory that an attention takes beyond its inputs: what it saves for backward, and its peaks."""

import torch
from torch import Tensor

from steplab.measurement.attention.error import Inputs
from steplab.measurement.machine.device import Device, allocated_bytes


class Gauge:
    """Measures bytes beyond those that are allocated when it is made."""

    def __init__(self, device: Device) -> None:
        self._device = device
        device.synchronize()
        device.reset_peak()
        self._before = allocated_bytes(device)

    def now(self) -> int | None:
        """Bytes in live tensors now; None if the allocator does not count."""
        after = allocated_bytes(self._device)
        return after - self._before if after is not None and self._before is not None else None

    def peak(self) -> int | None:
        """The largest number of bytes since it was made; None if the allocator does not count."""
        self._device.synchronize()
        peak = self._device.peak("step")
        return peak.peak_allocated_bytes - self._before if peak and self._before is not None else None


class SavedTensors:
    """Counts what autograd saves, storage by storage, on a device whose allocator does not count: a CPU."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = {tensor.untyped_storage().data_ptr() for tensor in inputs.leaves}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def keep(self, tensor: Tensor) -> Tensor:
        """Count a tensor; a pack hook for torch.autograd.graph.saved_tensors_hooks. The storage is held, so that its
        address is not reused."""
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = storage
        return tensor

    def num_bytes(self) -> int:
        """Bytes of all storages except those of the inputs."""
        return sum(storage.nbytes() for address, storage in self._storages.items() if address not in self._inputs)
