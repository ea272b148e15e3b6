"""A training recorded by the callbacks of a trainer: `steplab.recorder`, opened and closed by events.

After the steps that were asked for, the record is stored and the callbacks do nothing more, so that a training of any
length can be recorded.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from steplab.errors import SteplabError, warn_caller
from steplab.lab.recording import recorder
from steplab.measurement.recorder import Recorder
from steplab.records.run import Run


class RecordedTraining:
    """The record of one training. A call that comes out of place, such as a phase outside of a step, does nothing."""

    def __init__(self, **options: Any) -> None:
        """Take the options of `steplab.recorder`."""
        self.run: Run | None = None
        """The record, once it is stored; on the first rank alone."""
        self._options = options
        self._recorder: Recorder | None = None
        self._open, self._step, self._phase = ExitStack(), ExitStack(), ExitStack()
        self._inside = False

    @property
    def is_running(self) -> bool:
        """Whether steps are being recorded."""
        return self._recorder is not None

    def begin(self, name: str, *, device: torch.device, model: nn.Module | None) -> None:
        """Begin to record; `model` names the modules in a profile. Raises SteplabError as `steplab.recorder` does."""
        opened = recorder(name, model=model, device=device, **self._options)
        self._inside = False
        self._open, self._step, self._phase = ExitStack(), ExitStack(), ExitStack()
        self._recorder = self._open.enter_context(opened)

    def begin_step(self) -> None:
        """Begin a step."""
        if self._recorder and not self._inside:
            self._step.enter_context(self._recorder.step())
            self._inside = True

    def begin_phase(self, name: str) -> None:
        """Begin a part of the step, where the part before ends."""
        if self._recorder and self._inside:
            self._phase.close()
            self._phase.enter_context(self._recorder.phase(name))

    def end_phase(self) -> None:
        """End the part that is under way."""
        if self._inside:
            self._phase.close()

    def end_step(self) -> None:
        """End the step; the last one that was asked for ends the record."""
        if self._recorder and self._inside:
            self._phase.close()
            self._step.close()
            self._inside = False
            if self._recorder.is_complete:
                self.end()

    def end(self, error: BaseException | None = None) -> None:
        """Store the record, with `error` as that of a failure; a store that fails is a warning."""
        ended, self._recorder = self._recorder, None
        if ended is None:
            return
        if self._inside:  # the step is not over, and not counted
            stopped = error or KeyboardInterrupt()
            self._phase.__exit__(type(stopped), stopped, stopped.__traceback__)
            self._step.__exit__(type(stopped), stopped, stopped.__traceback__)
            self._inside = False
        try:
            self._open.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        except SteplabError as failure:  # the training goes on
            warn_caller(UserWarning(f"steplab: {failure}"))
        self.run = ended.run


class RecordingCallback:
    """What the callbacks of all trainers have in common: their options, and the record."""

    def __init__(
        self,
        name: str = "",
        *,
        tokens_per_step: int | None = None,
        flops_per_step: float | None = None,
        precision: str | None = None,
        warmup: int = 5,
        steps: int = 100,
        profile: range | None = None,
        store: Path | str | None = None,
    ) -> None:
        """Take the options of `steplab.recorder`.

        `profile=range(20, 23)` profiles steps 20 to 22, counted from 0. `tokens_per_step` and `flops_per_step` are
        those of all ranks.
        """
        self._name = name
        self._training = RecordedTraining(
            tokens_per_step=tokens_per_step,
            flops_per_step=flops_per_step,
            precision=precision,
            warmup=warmup,
            steps=steps,
            profile=profile,
            store=store,
        )

    @property
    def run(self) -> Run | None:
        """The record, once it is stored; None before, and on all ranks but the first."""
        return self._training.run
