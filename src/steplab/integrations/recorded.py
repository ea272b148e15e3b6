"""Records a training through a trainer's callbacks, which open and close `steplab.recorder`.

After the requested steps the record is stored and callbacks do nothing, so a training may be of any length.
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


class RecordingCallback:
    """Opens and closes a recorder, and stores its record. Misplaced calls, as of a phase outside a step, do nothing."""

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
        """Options are those of `steplab.recorder`; `tokens_per_step` and `flops_per_step` are sums over all ranks."""
        self._name = name
        self._options: dict[str, Any] = {
            "tokens_per_step": tokens_per_step,
            "flops_per_step": flops_per_step,
            "precision": precision,
            "warmup": warmup,
            "steps": steps,
            "profile": profile,
            "store": store,
        }
        self.run: Run | None = None
        """The stored record; None until it is stored, and on ranks above 0."""
        self._recorder: Recorder | None = None
        self._inside = False

    def _begin(self, name: str, *, device: torch.device, model: nn.Module | None) -> None:
        """Opens the recorder, which takes modules' names from `model`. Raises SteplabError as `steplab.recorder`."""
        opened = recorder(name, model=model, device=device, **self._options)
        self._inside = False
        self._open, self._step, self._phase = ExitStack(), ExitStack(), ExitStack()
        self._recorder = self._open.enter_context(opened)

    def _begin_step(self) -> None:
        if self._recorder and not self._inside:
            self._step.enter_context(self._recorder.step())
            self._inside = True

    def _begin_phase(self, name: str) -> None:
        if self._recorder and self._inside:
            self._phase.close()
            self._phase.enter_context(self._recorder.phase(name))

    def _end_phase(self) -> None:
        if self._inside:
            self._phase.close()

    def _end_step(self) -> None:
        if self._recorder and self._inside:
            self._phase.close()
            self._step.close()
            self._inside = False
            if self._recorder.is_complete:
                self._end()

    def _end(self, error: BaseException | None = None) -> None:
        """Stores the record; if that fails, it only warns."""
        ended, self._recorder = self._recorder, None
        if ended is None:
            return
        if self._inside:  # an unfinished step does not count
            stopped = error or KeyboardInterrupt()
            self._phase.__exit__(type(stopped), stopped, stopped.__traceback__)
            self._step.__exit__(type(stopped), stopped, stopped.__traceback__)
            self._inside = False
        try:
            self._open.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        except SteplabError as failure:  # training continues
            warn_caller(UserWarning(f"steplab: {failure}"))
        self.run = ended.run
