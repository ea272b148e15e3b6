import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.test_bad_input import TINY_LLAMA
from tests.sure import sure

from steplab.measurement.observer import Observer
from steplab.measurement.step_job import measure_here
from steplab.records.run import Run
from steplab.records.timing import Timing
from steplab.records.validation import check
from steplab.specs.resolve import resolve_step
from steplab.store.database import Store

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="accelerate is missing, which the Trainer needs")

BATCH, CONTEXT = 2, 32
LAYER_NS, UPDATE_NS = 1_000_000, 5_000_000


def tokens(count: int, vocabulary: int, context: int = CONTEXT) -> list[dict[str, torch.Tensor]]:
    drawn = torch.randint(vocabulary, (count, context), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in drawn]


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Run | None]:
    from steplab.integrations.transformers import SteplabCallback

    def trained(
        config: dict[str, Any], arguments: dict[str, Any], context: int = CONTEXT, **options: Any
    ) -> Run | None:
        callback = SteplabCallback(store=tmp_path / "store.db", **options)
        asked = {
            "output_dir": str(tmp_path),
            "per_device_train_batch_size": BATCH,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": True,
        }
        trainer = transformers.Trainer(
            model=transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**config)),
            args=transformers.TrainingArguments(**(asked | arguments)),
            train_dataset=tokens(64, config["vocab_size"], context),
            callbacks=[callback],
        )
        trainer.train()
        assert not trainer.model._forward_hooks
        assert not trainer.model._forward_pre_hooks
        return callback.run

    return trained


Train = Callable[..., Run | None]


def timing_of(run: Run | None) -> Timing:
    assert run is not None
    check(run)
    assert run.timing is not None
    return run.timing


def test_optimizer_steps_are_recorded_with_their_phases(train: Train, tmp_path: Path) -> None:
    run = train(
        TINY_LLAMA,
        {"max_steps": 9, "gradient_accumulation_steps": 2, "run_name": "a run"},
        warmup=2,
        steps=4,
        tokens_per_step=2 * BATCH * CONTEXT,
    )
    timing = timing_of(run)
    assert run is not None
    assert (run.name, run.failure) == ("a run", None)
    by_name = {samples.phase: samples.best_s for samples in timing.back_to_back}
    assert {name: len(samples) for name, samples in by_name.items()} == dict.fromkeys(
        ("forward", "backward", "optimizer", "step"), 4
    )
    parts = zip(by_name["forward"], by_name["backward"], by_name["optimizer"], strict=True)
    assert all(0 < sum(parts_s) <= step_s for parts_s, step_s in zip(parts, by_name["step"], strict=True))
    assert timing.between_s is not None
    with Store.open(tmp_path / "store.db", write=False) as store:
        assert [stored.id for stored in store.iterate(kind="run")] == [run.id]


def test_a_training_that_is_shorter_is_recorded_at_its_end(train: Train) -> None:
    timing = timing_of(train(TINY_LLAMA, {"max_steps": 3}, warmup=1))
    step = sure(timing.phase("step"))
    assert len(step.best_s) == 2


def test_the_steps_that_were_asked_for_are_profiled_by_module(train: Train) -> None:
    run = train(TINY_LLAMA, {"max_steps": 6}, warmup=0, steps=2, profile=range(3, 5))
    step = sure(timing_of(run).phase("step"))
    assert len(step.best_s) == 2  # steps 0 and 1: step 2 runs under the profiler, which begins there
    assert run is not None
    assert run.profile is not None
    assert run.profile.num_steps == 2
    assert {"forward", "backward", "optimizer"} <= {phase.phase for phase in run.profile.phases}
    assert "model.layers.*.self_attn.q_proj" in {kernel.range for kernel in run.profile.kernels}


class ClockOfWork:
    """A clock on which only forward passes and optimizer steps take time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 0
        monkeypatch.setattr(time, "perf_counter_ns", self.read)
        for owner, name, takes_ns in (
            (transformers.models.llama.modeling_llama.LlamaDecoderLayer, "forward", LAYER_NS),
            (torch.optim.AdamW, "step", UPDATE_NS),
        ):
            monkeypatch.setattr(owner, name, self.taking(takes_ns, getattr(owner, name)))

    def read(self) -> int:
        self.now_ns += 1  # no two readings are alike
        return self.now_ns

    def taking(self, takes_ns: int, work: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(work)
        def taken(*args: Any, **options: Any) -> Any:
            self.now_ns += takes_ns
            return work(*args, **options)

        return taken


def test_a_trainers_step_is_what_steplab_run_calls_one(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All micro-steps and the update."""
    accumulation, layers = 4, 2
    config = TINY_LLAMA | {"num_hidden_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    fields = {"model": f"hf:{tmp_path / 'config.json'}", "context": CONTEXT, "batch": BATCH, "device": "cpu"}
    spec = resolve_step(fields | {"accumulation": accumulation, "warmup": 1, "steps": 4})
    ClockOfWork(monkeypatch)
    arguments = {"max_steps": 5, "gradient_accumulation_steps": accumulation, "max_grad_norm": 0.0}
    for run in (measure_here(spec, Observer()), train(config, arguments, warmup=1, steps=4)):
        step = sure(timing_of(run).phase("step"))
        assert step.best_s == pytest.approx([(accumulation * layers * LAYER_NS + UPDATE_NS) / 1e9] * 4, rel=1e-3)
