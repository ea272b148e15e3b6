from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.sure import sure
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from steplab.records.run import Run
from steplab.records.validation import check
from steplab.store.database import Store

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is missing: pip install lightning")

Fit = Callable[..., Run | None]


@pytest.fixture
def fit(tmp_path: Path) -> Fit:
    from steplab.integrations.lightning import SteplabCallback

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, fails_at: int | None) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.fails_at = fails_at

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx == self.fails_at:
                raise ValueError("diverged")
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    def fitted(trainer: dict[str, Any], *, fails_at: int | None = None, **options: Any) -> Run | None:
        callback = SteplabCallback(store=tmp_path / "store.db", **options)
        lightning.Trainer(
            accelerator="cpu",
            callbacks=[callback],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            **trainer,
        ).fit(Module(fails_at), DataLoader(TensorDataset(torch.ones(64, 8)), batch_size=4))
        return callback.run

    return fitted


def test_optimizer_steps_are_recorded_with_their_phases(fit: Fit, tmp_path: Path) -> None:
    run = sure(fit({"max_steps": 7, "accumulate_grad_batches": 2}, warmup=2, steps=4, tokens_per_step=64))
    check(run)
    assert (run.name, run.failure) == ("Module", None)
    assert run.timing is not None
    by_name = {samples.phase: samples.best_s for samples in run.timing.back_to_back}
    assert {name: len(samples) for name, samples in by_name.items()} == dict.fromkeys(
        ("forward", "backward", "optimizer", "step"), 4
    )
    parts = zip(by_name["forward"], by_name["backward"], by_name["optimizer"], strict=True)
    assert all(0 < sum(parts_s) <= step_s for parts_s, step_s in zip(parts, by_name["step"], strict=True))
    with Store.open(tmp_path / "store.db", write=False) as store:
        assert [stored.id for stored in store.iterate(kind="run")] == [run.id]


def test_the_steps_that_were_asked_for_are_profiled(fit: Fit) -> None:
    run = sure(fit({"max_steps": 5}, warmup=0, steps=2, profile=range(3, 5)))
    assert run.profile is not None
    assert run.profile.num_steps == 2
    assert {"forward", "backward", "optimizer"} <= {phase.phase for phase in run.profile.phases}
    assert "layer" in {kernel.range for kernel in run.profile.kernels}


def test_a_training_that_fails_is_recorded_with_its_steps(fit: Fit, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="diverged") as caught:
        fit({"max_steps": 9}, fails_at=4, warmup=1)
    assert caught.traceback
    with Store.open(tmp_path / "store.db", write=False) as store:
        [run] = [record for record in store.iterate(kind="run") if isinstance(record, Run)]
    assert sure(run.failure).message.startswith("ValueError: diverged (test_lightning.py:")
    step = sure(sure(run.timing).phase("step"))
    assert len(step.best_s) == 3
