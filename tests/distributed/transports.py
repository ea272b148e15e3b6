import random
import time
from typing import Any

from torch import Tensor

from steplab.parallel.collectives import Collectives, Pending


class Recorder:
    def __init__(self, inner: Collectives) -> None:
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.calls: list[tuple[str, int]] = []
        self.under_way = 0
        self.most_under_way = 0

    def all_reduce(self, tensor: Tensor, *, average: bool) -> Pending:
        return self._noted("all_reduce", tensor, self.inner.all_reduce(tensor, average=average))

    def all_gather(self, output: Tensor, part: Tensor) -> Pending:
        return self._noted("all_gather", output, self.inner.all_gather(output, part))

    def reduce_scatter(self, part: Tensor, tensor: Tensor, *, average: bool) -> Pending:
        return self._noted("reduce_scatter", tensor, self.inner.reduce_scatter(part, tensor, average=average))

    def reduce(self, tensor: Tensor, *, destination: int, average: bool) -> Pending:
        pending = self.inner.reduce(tensor, destination=destination, average=average)
        return self._noted("reduce", tensor, pending)

    def broadcast(self, tensor: Tensor, *, source: int) -> Pending:
        return self._noted("broadcast", tensor, self.inner.broadcast(tensor, source=source))

    def host_maximum(self, values: Tensor) -> Tensor:
        self.calls.append(("host_maximum", 0))
        return self.inner.host_maximum(values)

    def host_gather(self, value: Any) -> list[Any]:
        self.calls.append(("host_gather", 0))
        return self.inner.host_gather(value)

    def taken(self) -> list[tuple[str, int]]:
        calls, self.calls = self.calls, []
        return calls

    def _noted(self, name: str, tensor: Tensor, pending: Pending) -> Pending:
        self.calls.append((name, tensor.numel() * tensor.element_size()))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        return _Counted(self, pending)


class _Counted:
    def __init__(self, recorder: Recorder, pending: Pending) -> None:
        self.recorder, self.pending = recorder, pending

    def wait(self) -> None:
        self.pending.wait()
        self.recorder.under_way -= 1


class Delays(Recorder):
    def __init__(self, inner: Collectives, longest_s: float = 0.004) -> None:
        super().__init__(inner)
        self.random, self.longest_s = random.Random(inner.rank), longest_s

    def sleep(self) -> None:
        time.sleep(self.random.uniform(0, self.longest_s))

    def host_maximum(self, values: Tensor) -> Tensor:
        self.sleep()
        return super().host_maximum(values)

    def _noted(self, name: str, tensor: Tensor, pending: Pending) -> Pending:
        self.sleep()
        return _Late(self, super()._noted(name, tensor, pending))


class _Late:
    def __init__(self, delays: Delays, pending: Pending) -> None:
        self.delays, self.pending = delays, pending

    def wait(self) -> None:
        self.delays.sleep()
        self.pending.wait()
