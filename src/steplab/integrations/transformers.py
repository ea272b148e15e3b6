"""A callback that records the steps of a transformers Trainer.

    from steplab.integrations.transformers import SteplabCallback

    Trainer(..., callbacks=[SteplabCallback("my finetuning")]).train()

A step is an optimizer step with all its micro-steps. Hooks on the model mark the forward phase. Backward lasts until
the Trainer's next event, so it includes gradient clipping. The optimizer phase includes the scheduler and zero_grad.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback

from steplab.integrations.recorded import RecordingCallback
from steplab.measurement.compat import minds_hooks


class SteplabCallback(RecordingCallback, TrainerCallback):
    """Records the first steps of a training as one stored record: by default 100 after 5 of warm-up.

    The record is stored after these steps; its default name is the arguments' run name. transformers does not report
    exceptions to callbacks, so a training that fails earlier leaves no record.
    """

    _hooks: Sequence[RemovableHandle] = ()

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any) -> None:
        self._remove_hooks()
        # A compiled model would trace hooks into its graph, or recompile for them.
        hooked = not (args.torch_compile or minds_hooks(model))
        name = self._name or getattr(args, "run_name", None) or ""
        self._begin(name, device=args.device, model=model if hooked else None)
        if hooked:
            before = model.register_forward_pre_hook(self._on_forward, prepend=True)
            self._hooks = (before, model.register_forward_hook(self._on_output))

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._begin_step()

    def on_substep_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._end_phase()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._begin_phase("optimizer")

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """End a step; remove the hooks after the last recorded one."""
        self._end_step()
        if self._recorder is None:
            self._remove_hooks()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._end()
        self._remove_hooks()

    def _on_forward(self, module: nn.Module, arguments: Any) -> None:
        self._begin_phase("forward")

    def _on_output(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self._begin_phase("backward")

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()
