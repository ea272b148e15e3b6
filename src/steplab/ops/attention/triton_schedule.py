"""Orders the work of the Hopper kernels and divides it over programs.

Heads go in groups with tensors that fit the L2 cache together, so programs find each other's loads there.
"""

import heapq
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from .triton_repeats import refuse_while_capturing

CACHE_SHARE = 16 * 2**20
"""Bytes of the L2 cache (an H200's has 60 MiB) for a group's tensors; in trials, 8 to 32 MiB were equal."""
PAIRS_TOGETHER = 8
"""Pairs of heads that CACHE_SHARE must hold before programs take heads in pairs; in trials, four gained nothing."""
PROGRAMS_EACH = 3
"""Fewest programs that each multiprocessor must still have when programs take heads in pairs, so that all
multiprocessors end at about the same time. Measured from 3.9 programs on.
"""
START_OF_TASK = 0.6
"""Fixed time of a task, as a multiple of the time of one tile of keys; from trials."""
MOST_DEALT = 2**17
"""Most tasks that `dealt` balances. More tasks go to the programs in turn, and differences average out."""


def heads_a_group(bytes_a_head: int, num_heads: int) -> int:
    return max(1, min(num_heads, CACHE_SHARE // max(bytes_a_head, 1)))


def heads_in_a_row(bytes_a_head: int, sharing: int, num_programs: int, num_multiprocessors: int) -> int:
    """Return how many heads a program of the backward kernel takes one after the other: 1, or 2 that share keys.

    With two, programs pass on half as many sums of dK and dV. But CACHE_SHARE must hold PAIRS_TOGETHER such pairs, and
    half of num_programs must give each multiprocessor PROGRAMS_EACH. So the order of the sums, and their last bits,
    depend on the batch and on the GPU.
    """
    fit = 2 * bytes_a_head * PAIRS_TOGETHER <= CACHE_SHARE
    return 2 if sharing % 2 == 0 and fit and num_programs >= 2 * PROGRAMS_EACH * num_multiprocessors else 1


def dealt(lengths: Sequence[int], num_programs: int) -> list[list[int]]:
    """The task numbers of each program. Each task, in the order of `lengths`, goes to the program that is free first.

    The GPU would do the same if each task were a program of its own. But a program with a list of tasks loads the next
    task's tiles while it ends one.
    """
    rows: list[list[int]] = [[] for _ in range(min(num_programs, len(lengths)))]
    if len(lengths) > MOST_DEALT:
        return [list(range(first, len(lengths), len(rows))) for first in range(len(rows))]
    free = [(0.0, program) for program in range(len(rows))]
    for task, length in enumerate(lengths):
        at, program = free[0]
        rows[program].append(task)
        heapq.heapreplace(free, (at + length + START_OF_TASK, program))
    return rows


class Task(NamedTuple):
    head: int
    first_query: int
    num_tiles: int
    """Tiles of keys that the task's queries see: the length by which `dealt` gives tasks to programs."""


def tasks_in_order(
    num_heads: int, num_queries: int, num_keys: int, *, rows: int, tile: int, together: int, causal: bool
) -> list[Task]:
    """All tasks: heads in groups of `together`, and the longest tasks of a group first."""
    first_queries = range(0, num_queries, rows)[::-1]
    of_head = [(first, -(-(min(num_keys, first + rows) if causal else num_keys) // tile)) for first in first_queries]
    groups = [range(first, min(first + together, num_heads)) for first in range(0, num_heads, together)]
    return [Task(head, *queries) for group in groups for queries in of_head for head in group]


@cache  # without a limit: a recorded CUDA graph keeps reading its table
def task_table(
    num_heads: int,
    num_queries: int,
    num_keys: int,
    *,
    rows: int,
    tile: int,
    together: int,
    causal: bool,
    num_programs: int,
    device: torch.device,
) -> Tensor:
    """The programs' tasks, int32 [programs, 3 + 2 * most tasks]: the number of tasks, the head and the first query
    of each, and room to read one more.
    """
    refuse_while_capturing(device)
    tasks = tasks_in_order(num_heads, num_queries, num_keys, rows=rows, tile=tile, together=together, causal=causal)
    lists = dealt([task.num_tiles for task in tasks], num_programs)
    width = 2 * max(map(len, lists)) + 3
    table = [[len(row), *(number for task in row for number in tasks[task][:2])] for row in lists]
    filled = [[*row, *[0] * (width - len(row))] for row in table]
    # torch.compile warms a CUDA graph up in memory that it assigns to all of this thread's allocations, and refuses any
    # that stay. The table outlives the graph, so another thread makes it, and returns once it is copied.
    with ThreadPoolExecutor(max_workers=1) as outside:
        return outside.submit(torch.tensor, filled, dtype=torch.int32, device=device).result()
