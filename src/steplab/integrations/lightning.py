"""A callback that records the steps of a Lightning Trainer.

    from steplab.integrations.lightning import SteplabCallback

    Trainer(..., callbacks=[SteplabCallback("my training")]).fit(model, loader)

A step is an optimizer step with all of its micro-steps. The forward phase is training_step; the optimizer phase
includes the clipping of gradients. Time between the phases is Lightning's own.
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from steplab.integrations.recorded import RecordingCallback


class SteplabCallback(RecordingCallback, Callback):
    """Records the first steps of a training as one record in the store, by default 100 after 5 of warm-up.

    The record is stored once they are over, or the training fails. Its name is by default that of the LightningModule's
    class.
    """

    _step_before = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to record."""
        name = self._name or type(pl_module).__name__
        self._training.begin(name, device=trainer.strategy.root_device, model=pl_module)
        self._step_before = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a step, or its next micro-step, with the forward phase."""
        self._training.begin_step()
        self._training.begin_phase("forward")

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """End the forward phase: Lightning sets the gradients to zero before the backward pass."""
        self._training.end_phase()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Begin the backward phase."""
        self._training.begin_phase("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the backward phase."""
        self._training.end_phase()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Begin the optimizer phase."""
        self._training.begin_phase("optimizer")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step if the optimizer has taken one, and else the micro-step."""
        self._training.end_phase()
        if trainer.global_step > self._step_before:
            self._step_before = trainer.global_step
            self._training.end_step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the record of a training that was shorter than what was asked for."""
        self._training.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Store the record of a training that failed."""
        self._training.end(exception)
