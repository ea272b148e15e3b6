"""steplab's overhead per step: its loop against a bare loop, and its callback in a transformers training.

    python -m benchmarks.overhead loop [model] [context] [steps]
    python -m benchmarks.overhead trainer [rounds]        (needs transformers and accelerate)

Both sides alternate in one process, so clock drift affects both; the result is the median ratio of neighbours. Two
turns without steplab give the noise.

loop: the bare loop runs the same phases n times, synchronises and divides, as written by hand.

trainer: one Trainer trains one small LLaMA. A turn's figure is the median time between starts of steps (on a CPU,
processor time), read by a callback of both sides. The callback's record is compared with `steplab run`'s session, also
alternating. The processor time of the callback's calls comes last.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

import steplab
from steplab.measurement.clock import run_back_to_back
from steplab.measurement.machine.device import open_device
from steplab.measurement.observer import Observer
from steplab.measurement.step.step import make_step
from steplab.measurement.step_job import measure_here
from steplab.model.build import build_workload
from steplab.specs.resolve import resolve_step

ROUNDS = 15
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
BATCH, CONTEXT, WARMUP, STEPS = 4, 64, 5, 20
CLOCK = time.perf_counter if torch.cuda.is_available() else time.process_time
"""Processor time on a CPU; other programs affect it less than elapsed time."""


def compared(what: str, turns: Sequence[tuple[float, float, float]]) -> None:
    """Print a step without steplab, the ratio with it, and the noise; a turn is (without, with, without) in seconds."""
    ratio = median(2 * mine / (before + after) for before, mine, after in turns)
    noise = median(abs(after / before - 1) for before, _, after in turns)
    bare_s = median(before for before, _, _ in turns)
    print(f"{what} {bare_s * 1e3:.3f} ms a step; with steplab x {ratio:.4f}; two without it differ by {noise:.4f}")


def loop(model: str = "tiny", context: str = "128", steps: str = "20") -> None:
    num_steps = int(steps)
    spec = resolve_step({"model": model, "context": context, "precision": "fp32"})
    device = open_device("auto")
    phases = make_step(build_workload(spec, device.torch_device), spec, device.torch_device).phases

    def bare() -> float:
        device.synchronize()
        started = time.perf_counter()
        for _ in range(num_steps):
            for phase in phases:
                phase.run()
        device.synchronize()
        return (time.perf_counter() - started) / num_steps

    def ours() -> float:
        # The tool's report: host time over its loop, with all marks and callbacks.
        return run_back_to_back(phases, device, num_steps, lambda iteration: None)[1] / num_steps

    bare(), ours()
    print(f"device {device.torch_device}, {model}, context {context}, {ROUNDS} rounds of {num_steps} steps")
    compared("bare loop", [(bare(), ours(), bare()) for _ in range(ROUNDS)])


def train(folder: str, *callbacks: Any) -> float:
    """Train with these callbacks; seconds from step to step."""
    import transformers

    began_s: list[float] = []

    class Borders(transformers.TrainerCallback):
        def on_step_begin(self, *arguments: Any, **others: Any) -> None:
            began_s.append(CLOCK())

    drawn = torch.randint(CONFIG["vocab_size"], (BATCH * 8, CONTEXT), generator=torch.Generator().manual_seed(0))
    transformers.Trainer(
        model=transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**CONFIG)),
        args=transformers.TrainingArguments(
            output_dir=folder,
            max_steps=WARMUP + STEPS,
            per_device_train_batch_size=BATCH,
            max_grad_norm=0.0,
            logging_steps=1000,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in drawn],
        callbacks=[Borders(), *callbacks],
    ).train()
    return median(end - start for start, end in pairwise(began_s[WARMUP:]))


class Timed:
    """Counts processor seconds inside a callback's calls."""

    def __init__(self, callback: Any) -> None:
        self.seconds = 0.0
        for name in ("on_step_begin", "on_pre_optimizer_step", "on_step_end", "_on_forward", "_on_output"):
            setattr(callback, name, self.around(getattr(callback, name)))

    def around(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: Any, **others: Any) -> None:
            began_s = time.thread_time()
            call(*arguments, **others)
            self.seconds += time.thread_time() - began_s

        return timed


def trainer(rounds: str = "7") -> None:
    import transformers

    from steplab.integrations.transformers import SteplabCallback

    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(CONFIG), encoding="utf-8")
        spec = resolve_step(
            {"model": f"hf:{config}", "batch": BATCH, "context": CONTEXT, "warmup": WARMUP, "steps": STEPS}
        )

        def callback() -> SteplabCallback:  # stored after the last step
            return SteplabCallback("benchmark", warmup=WARMUP, steps=STEPS + 1, store=Path(folder) / "store.db")

        train(folder)
        turns, records = [], []
        for _ in range(int(rounds)):
            turns.append((train(folder), train(folder, callback()), train(folder)))
            recorded = callback()
            train(folder, recorded)
            assert recorded.run is not None
            records.append((recorded.run, measure_here(spec, Observer())))
        own = callback()
        timed = Timed(own)
        whole_s = train(folder, own)
    own_s = timed.seconds / (WARMUP + STEPS)
    print(f"{rounds} rounds of {STEPS} steps, torch {torch.__version__}, transformers {transformers.__version__}")
    compared("without the callback", turns)
    print(f"processor time of its calls: {own_s * 1e6:.0f} us of {whole_s * 1e3:.1f} ms, {own_s / whole_s:.3%}")
    print("record / steplab run, by medians, and steplab run against its neighbour:")
    for name in ("step", "forward", "backward", "optimizer"):
        theirs, ours = ([phase_s(run, name) for run in runs] for runs in zip(*records, strict=True))
        ratios = sorted(a / b for a, b in zip(theirs, ours, strict=True))
        apart = median(abs(b / a - 1) for a, b in pairwise(ours))
        print(
            f"{name:10} {median(theirs) * 1e3:8.2f} ms {median(ours) * 1e3:8.2f} ms  x {median(ratios):.3f} "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f})  +-{apart:.3f}"
        )


def phase_s(run: steplab.Run, name: str) -> float:
    samples = run.timing.phase(name) if run.timing else None
    assert samples is not None
    return median(samples.best_s)


if __name__ == "__main__":
    words = sys.argv[1:]
    trainer(*words[1:]) if words[:1] == ["trainer"] else loop(*words[1:])
