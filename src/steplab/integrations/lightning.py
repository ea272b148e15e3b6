"""A callback that records the steps of a Lightning Trainer.

    from steplab.integrations.lightning import SteplabCallback

    Trainer(..., callbacks=[SteplabCallback("my training")]).fit(model, loader)

A step is an optimizer step with all its micro-steps. Forward is training_step; the optimizer phase includes gradient
clipping. Time between phases is Lightning's own work.
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from steplab.integrations.recorded import RecordingCallback


class SteplabCallback(RecordingCallback, Callback):
    """Records the first steps of a training as one stored record: by default 100 after 5 of warm-up.

    The record is stored after these steps, or when training fails. Its default name is the LightningModule's class.
    """

    _step_before = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        name = self._name or type(pl_module).__name__
        self._begin(name, device=trainer.strategy.root_device, model=pl_module)
        self._step_before = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._begin_step()
        self._begin_phase("forward")

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Ends the forward phase, because Lightning zeroes gradients just before the backward pass."""
        self._end_phase()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        self._begin_phase("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_phase()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._begin_phase("optimizer")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._end_phase()
        if trainer.global_step > self._step_before:
            self._step_before = trainer.global_step
            self._end_step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end(exception)
