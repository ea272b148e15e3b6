"""A data-parallel loop that traces its steps, with one rank delayed in each; started as a program it runs on GPUs.

Each rank writes when it was ready for its step's message, by the clock that ranks of one machine share: a busy machine
sleeps longer than it is told to.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

STEPS, SKIPPED = 20, 3


@dataclass(frozen=True, kw_only=True)
class Planted:
    world: int
    rank: int
    delay_s: float
    seed: int = 0

    def measured_s(self, folder: Path) -> float:
        """Median seconds that the delayed rank was ready after the middle of the others."""
        ready = [[float(text) for text in (folder / f"ready{n}").read_text().split()] for n in range(self.world)]
        late_s = ready.pop(self.rank)
        return median(at_s - median(others) for at_s, *others in zip(late_s, *ready, strict=True))


def trace_steps(planted: Planted, folder: Path, device: str = "cpu") -> None:
    """Write this rank's trace and its times to the folder; the process group is there already."""
    torch.manual_seed(planted.seed)
    on_gpu, rank = device == "cuda", dist.get_rank()
    side = 4096 if on_gpu else 192
    weights = torch.randn(side, side, device=device)
    size = int(torch.randint(10_000, 100_000, ()).item()) * (100 if on_gpu else 1)
    gradients, ready_s = torch.ones(size, device=device), []
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    begun = schedule(wait=1, warmup=SKIPPED - 1, active=STEPS)
    with profile(activities=activities, schedule=begun, record_shapes=True) as profiler:
        for _ in range(SKIPPED + STEPS):
            gradients.add_((weights @ weights).mean())
            if on_gpu:
                torch.cuda.synchronize()  # else the queue hides the delay
            if rank == planted.rank:
                time.sleep(planted.delay_s)
            ready_s.append(time.perf_counter())
            dist.all_reduce(gradients)
            if on_gpu:
                torch.cuda.synchronize()
            profiler.step()
    profiler.export_chrome_trace(str(folder / f"rank{rank}.pt.trace.json"))
    (folder / f"ready{rank}").write_text(" ".join(map(str, ready_s[SKIPPED:])))
    dist.barrier()


if __name__ == "__main__":
    number, world, late, delay_s, into = sys.argv[1:]
    torch.cuda.set_device(int(number))
    where = (Path(into) / "meeting").as_uri()
    dist.init_process_group("nccl", init_method=where, rank=int(number), world_size=int(world))
    trace_steps(Planted(world=int(world), rank=int(late), delay_s=float(delay_s)), Path(into), "cuda")
    dist.destroy_process_group()
