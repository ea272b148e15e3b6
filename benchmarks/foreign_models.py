"""Steps of transformers' models with random weights, for testing predictions of other libraries' models.

    python -m benchmarks.foreign_models FOLDER            # one GPU, 20 minutes: profiles, experts, compiled
    python -m benchmarks.foreign_models FOLDER --gpus 2   # dp and fsdp
    python -m benchmarks.foreign_models FOLDER --device cpu --only llama-S
    python -m benchmarks.foreign_models FOLDER --held-out RECORDS.jsonl.gz   # no GPU: errors without a family

Configurations go to FOLDER, records to FOLDER/store.db. Failing cells are named; the rest continues. Sizes fit an 80 GB
GPU.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median

from benchmarks.rates_of_kernels import fit_traced
from benchmarks.tables import read

from steplab.costs.rates import Gpu, gpu_named
from steplab.lab.predicting import operators_of
from steplab.plan.time import predict_step_time
from steplab.records.run import Run

SIZES = {"S": (1024, 8, 16, 8, 1024), "M": (2048, 6, 16, 4, 2048), "L": (3072, 4, 24, 2, 4096)}
SIZES["T"] = (2048, 8, 16, 4, 2048)
"""Width, layers, heads, batch and context; T is for several GPUs."""
FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "gpt_neox", "gemma3_text")
HOW = {
    "S": "--precision bf16 --attention sdpa",
    "M": "--precision bf16 --attention plain",
    "L": "--precision bf16_pure --attention sdpa",
}
COMPILED = {
    "default": ("llama-S", "gpt2-S", "gpt2-M", "qwen2-M", "gpt_neox-L", "gemma3_text-S", "opt-M"),
    "block": ("llama-M", "qwen3-S"),
}


def configurations(size: str) -> dict[str, dict[str, object]]:
    """Entries of transformers' `config.json` by family."""
    width, layers, heads, _, _ = SIZES[size]
    usual: dict[str, object] = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    usual |= {"max_position_embeddings": 8192}
    grouped = usual | {"intermediate_size": 11 * width // 4 // 64 * 64, "num_key_value_heads": heads // 4}
    grouped |= {"hidden_act": "silu"}
    tied: dict[str, object] = {"vocab_size": 151936, "tie_word_embeddings": True}
    found: dict[str, dict[str, object]] = {
        "gpt2": {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 4096, "vocab_size": 50257},
        "llama": grouped | {"vocab_size": 32000, "tie_word_embeddings": False},
        "qwen2": grouped | tied,
        "qwen3": grouped | tied | {"head_dim": width // heads},
        "gpt_neox": usual | {"intermediate_size": 4 * width, "vocab_size": 50304, "hidden_act": "gelu"},
        "gemma3_text": grouped | {"vocab_size": 262144, "head_dim": width // heads, "sliding_window": 512},
        "bert": usual | {"intermediate_size": 4 * width, "vocab_size": 30522, "architectures": ["BertForMaskedLM"]},
        "opt": usual | {"ffn_dim": 4 * width, "word_embed_proj_dim": width, "vocab_size": 50272},
        "mixtral": grouped
        | {"intermediate_size": width, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2},
    }
    return {family: {"model_type": family} | config for family, config in found.items()}


def cells(gpus: int) -> Iterator[tuple[str, str]]:
    """Commands with options, and their models."""
    if gpus > 1:
        for family in ("qwen2", "llama", "gpt2"):
            for layout in ("", f"--layout dp={gpus}", f"--layout fsdp={gpus}"):
                yield f"run --precision bf16_pure --attention sdpa {layout}", f"{family}-T"
        for family, kind in (("llama", "fsdp"), ("qwen2", "fsdp"), ("qwen2", "dp")):
            yield f"run --precision bf16 --attention sdpa --layout {kind}={gpus}", f"{family}-T"
        yield f"run --precision bf16_pure --attention sdpa --layout fsdp={gpus} --compile block", "llama-T"
        yield f"run --precision bf16 --attention sdpa --layout dp={gpus} --compile default", "llama-T"
        return
    for size, how in HOW.items():
        yield from ((f"profile {how}", f"{family}-{size}") for family in FAMILIES)
    for precision, model in (("bf16_pure", "mixtral-S"), ("bf16", "mixtral-S"), ("bf16_pure", "mixtral-M")):
        yield f"profile --precision {precision} --attention sdpa", model
    yield from (("run --precision bf16 --attention sdpa", model) for model in ("bert-M", "opt-S", "opt-M"))
    for compiled, models in COMPILED.items():
        yield from ((f"profile --precision bf16 --attention sdpa --compile {compiled}", model) for model in models)
    yield "profile --precision bf16_pure --attention sdpa --compile default", "llama-L"
    yield "profile --precision bf16_pure --attention plain --compile default", "qwen3-M"


def held_out(path: Path) -> None:
    """Errors of predicted times of one process, with traced kernels' rates fitted to other families' or sizes'
    profiles.
    """
    steps = [
        (run, run.spec) for run in read(path, Run) if run.spec and run.median_s and run.spec.layout.world_size == 1
    ]
    operators = {spec.as_predicted: operators_of(spec.as_predicted) for _, spec in steps}
    gpu = gpu_named("H200 SXM")

    @cache
    def without(left_out: str) -> Gpu:
        others = [run for run, spec in steps if left_out not in spec.model.label]
        return fit_traced(others, lambda each: operators[each.as_predicted], gpu)

    errors: dict[str, list[tuple[float, bool]]] = {"eager": [], "compiled": []}
    for run, spec in steps:
        told = [f"{spec.model.label:22}{spec.compile:8}{spec.precision:10}"]
        family, _, size = spec.model.label.removeprefix("hf:").rpartition("-")
        for left_out in (f"hf:{family}-", f"-{size}"):
            time = predict_step_time(spec, without(left_out), operators[spec.as_predicted])
            measured_s = run.median_s or 1.0
            error, inside = time.central_s / measured_s - 1, time.low_s <= measured_s <= time.high_s
            errors["eager" if spec.compile == "off" else "compiled"].append((error, inside))
            told.append(f"without {left_out:10}{error:+7.1%}{' ' if inside else '*'}")
        print(*told, flush=True)
    for name, found in errors.items():
        sizes = [abs(error) for error, _ in found]
        share = sum(known for _, known in found) / len(found)
        print(f"{name}: median {median(sizes):.1%}, worst {max(sizes):.1%}, {share:.0%} inside (* outside)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", help="one model, such as llama-S")
    parser.add_argument("--held-out", type=Path, help="records to predict instead of measuring")
    given = parser.parse_args()
    if given.held_out:
        held_out(given.held_out)
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    for size in SIZES:
        for family, config in configurations(size).items():
            (given.folder / f"{family}-{size}.json").write_text(json.dumps(config, indent=1) + "\n")
    for options, model in cells(given.gpus):
        if given.only in (None, model):
            *_, batch, context = SIZES[model[-1]]
            print(f"{model}: {options}", flush=True)
            command = [sys.executable, "-m", "steplab", *options.split(), "--device", given.device, "--steps", "8"]
            command += ["--warmup", "3", "--batch", str(batch), "--context", str(context), "--store", "store.db"]
            done = subprocess.run([*command, "--model", f"hf:{model}.json"], cwd=given.folder, check=False)
            if done.returncode:
                print(f"{model}: exit code {done.returncode}", flush=True)


if __name__ == "__main__":
    main()
