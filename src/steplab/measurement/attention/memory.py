"""What an attention takes beyond its inputs: what it keeps for backward, and its highest moments."""

import torch
from torch import Tensor

from steplab.measurement.attention.error import Inputs
from steplab.measurement.machine.device import Device, allocated_bytes


class Gauge:
    """Bytes beyond those that are there when it is made."""

    def __init__(self, device: Device) -> None:
        self._device = device
        device.synchronize()
        device.reset_peak()
        self._before = allocated_bytes(device)

    def now(self) -> int | None:
        """In live tensors now."""
        after = allocated_bytes(self._device)
        return after - self._before if after is not None and self._before is not None else None

    def peak(self) -> int | None:
        """The most at once since."""
        self._device.synchronize()
        peak = self._device.peak("step")
        return peak.peak_allocated_bytes - self._before if peak and self._before is not None else None


class SavedTensors:
    """Counts what autograd keeps, storage by storage, where the allocator does not: on a CPU."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = {tensor.untyped_storage().data_ptr() for tensor in inputs.leaves}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def keep(self, tensor: Tensor) -> Tensor:
        """Count a tensor; to be given to torch.autograd.graph.saved_tensors_hooks. Holding its storage keeps its
        address from being given to another."""
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = storage
        return tensor

    def num_bytes(self) -> int:
        """Of all storages that are not the inputs'."""
        return sum(storage.nbytes() for address, storage in self._storages.items() if address not in self._inputs)
