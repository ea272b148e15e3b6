"""Groups the ranks with the same work, one group for each position in the pipeline.

Ranks are numbered as in parallel.layout, pp outermost, so the ranks of a group are consecutive.
"""

import functools
from dataclasses import dataclass

from steplab.specs.layout import Layout, blocks_of_stage
from steplab.specs.step import STAGES_A_RANK, StepSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    blocks: range
    first: bool
    last: bool
    in_flight: int
    """Peak number of microbatches between the start of forward and the end of backward."""


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    first_rank: int
    num_ranks: int
    place: int
    """Position in the pipeline, from 0."""
    stages: tuple[Stage, ...]

    @property
    def label(self) -> str:
        last = self.first_rank + self.num_ranks - 1
        return f"rank {last}" if self.num_ranks == 1 else f"ranks {self.first_rank} to {last}"

    @property
    def has(self) -> str:
        parts = ["embedding"] if self.stages[0].first else []
        for stage in self.stages:
            first, last = stage.blocks[0], stage.blocks[-1]
            parts.append(f"block {first}" if first == last else f"blocks {first} to {last}")
        return ", ".join([*parts, "head"] if self.stages[-1].last else parts)

    @functools.cached_property
    def blocks(self) -> tuple[int, ...]:
        return tuple(block for stage in self.stages for block in stage.blocks)


def rank_groups(spec: StepSpec, num_layers: int | None = None) -> tuple[RankGroup, ...]:
    """Groups of ranks of the step's layout, in pipeline order.

    num_layers: of a model that is not steplab's own.
    """
    num_layers = num_layers or (spec.model.shape.num_layers if spec.model.shape else 0)
    schedule = spec.pipeline_schedule if spec.layout.pp > 1 else "1f1b"
    microbatches = spec.num_microbatches
    return _groups(spec.layout, schedule, microbatches, num_layers)


@functools.lru_cache(maxsize=4096)
def _groups(layout: Layout, schedule: str, microbatches: int, num_layers: int) -> tuple[RankGroup, ...]:
    per_rank = STAGES_A_RANK[schedule]
    num_stages, size = layout.pp * per_rank, layout.world_size // layout.pp
    groups = []
    for place in range(layout.pp):
        flights = in_flight(schedule, place, layout.pp, microbatches)
        numbers = [place + layout.pp * turn for turn in range(per_rank)]
        stages = tuple(
            Stage(
                blocks=blocks_of_stage(number, num_stages, num_layers),
                first=number == 0,
                last=number == num_stages - 1,
                in_flight=flight,
            )
            for number, flight in zip(numbers, flights, strict=True)
        )
        groups.append(RankGroup(first_rank=place * size, num_ranks=size, place=place, stages=stages))
    return tuple(groups)


def in_flight(schedule: str, place: int, pp: int, microbatches: int) -> tuple[int, ...]:
    """Peak number of microbatches in flight in each stage of one rank, in torch's schedules.

    gpipe: all. 1f1b: one for each stage from this one to the last. interleaved: those of ScheduleInterleaved1F1B's
    warm-up, counted by stage at the rank's peak.
    """
    if schedule == "gpipe":
        return (microbatches,)
    if schedule == "1f1b":
        return (min(microbatches, pp - place),)
    stages = STAGES_A_RANK[schedule]
    in_round = microbatches // max(1, microbatches // pp)
    total = microbatches * stages
    warmup = min((stages - 1) * in_round + 2 * (pp - 1 - place), total)
    flying = [0] * stages
    for number in range(min(warmup + 1, total)):
        flying[number // in_round % stages] += 1
    return tuple(flying)
