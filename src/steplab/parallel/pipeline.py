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

from steplab.errors import UserError

STAGES_A_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
"""By the name of a schedule."""


def stage_numbers(mesh: DeviceMesh, schedule: str) -> list[int]:
    """Which stages this rank has, from 0: stages go round the ranks of pp.

    Raises UserError where the schedule is not known.
    """
    if schedule not in STAGES_A_RANK:
        raise UserError(f"schedule '{schedule}' is not known; choose one of {', '.join(STAGES_A_RANK)}")
    rank, ranks = mesh.get_local_rank("pp"), mesh["pp"].size()
    return [rank + ranks * turn for turn in range(STAGES_A_RANK[schedule])]


class Pipeline:
    """The stages of this rank, and the schedule that runs them with those of the other ranks of pp."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        mesh: DeviceMesh,
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
            mesh: as `mesh.open_mesh` makes it.
            schedule: a name of STAGES_A_RANK.
            microbatches: into how many parts a batch is cut along its first dimension.
            between: a tensor of the shape and dtype that goes from stage to stage, on torch's meta device.
            first_input: the same of what the first stage is given.
            last_output: the same of what the last stage gives.
            loss: (output of the last stage, target) -> the mean over a microbatch.
        """
        count = mesh["pp"].size() * STAGES_A_RANK[schedule]
        device = torch.device(mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else None)
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
            for number, stage in zip(stage_numbers(mesh, schedule), stages, strict=True)
        ]
        self._gives_input = made[0].is_first
        self._gives_target = made[-1].is_last
        self._schedule: Any
        if schedule == "interleaved":
            self._schedule = ScheduleInterleaved1F1B(made, microbatches, loss_fn=loss)
        else:
            kind = ScheduleGPipe if schedule == "gpipe" else Schedule1F1B
            self._schedule = kind(made[0], microbatches, loss_fn=loss)

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
