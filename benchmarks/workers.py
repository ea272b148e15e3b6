"""Commands shared out over the GPUs of a machine, each command with one GPU alone to itself."""

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Sequence

import torch


def run_all(commands: Sequence[list[str]], log: str, seconds: float, num_workers: int | None = None) -> None:
    """Run the commands in their order, one worker a GPU; after `seconds` interrupt what runs and start nothing more.

    What they write goes to LOG.gpuN.log; a line a command to standard output.
    """
    deadline_s = time.monotonic() + seconds
    work: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    for command in commands:
        work.put(command)

    def worker(gpu: int) -> None:
        while time.monotonic() < deadline_s:
            try:
                command = work.get_nowait()
            except queue.Empty:
                return
            started_s = time.monotonic()
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
            with open(f"{log}.gpu{gpu}.log", "a", encoding="utf-8") as file:
                process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
                try:
                    process.wait(timeout=max(1.0, deadline_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGINT)
                    process.wait()
            took_s = time.monotonic() - started_s
            print(f"gpu {gpu}: {' '.join(command[3:])}: exit {process.returncode}, {took_s:.0f} s", flush=True)

    count = num_workers or max(1, torch.cuda.device_count())
    workers = [threading.Thread(target=worker, args=(gpu,)) for gpu in range(count)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
