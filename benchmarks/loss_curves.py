"""Loss curves of fast steps against the plain step: both must train alike.

    python -m benchmarks.loss_curves                                            # a GPU: small, context 512, 4 seeds
    python -m benchmarks.loss_curves --device cpu --model tiny --context 64 --seeds 0 1 2
    python -m benchmarks.loss_curves --seeds 3 --output seed_3.json             # one seed a process, each on a GPU
    python -m benchmarks.loss_curves --read seed_*.json --output all.json

Steps come from the builder of `steplab run`. A seed fixes initial weights and the order of sequences, so variants with
one seed see the same batches. Two figures decide if a variant trains as the reference, as shares of the difference
between the reference's seeds:

    by step   root mean square of paired differences (same seed, same step) in the worst window of steps, over the
              standard deviation of the reference's seeds there
    at end    mean paired difference over the last quarter, over the standard deviation between the reference's
    seeds of
              the mean loss there

A variant passes with both at most 1. The control, `bf16_pure`, rounds weights to bf16 after each update: it shows if
the figures detect different training.

The data is the source text of Python's standard library, split into words, runs of spaces and single signs. The most
frequent ones are the vocabulary; one entry stands for the rest. It is learnable at every distance, uses the whole
vocabulary, and needs no network. Other Python versions give other losses, and the same comparison.

Exit code: 0 if every variant passes, else 1.
"""

import argparse
import collections
import dataclasses
import json
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from steplab.measurement.clock import Phase
from steplab.measurement.machine.device import Device, open_device
from steplab.measurement.step.graphed import GraphedStep
from steplab.measurement.step.step import ModelStep, make_step
from steplab.model.build import build_workload
from steplab.specs.changes import resolve_with_recipe
from steplab.specs.resolve import command, resolve_step
from steplab.specs.step import StepSpec


@dataclass(frozen=True, kw_only=True)
class Variant:
    name: str
    fields: Mapping[str, object] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cuda", "cpu")
    control: bool = False
    """True if it is known to train differently and need not pass."""


PLAIN = {"optimizer": "adamw_loop"}
FAST = {"precision": "bf16", "loss": "fused", "optimizer": "adamw_triton", "compile": "block"}
REFERENCE = "plain, fp32"
VARIANTS = (
    Variant(name=REFERENCE, fields=PLAIN),
    Variant(name="--recipe fast", fields={"recipe": "fast"}, devices=("cuda",)),
    Variant(name="bf16_pure", fields=PLAIN | {"precision": "bf16_pure"}, devices=("cuda",), control=True),
    Variant(
        name="bf16 weights with masters",
        fields=FAST | {"attention": "flash_triton", "precision": "bf16_master"},
        devices=("cuda",),
    ),
    Variant(name="fp8", fields=FAST | {"attention": "flash_triton", "precision": "fp8"}, devices=("cuda",)),
    Variant(name="plain, bf16", fields=PLAIN | {"precision": "bf16"}, devices=("cuda",)),
    Variant(name="flash_triton", fields=FAST | {"attention": "flash_triton"}, devices=("cuda",)),
    Variant(
        name="chunked loss, sdpa, merged",
        fields={"attention": "sdpa", "loss": "chunked", "model.projections": "merged"},
        devices=("cpu",),
    ),
    Variant(name="sgd", fields={"optimizer": "sgd"}, devices=("cpu",), control=True),
)
"""The reference is first: eager, fp32, materialised scores, torch's AdamW loop. The most telling variants follow, so
early ends keep them. CPUs use fp32, since few multiply bf16 fast.
"""

PARTS = {"query_key_value": ("query", "key", "value"), "gate_up": ("gate", "up")}
NUM_WINDOWS = 10

Batch = tuple[Tensor, Tensor]
Curves = dict[str, dict[int, list[float]]]
"""Variant -> seed -> loss of each step."""
Losses = NDArray[np.float64]


def source_text() -> Iterator[str]:
    """Modules of the standard library by name, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(path.relative_to(root).parts):
            yield path.read_text(encoding="utf-8", errors="replace")


def sequences(vocab_size: int, length: int) -> Tensor:
    """The text as token ids in sequences: [number, length]."""
    tokens = [token for text in source_text() for token in re.findall(r"\w+| +|[^\w ]", text)]
    frequent = collections.Counter(tokens).most_common(vocab_size - 1)
    number_of = {token: number for number, (token, _) in enumerate(frequent)}
    ids = torch.tensor([number_of.get(token, vocab_size - 1) for token in tokens])
    return ids[: len(ids) // length * length].view(-1, length)


def batches_of(data_NL: Tensor, spec: StepSpec, steps: int, device: torch.device) -> list[Batch]:
    """Tokens and targets of each step, ordered by the seed. The text repeats if steps need more."""
    order = torch.Generator().manual_seed(spec.seed)
    times = 1 + steps * spec.batch // len(data_NL)
    numbers = torch.cat([torch.randperm(len(data_NL), generator=order) for _ in range(times)])
    chosen_SBL = data_NL[numbers[: steps * spec.batch]].view(steps, spec.batch, -1).to(device)
    return [(chosen_BL[:, :-1].contiguous(), chosen_BL[:, 1:].contiguous()) for chosen_BL in chosen_SBL]


def adopt(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a module the weights of one with separate linear layers."""

    def of(name: str) -> Tensor:
        for merged, parts in PARTS.items():
            if f".{merged}." in name:
                return torch.cat([weights[name.replace(merged, part)] for part in parts])
        return weights[name]

    module.load_state_dict({name: of(name) for name in module.state_dict()})


def losses_of(step: ModelStep, batches: Sequence[Batch], device: Device, *, as_graphs: bool) -> list[float]:
    """Train once on each batch; returns each step's loss before its update. `as_graphs`: replay as CUDA graphs; steps
    before the recording train too.
    """
    step.batches = list(batches)
    kept: list[Tensor] = []
    forward = step.phases[0]

    def run() -> None:
        forward.run()
        assert step.loss is not None
        kept.append(step.loss.detach().clone())  # backward frees it

    step.phases[0] = Phase(name=forward.name, run=run)
    if as_graphs:
        graphed = GraphedStep(step, device, "the model")
        graphed.record()
        recorded = kept.pop()  # the recording executes nothing; replays write it
        graphed.batches = list(batches[len(kept) :])
        for _ in graphed.batches:
            for phase in graphed.phases:
                phase.run()
            kept.append(recorded.clone())
    else:
        for _ in batches:
            step.run()
    return [loss.item() for loss in kept]


def trained(spec: StepSpec, weights: Mapping[str, Tensor], batches: Sequence[Batch], device: Device) -> list[float]:
    workload = build_workload(spec, device.torch_device)
    assert workload.module is not None
    adopt(workload.module, weights)
    step = make_step(workload, spec, device.torch_device)
    assert isinstance(step, ModelStep)
    return losses_of(step, batches, device, as_graphs=spec.cuda_graph == "step")


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Curves of all variants and seeds on one device; --output is updated after each."""
    device = open_device(options.device)
    torch_device = device.torch_device
    size = {"model": options.model, "context": options.context, "batch": options.batch, "device": options.device}
    shape = resolve_step(size).model.shape
    assert shape is not None
    data_NL = sequences(shape.vocab_size, options.context + 1)
    where = torch.cuda.get_device_name(torch_device) if torch_device.type == "cuda" else platform.machine()
    curves: Curves = {}
    commands: dict[str, str] = {}
    result = {
        "about": f"{options.model}, batch {options.batch}, context {options.context}, {where}, "
        f"torch {torch.__version__}, text of Python {platform.python_version()} in {data_NL.numel():,} tokens",
        "commands": commands,
        "curves": curves,
    }
    for seed in options.seeds:
        reference = resolve_step(size | {"seed": seed})
        first = build_workload(reference, torch_device).module
        assert first is not None
        weights = {name: tensor.clone() for name, tensor in first.state_dict().items()}
        batches = batches_of(data_NL, reference, options.steps, torch_device)
        for variant in (each for each in VARIANTS if torch_device.type in each.devices):
            spec = resolve_with_recipe({**size, "seed": seed, **variant.fields}, lambda name: torch_device.type)
            try:
                losses = trained(spec, weights, batches, device)
            except Exception as error:  # other variants continue
                print(f"seed {seed}, {variant.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                continue
            curves.setdefault(variant.name, {})[seed] = losses
            commands[variant.name] = command(dataclasses.replace(spec, seed=0))
            print(f"seed {seed}, {variant.name}: {losses[-1]:.3f}", file=sys.stderr, flush=True)
            if options.output:
                Path(options.output).write_text(json.dumps(result))
    return result


def joined(results: Sequence[Mapping[str, Any]]) -> Curves:
    """Curves of several files with different seeds of the same steps."""
    curves: Curves = {}
    for result in results:
        for name, of_seeds in result["curves"].items():
            curves.setdefault(name, {}).update({int(seed): losses for seed, losses in of_seeds.items()})
    return curves


def commands_of(results: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The command of each variant's step. Raises ValueError if files differ in a variant's step."""
    commands: dict[str, str] = {}
    for result in results:
        for name, words in result["commands"].items():
            if commands.setdefault(name, words) != words:
                raise ValueError(f"{name} is '{commands[name]}' in one file and '{words}' in another")
    return commands


def in_order(of_seeds: Mapping[int, list[float]], seeds: Sequence[int]) -> Losses:
    """[seed, step]"""
    return np.array([of_seeds[seed] for seed in seeds])


def windows(values_T: Losses) -> Losses:
    """Root mean square by window of steps."""
    return np.array([np.sqrt(np.mean(part**2)) for part in np.array_split(values_T, min(NUM_WINDOWS, len(values_T)))])


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A variant against the reference, in units of the loss."""

    seeds: Losses
    """Standard deviation of the reference's seeds, by window."""
    paired: Losses
    """Root mean square of paired differences, by window."""
    end_seeds: float
    """Standard deviation, between the reference's seeds, of the mean loss over the last quarter."""
    end_paired: float
    """Mean paired difference there; above 0: a higher loss."""

    @property
    def by_step(self) -> float:
        return float((self.paired / self.seeds).max())

    @property
    def at_end(self) -> float:
        return abs(self.end_paired) / self.end_seeds

    @property
    def passes(self) -> bool:
        return max(self.by_step, self.at_end) <= 1


def beside(reference_ST: Losses, variant_ST: Losses) -> Beside:
    """Compare curves of the same seeds, at least two."""
    last = slice(-max(1, reference_ST.shape[1] // 4), None)
    difference_ST = variant_ST - reference_ST
    return Beside(
        seeds=windows(reference_ST.std(axis=0, ddof=1)),
        paired=windows(np.sqrt(np.mean(difference_ST**2, axis=0))),
        end_seeds=float(reference_ST[:, last].mean(axis=1).std(ddof=1)),
        end_paired=float(difference_ST[:, last].mean()),
    )


def report(results: Sequence[Mapping[str, Any]]) -> int:
    """Print the table and return the exit code. Variants without a seed of the reference are left out."""
    every = joined(results)
    seeds = sorted(every[REFERENCE])
    curves = {name: of_seeds for name, of_seeds in every.items() if of_seeds.keys() >= set(seeds)}
    for name in every.keys() - curves.keys():
        print(f"{name}: left out for lack of a seed", file=sys.stderr)
    if len(seeds) < 2 or len(curves) < 2:
        print("nothing to compare yet: reference and variant need two seeds each (--read)", file=sys.stderr)
        return 0
    reference_ST = in_order(curves[REFERENCE], seeds)
    found = {
        name: beside(reference_ST, in_order(of_seeds, seeds)) for name, of_seeds in curves.items() if name != REFERENCE
    }
    controls = {each.name for each in VARIANTS if each.control}
    print(f"{results[0]['about']}; {len(seeds)} seeds, {reference_ST.shape[1]} steps; loss in nats a token\n")
    print("| step | loss at end | difference | share of the seeds' | worst window | trains as the reference |")
    print("|---|--:|--:|--:|--:|---|")
    last = slice(-max(1, reference_ST.shape[1] // 4), None)
    spread = next(iter(found.values())).end_seeds
    print(f"| {REFERENCE} | {reference_ST[:, last].mean():.4f} | seeds ± {spread:.4f} | 1 | 1 | |")
    for name, each in found.items():
        level = in_order(curves[name], seeds)[:, last].mean()
        words = ("yes" if each.passes else "no") + (" (the control)" if name in controls else "")
        print(f"| {name} | {level:.4f} | {each.end_paired:+.4f} | {each.at_end:.2f} | {each.by_step:.2f} | {words} |")
    print()
    for name, words in commands_of(results).items():
        print(f"{name}: `{words}`")
    return 0 if all(each.passes for name, each in found.items() if name not in controls) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default="small")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--output", default="", help="JSON file for the losses; with --read, for all")
    parser.add_argument("--read", nargs="+", default=[], help="files of --output, instead of training")
    options = parser.parse_args(arguments)
    results = [json.loads(Path(path).read_text()) for path in options.read] or [train(options)]
    if options.read and options.output:
        whole = {"about": results[0]["about"], "commands": commands_of(results), "curves": joined(results)}
        Path(options.output).write_text(json.dumps(whole) + "\n")
    return report(results)


if __name__ == "__main__":
    sys.exit(main())
