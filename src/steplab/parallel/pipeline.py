"""A pipeline of stages on the ranks of one axis, run by torch's schedules.

The batch of a rank is cut into microbatches that follow each other through the stages. The shape of what goes from
stage to stage is said beforehand, so that no step is spent on finding it.

| schedule      | order on a rank                                                          | stages a rank |
|---------------|--------------------------------------------------------------------------|---------------|
| `gpipe`       | all forward passes, then all backward passes (Huang et al. 2019)         | 1             |
| `1f1b`        | a backward pass as soon as there is one (Narayanan et al. 2019)          | 1             |
| `interleaved` | 1f1b over several shorter stages, in turn (Narayanan et al. 2021)        | 2             |
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
"""Torch's, by name. The last one takes several stages a rank, the others one."""


def stage_numbers(mesh: DeviceMesh, stages_a_rank: int) -> list[int]:
    """The stages of this rank, from 0: stages go round the ranks of pp."""
    rank, ranks = mesh.get_local_rank("pp"), mesh["pp"].size()
    return [rank + ranks * turn for turn in range(stages_a_rank)]


class Pipeline:
    """The stages of this rank, and the schedule that runs them with those of the other ranks of pp."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        mesh: DeviceMesh,
        device: torch.device,
        *,
        schedule: str,
        microbatches: int,
        between: Tensor,
        first_input: Tensor,
        last_output: Tensor,
        loss: Callable[[Any, Any], Tensor],
    ) -> None:
        """The stages are in the order of `stage_numbers`; shapes are those of one microbatch on this rank.

        Args:
            stages: laid out already, on the device they stay on.
            mesh: as `layout.open_mesh` makes it.
            device: this rank's.
            schedule: a key of SCHEDULES.
            microbatches: into how many parts a batch is cut along its first dimension.
            between: a tensor of the shape and dtype that goes from stage to stage, on torch's meta device.
            first_input: the same of what the first stage is given.
            last_output: the same of what the last stage gives.
            loss: (output of the last stage, target) -> the mean over a microbatch.
        """
        numbers = stage_numbers(mesh, len(stages))
        count = mesh["pp"].size() * len(stages)
        made = [
            PipelineStage(
                stage,
                number,
                count,
                device,
                input_args=first_input if number == 0 else between,
                output_args=last_output if number == count - 1 else between,
                group=mesh.get_group("pp"),
            )
            for number, stage in zip(numbers, stages, strict=True)
        ]
        self._gives_input = made[0].is_first
        self._gives_target = made[-1].is_last
        given: Any = made if schedule == "interleaved" else made[0]
        self._schedule = SCHEDULES[schedule](given, microbatches, loss_fn=loss)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Forward and backward passes of all microbatches; gradients are those of the mean over the batch.

        Every rank is given the batch, and uses of it what its stages need. Gives the mean loss on the ranks that have
        the last stage, None on the others.
        """
        losses: list[Tensor] = []
        given = (inputs,) if self._gives_input else ()
        target = targets if self._gives_target else None
        self._schedule.step(*given, target=target, losses=losses, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else None
