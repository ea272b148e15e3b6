"""Loss curves of fast steps beside those of the plain one: what a fast step trains must be what the plain one trains.

    python -m benchmarks.loss_curves                                            # a GPU: small, context 512, 4 seeds
    python -m benchmarks.loss_curves --device cpu --model tiny --context 64 --seeds 0 1 2
    python -m benchmarks.loss_curves --seeds 3 --output seed_3.json             # one seed a process, on GPUs of its own
    python -m benchmarks.loss_curves --read seed_*.json --output all.json

The steps are those that `steplab run` measures, from the same builder. A seed decides the initial weights and the order
of the sequences; with one seed every variant begins with the same weights and sees the same batches. Two figures decide
whether a variant trains as the reference does, both as shares of what the reference's own seeds differ by:

    by step   the root mean square of the paired differences (same seed, same step) in the worst window of steps, over
              the standard deviation of the reference's seeds in that window
    at end    the mean paired difference over the last quarter, over the standard deviation, between the reference's
              seeds, of its mean loss there

A variant passes with both at most 1. `bf16_pure`, whose weights are rounded to bf16 after every update, is the control:
it shows whether the figures would find a step that trains otherwise.

The data is the source text of Python's standard library, split into words, runs of spaces and single signs; the most
frequent ones are the vocabulary, and one entry stands for all others. It is learnable at every distance, uses the whole
vocabulary, and needs no network. The text of another version of Python gives other losses, and the same comparison.
Exit code: 0 if every variant passes, 1 if one does not.
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
    """What it sets, by the names of options."""
    devices: tuple[str, ...] = ("cuda", "cpu")
    control: bool = False
    """Whether it is known to train otherwise, so that it need not pass."""


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
"""The reference first: eager, fp32, attention with its scores in memory, and torch's AdamW as a loop. Then the most
telling ones, so that a run that is ended early has them. Few CPUs multiply bf16 at speed, so there all are in fp32."""

PARTS = {"query_key_value": ("query", "key", "value"), "gate_up": ("gate", "up")}
"""The linear layers of which merged ones are made."""
NUM_WINDOWS = 10

Batch = tuple[Tensor, Tensor]
Curves = dict[str, dict[int, list[float]]]
"""variant -> seed -> loss of each step"""
Losses = NDArray[np.float64]


def source_text() -> Iterator[str]:
    """The modules of the standard library, without its tests, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(path.relative_to(root).parts):
            yield path.read_text(encoding="utf-8", errors="replace")


def sequences(vocab_size: int, length: int) -> Tensor:
    """The text as token ids, cut into sequences: [number, length]."""
    tokens = [token for text in source_text() for token in re.findall(r"\w+| +|[^\w ]", text)]
    frequent = collections.Counter(tokens).most_common(vocab_size - 1)
    number_of = {token: number for number, (token, _) in enumerate(frequent)}
    ids = torch.tensor([number_of.get(token, vocab_size - 1) for token in tokens])
    return ids[: len(ids) // length * length].view(-1, length)


def batches_of(data_NL: Tensor, spec: StepSpec, steps: int, device: torch.device) -> list[Batch]:
    """Tokens and targets of each step; the order is the seed's. The text is read again if the steps need more of it."""
    order = torch.Generator().manual_seed(spec.seed)
    times = 1 + steps * spec.batch // len(data_NL)
    numbers = torch.cat([torch.randperm(len(data_NL), generator=order) for _ in range(times)])
    chosen_SBL = data_NL[numbers[: steps * spec.batch]].view(steps, spec.batch, -1).to(device)
    return [(chosen_BL[:, :-1].contiguous(), chosen_BL[:, 1:].contiguous()) for chosen_BL in chosen_SBL]


def adopt(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a module the weights of one whose linear layers are separate."""

    def of(name: str) -> Tensor:
        for merged, parts in PARTS.items():
            if f".{merged}." in name:
                return torch.cat([weights[name.replace(merged, part)] for part in parts])
        return weights[name]

    module.load_state_dict({name: of(name) for name in module.state_dict()})


def losses_of(step: ModelStep, batches: Sequence[Batch], device: Device, *, as_graphs: bool) -> list[float]:
    """Train on each batch once, and give the loss of each step before its update. as_graphs: replay the step as CUDA
    graphs; what runs before they are recorded trains too."""
    step.batches = list(batches)
    kept: list[Tensor] = []
    forward = step.phases[0]

    def run() -> None:
        forward.run()
        assert step.loss is not None
        kept.append(step.loss.detach().clone())  # backward lets go of it

    step.phases[0] = Phase(name=forward.name, run=run)
    if as_graphs:
        graphed = GraphedStep(step, device, "the model")
        graphed.record()
        recorded = kept.pop()  # of the recording, which executes nothing; every replay writes it
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
    """The curves of all variants and seeds on one device; those until then are in --output after each."""
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
            except Exception as error:  # the other variants are worth having without it
                print(f"seed {seed}, {variant.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                continue
            curves.setdefault(variant.name, {})[seed] = losses
            commands[variant.name] = command(dataclasses.replace(spec, seed=0))
            print(f"seed {seed}, {variant.name}: {losses[-1]:.3f}", file=sys.stderr, flush=True)
            if options.output:
                Path(options.output).write_text(json.dumps(result))
    return result


def joined(results: Sequence[Mapping[str, Any]]) -> Curves:
    """The curves of several files, which have other seeds of the same steps."""
    curves: Curves = {}
    for result in results:
        for name, of_seeds in result["curves"].items():
            curves.setdefault(name, {}).update({int(seed): losses for seed, losses in of_seeds.items()})
    return curves


def commands_of(results: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The command that measures each variant's step. Raises ValueError for files whose variants are other steps."""
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
    """Root mean square in each window of steps."""
    return np.array([np.sqrt(np.mean(part**2)) for part in np.array_split(values_T, min(NUM_WINDOWS, len(values_T)))])


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A variant beside the reference, in units of the loss."""

    seeds: Losses
    """Standard deviation of the reference's seeds, by window."""
    paired: Losses
    """Root mean square of the paired differences, by window."""
    end_seeds: float
    """Standard deviation, between the reference's seeds, of the mean loss over the last quarter."""
    end_paired: float
    """Mean paired difference there; above 0: the variant's loss is higher."""

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
    """Compare the curves of the same seeds; two seeds at least."""
    last = slice(-max(1, reference_ST.shape[1] // 4), None)
    difference_ST = variant_ST - reference_ST
    return Beside(
        seeds=windows(reference_ST.std(axis=0, ddof=1)),
        paired=windows(np.sqrt(np.mean(difference_ST**2, axis=0))),
        end_seeds=float(reference_ST[:, last].mean(axis=1).std(ddof=1)),
        end_paired=float(difference_ST[:, last].mean()),
    )


def report(results: Sequence[Mapping[str, Any]]) -> int:
    """Print the table, and give the exit code. A variant that lacks a seed of the reference, because
    its run was ended before it, is left out."""
    every = joined(results)
    seeds = sorted(every[REFERENCE])
    curves = {name: of_seeds for name, of_seeds in every.items() if of_seeds.keys() >= set(seeds)}
    for name in every.keys() - curves.keys():
        print(f"{name}: left out, because it lacks a seed", file=sys.stderr)
    if len(seeds) < 2 or len(curves) < 2:
        print("nothing to compare yet: it takes two seeds, of the reference and of a variant (--read)", file=sys.stderr)
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
    parser.add_argument("--output", default="", help="a file for the losses, in JSON; with --read, for those of all")
    parser.add_argument("--read", nargs="+", default=[], help="files of --output, in place of training")
    options = parser.parse_args(arguments)
    results = [json.loads(Path(path).read_text()) for path in options.read] or [train(options)]
    if options.read and options.output:
        whole = {"about": results[0]["about"], "commands": commands_of(results), "curves": joined(results)}
        Path(options.output).write_text(json.dumps(whole) + "\n")
    return report(results)


if __name__ == "__main__":
    sys.exit(main())
