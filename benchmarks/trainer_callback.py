"""What the callback adds to a training with transformers, and its record beside `steplab run` of the same step.

    python -m benchmarks.trainer_callback [rounds]

It takes transformers and accelerate. The same Trainer trains the same small LLaMA with the callback and without it, in
turns; a turn's figure is the median time from the beginning of a step to the beginning of the next, on a CPU in
processor time, read by a callback that is there in both. Two turns without it give the noise. Its record is set beside
that of the session that `steplab run` starts, in turns too. Last, the processor time of the callback's own calls is
taken.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

import steplab
from steplab.integrations.transformers import SteplabCallback
from steplab.measurement.observer import Observer
from steplab.measurement.step.session import measure_here
from steplab.specs.resolve import resolve_step

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
"""Processor time on a CPU, which other programs on the machine affect less than elapsed time."""


class Borders(transformers.TrainerCallback):
    """The times at which steps begin."""

    def __init__(self) -> None:
        self.began_s: list[float] = []

    def on_step_begin(self, *arguments: Any, **others: Any) -> None:
        self.began_s.append(CLOCK())

    @property
    def step_s(self) -> float:
        return median(end - start for start, end in pairwise(self.began_s[WARMUP:]))


def train(folder: str, *callbacks: transformers.TrainerCallback) -> float:
    """Train with these callbacks; seconds from step to step."""
    borders = Borders()
    drawn = torch.randint(CONFIG["vocab_size"], (BATCH * 8, CONTEXT), generator=torch.Generator().manual_seed(0))
    trainer = transformers.Trainer(
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
        callbacks=[borders, *callbacks],
    )
    trainer.train()
    return borders.step_s


class Timed:
    """Counts the processor seconds inside the calls of a callback."""

    def __init__(self, callback: SteplabCallback) -> None:
        self.seconds = 0.0
        for name in ("on_step_begin", "on_pre_optimizer_step", "on_step_end", "_on_forward", "_on_output"):
            setattr(callback, name, self.around(getattr(callback, name)))

    def around(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: Any, **others: Any) -> None:
            began_s = time.thread_time()
            call(*arguments, **others)
            self.seconds += time.thread_time() - began_s

        return timed


def main(rounds: str = "7") -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store.db"
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(CONFIG), encoding="utf-8")

        spec = resolve_step(
            {"model": f"hf:{config}", "batch": BATCH, "context": CONTEXT, "warmup": WARMUP, "steps": STEPS}
        )

        def callback() -> SteplabCallback:
            return SteplabCallback("benchmark", warmup=WARMUP, steps=STEPS + 1, store=store)  # stored after the last

        train(folder)
        turns = []
        for _ in range(int(rounds)):
            before_s, with_s, after_s = train(folder), train(folder, callback()), train(folder)
            recorded = callback()
            train(folder, recorded)
            measured = measure_here(spec, Observer())
            assert recorded.run is not None
            turns.append((before_s, with_s, after_s, recorded.run, measured))
        bare_s = median(before for before, *_ in turns)
        ratio = median(2 * mine / (before + after) for before, mine, after, *_ in turns)
        noise = median(abs(after / before - 1) for before, _, after, *_ in turns)
        own = callback()
        timed = Timed(own)
        whole_s = train(folder, own)
        own_s = timed.seconds / (WARMUP + STEPS)
        print(f"{rounds} rounds of {STEPS} steps, torch {torch.__version__}, transformers {transformers.__version__}")
        print(f"without the callback {bare_s * 1e3:.2f} ms from step to step; with it x {ratio:.4f};")
        print(f"two without it differ by {noise:.4f}")
        print(f"processor time of its calls: {own_s * 1e6:.0f} us of {whole_s * 1e3:.1f} ms, {own_s / whole_s:.3%}")
        print("record / steplab run, by medians, and steplab run against its neighbour:")
        for name in ("step", "forward", "backward", "optimizer"):
            theirs = [phase_s(recorded, name) for *_, recorded, _ in turns]
            ours = [phase_s(measured, name) for *_, measured in turns]
            ratios = sorted(a / b for a, b in zip(theirs, ours, strict=True))
            apart = median(abs(b / a - 1) for a, b in pairwise(ours))
            print(
                f"{name:10} {median(theirs) * 1e3:8.2f} ms {median(ours) * 1e3:8.2f} ms  x {median(ratios):.3f} "
                f"({ratios[0]:.3f} to {ratios[-1]:.3f})  +-{apart:.3f}"
            )


def phase_s(run: steplab.Run, name: str) -> float:
    """The median of a phase in a record."""
    samples = run.timing.phase(name) if run.timing else None
    assert samples is not None
    return median(samples.best_s)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main(*sys.argv[1:])
