"""In which order the Hopper kernels do their work, and which program does what.

Heads are done in groups whose tensors the L2 cache holds together: what one program loads the others find there.
"""

import heapq
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from steplab.ops.attention.triton_repeats import refuse_while_capturing

CACHE_SHARE = 16 * 2**20
"""Bytes of the L2 cache (an H200's has 60 MiB) for what a group of heads reads: by trial, 8 to 32 MiB are alike."""
START_OF_TASK = 0.6
"""How long a task takes besides its tiles, in times of a tile; by trial."""
MOST_DEALT = 2**17
"""Tasks that are worth dealing out; of more, each program has so many that a plain order levels out."""


def heads_a_group(bytes_a_head: int, num_heads: int) -> int:
    """How many heads go together, each of which has so many bytes that programs read more than once."""
    return max(1, min(num_heads, CACHE_SHARE // max(bytes_a_head, 1)))


def dealt(lengths: Sequence[int], num_programs: int) -> list[list[int]]:
    """Tasks by number for each program, each task to the program that is the first to be free, in this order.

    It is what the GPU does with a program a task; but a program that has the whole list loads the tiles of its next
    task while it ends one.
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


def lengths_of_tasks(
    num_heads: int, num_queries: int, num_keys: int, *, rows: int, tile: int, together: int, causal: bool
) -> list[int]:
    """Tiles of keys of each task of the forward kernel, `rows` queries of a head, in the order of `_task` there."""
    tasks_a_head = -(-num_queries // rows)
    ends = [min(num_keys, first + rows) if causal else num_keys for first in range(0, num_queries, rows)]
    of_head = [-(-end // tile) for end in ends]
    found: list[int] = []
    for first_head in range(0, num_heads, together):
        heads = min(together, num_heads - first_head)
        found += [of_head[tasks_a_head - 1 - i // heads] for i in range(tasks_a_head * heads)]
    return found


@lru_cache(maxsize=64)
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
    """int32 [programs, 2 + most tasks]: a program's number of tasks, these, and room to read one too many."""
    refuse_while_capturing(device)
    lengths = lengths_of_tasks(num_heads, num_queries, num_keys, rows=rows, tile=tile, together=together, causal=causal)
    lists = dealt(lengths, num_programs)
    width = max(map(len, lists)) + 2
    return torch.tensor(
        [[len(tasks), *tasks, *[0] * (width - 1 - len(tasks))] for tasks in lists], dtype=torch.int32, device=device
    )
