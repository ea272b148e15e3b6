from collections.abc import Sequence

import numpy as np

from steplab.reading.traces.trace import NONE, Column, DeviceWork, HostCalls, Inputs, Ops, Ranges, Trace

MAIN, AUTOGRAD, OTHER_PROCESS = 0, 1, 2


class HandTrace:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.inputs: list[Inputs] = []
        self.work: list[tuple[int, ...]] = []
        self.calls: list[tuple[int, ...]] = []
        self.ops: list[tuple[int, ...]] = []
        self.ranges: list[tuple[int, ...]] = []

    def name(self, text: str) -> int:
        if text not in self.names:
            self.names.append(text)
        return self.names.index(text)

    def kernel(
        self,
        name: str,
        start: float,
        end: float,
        launch: tuple[float, float] | None,
        thread: int = MAIN,
        stream: int = 7,
        call: str = "cudaLaunchKernel",
        device: int = 0,
    ) -> None:
        correlation = len(self.work) + 1
        self.work.append((self.name(name), ns(start), ns(end) - ns(start), device, stream, correlation))
        if launch:
            begin, returned = launch
            self.calls.append((self.name(call), ns(begin), ns(returned) - ns(begin), thread, correlation))

    def call(self, name: str, start: float, end: float, thread: int = MAIN) -> None:
        self.calls.append((self.name(name), ns(start), ns(end) - ns(start), thread, 10**6 + len(self.calls)))

    def op(
        self,
        name: str,
        start: float,
        end: float,
        thread: int = MAIN,
        sequence: int = NONE,
        inputs: Inputs | None = None,
    ) -> None:
        number = NONE
        if inputs:
            self.inputs.append(inputs)
            number = len(self.inputs) - 1
        self.ops.append((self.name(name), ns(start), ns(end) - ns(start), thread, sequence, number))

    def range(self, name: str, start: float, end: float, thread: int = MAIN) -> None:
        self.ranges.append((self.name(name), ns(start), ns(end) - ns(start), thread))

    def build(self) -> Trace:
        return Trace(
            source="kineto",
            work=DeviceWork(**table(DeviceWork, self.work)),
            calls=HostCalls(**table(HostCalls, self.calls)),
            ops=Ops(**table(Ops, self.ops)),
            ranges=Ranges(**table(Ranges, self.ranges)),
            processes=(0, 0, 1),
            names=tuple(self.names),
            inputs=tuple(self.inputs),
        )


def ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def table(kind: type, rows: Sequence[tuple[int, ...]]) -> dict[str, Column]:
    fields: list[str] = list(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    ordered = sorted(rows, key=lambda row: (row[1], -row[2]))
    return {field: np.array([row[i] for row in ordered], dtype=np.int64) for i, field in enumerate(fields)}
