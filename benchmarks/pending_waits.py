"""What a wait that is pending on one stream costs the kernels that another starts meanwhile, stream by stream.

    python -m benchmarks.pending_waits [--streams 16]

Small kernels run on the current stream of the first GPU. On one other stream, or on two, waits for them are pending:
for an event, or for a number in memory (cuStreamWaitValue), with a copy to the second GPU behind, where there is one.
Prints microseconds of one kernel as comma-separated values; that takes some ten seconds.
"""

import argparse
import csv
import sys

import torch

from steplab.parallel.peer_memory import CudaDriver

KERNELS, TRIALS = 400, 5
HELD_CYCLES = 20_000_000
BYTES = 1 << 20


class Trial:
    """Buffers, a counter and an event on the first GPU."""

    def __init__(self) -> None:
        self.numbers = torch.zeros(1, device="cuda:0")  # first, as it initialises the driver
        self.driver = CudaDriver(0)
        self.source = torch.zeros(BYTES, dtype=torch.uint8, device="cuda:0")
        second = "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"
        self.target = torch.zeros(BYTES, dtype=torch.uint8, device=second)
        self.target.copy_(self.source)  # opens the way to it
        self.counter = torch.zeros(1, dtype=torch.int32, device="cuda:0")
        self.ready = torch.cuda.Event()
        self.ready.record()
        self.number = 0

    def kernel_us(self, streams: list[torch.cuda.Stream], kind: str) -> float:
        """Microseconds of a kernel in the fastest of some trials."""
        return min(self._kernel_us(streams, kind) for _ in range(TRIALS))

    def _kernel_us(self, streams: list[torch.cuda.Stream], kind: str) -> float:
        torch.cuda.synchronize()
        self.number += 1
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HELD_CYCLES)
        current = torch.cuda.current_stream().cuda_stream
        begin.record()
        for _ in range(KERNELS):
            self.numbers.add_(1)
        end.record()
        # The GPU is held, so all of this is queued before the first kernel runs, and what ends a wait before the wait.
        self.driver.record(self.ready.cuda_event, current)
        self.driver.writes([self.counter.data_ptr()]).start(current, self.number)
        for stream in streams:
            if kind == "event":
                self.driver.wait_event(stream.cuda_stream, self.ready.cuda_event)
            else:
                self.driver.waits([self.counter.data_ptr()]).start(stream.cuda_stream, self.number)
            self._copy(stream)
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3 / KERNELS

    def _copy(self, stream: torch.cuda.Stream) -> None:
        self.driver.copy(stream.cuda_stream, [self.target.data_ptr()], [self.source.data_ptr()], [BYTES])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16, help="of each priority")
    options = parser.parse_args()
    trial = Trial()
    table = csv.writer(sys.stdout)
    table.writerow(["priority", "stream", "none", "event", "value", "event on it and the next", "value on both"])
    for priority in (-1, 0):
        streams = [torch.cuda.Stream("cuda:0", priority=priority) for _ in range(options.streams)]
        for number, stream in enumerate(streams):
            both = [stream, streams[(number + 1) % len(streams)]]
            found = [
                trial.kernel_us([], "none"),
                *(trial.kernel_us(used, kind) for used in ([stream], both) for kind in ("event", "value")),
            ]
            table.writerow([priority, number, *(f"{value:.2f}" for value in found)])
            sys.stdout.flush()


if __name__ == "__main__":
    main()
