import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.sure import sure

from steplab.records.environment import DeviceInfo, Environment
from steplab.records.failure import Failure
from steplab.records.memory import Memory, PeakMemory
from steplab.records.run import ModelFacts, Run, Utilization
from steplab.records.timing import PhaseSamples, Timing
from steplab.specs.resolve import resolve_step
from steplab.specs.step import StepSpec
from steplab.specs.study import study_from_grids

GIB = 1024**3
PEAKS = {
    "fp32": 67e12,
    "tf32": 494e12,
    **dict.fromkeys(("bf16", "fp16", "bf16_pure", "bf16_master", "fp8", "fp8_torchao"), 989e12),
}
ENVIRONMENT = Environment(
    device=DeviceInfo(
        kind="cuda",
        name="NVIDIA H200",
        memory_bytes=150_000_000_000,
        uuid="GPU-0",
        compute_capability="9.0",
        sm_clock_hz=1.98e9,
        power_limit_w=700.0,
        temperature_c=41.0,
    ),
    host="Linux x86_64",
    cpu="Intel Xeon Platinum 8480C",
    num_cpus=16,
    python="3.12.3",
    torch="2.11.0+cu130",
    cuda="13.0",
    driver="580.65",
    git_commit="1a2b3c4+",
    variables={"CUDA_VISIBLE_DEVICES": "0"},
    gaps=("memory clock: NVML did not say",),
)


def make_run(fields: Mapping[str, object] | None = None, *, seed: int = 0, **overrides: Any) -> Run:
    spec = resolve_step({"model": "small", **(fields or {})})
    rng = random.Random(repr((spec, seed)))
    facts = _facts(spec)
    flops = 6.0 * (facts.num_parameters - (facts.num_embedding_parameters or 0)) * spec.tokens
    flops *= {"forward": 1 / 3, "forward_backward": 1.0, "train": 1.0}[spec.pass_name]
    timing = _timing(spec, rng, flops)
    values: dict[str, Any] = {
        "id": f"{rng.getrandbits(48):012x}",
        "created_utc": "2026-11-21T07:30:00Z",
        "steplab_version": "0.1.0",
        "spec": spec,
        "tokens_per_step": spec.tokens,
        "environment": ENVIRONMENT,
        "model": facts,
        "timing": timing,
        "memory": _memory(spec, facts),
        "utilizations": _utilizations(spec, timing, flops),
    }
    return Run(**(values | overrides))


def out_of_memory(fields: Mapping[str, object] | None = None, **overrides: Any) -> Run:
    failure = Failure(
        kind="out_of_memory",
        message="out of memory: asked 8.00 GiB",
        phase="warmup",
        requested_bytes=8 * GIB,
        peak_allocated_bytes=131 * GIB,
        last_lines=("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8.00 GiB.",),
    )
    empty = {"timing": None, "memory": None, "utilizations": (), "failure": failure}
    return make_run(fields, **(empty | overrides))


def recorder_run(**overrides: Any) -> Run:
    rng = random.Random(1)
    step = tuple(rng.gauss(0.21, 0.004) for _ in range(20))
    phases = (
        PhaseSamples(phase="step", host_s=step),
        PhaseSamples(phase="load batch", host_s=tuple(0.2 * s for s in step)),
        PhaseSamples(phase="forward", host_s=tuple(0.3 * s for s in step)),
        PhaseSamples(phase="update", host_s=tuple(0.5 * s for s in step)),
    )
    values: dict[str, Any] = {
        "id": "c0ffee000000",
        "created_utc": "2026-11-21T08:00:00Z",
        "steplab_version": "0.1.0",
        "name": "my finetuning",
        "environment": ENVIRONMENT,
        "timing": Timing(warmup=(), back_to_back=phases),
        "notes": ("MFU: the loop did not say how many FLOPs a step has",),
    }
    return Run(**(values | overrides))


def grid(axes: Mapping[str, list[object]], memory_bytes: float = 110e9) -> list[Run]:
    runs = []
    for spec in study_from_grids("test", "", [axes]).cells:
        fields = {"model": spec.model.name, "batch": spec.batch, "context": spec.context} | {
            "pass": spec.pass_name,
            "precision": spec.precision,
            "compile": spec.compile,
            "attention": spec.attention,
            "warmup": spec.warmup,
        }
        run = make_run(fields)
        peak = run.memory.peak("step") if run.memory else None
        runs.append(run if peak and peak.peak_allocated_bytes < memory_bytes else out_of_memory(fields))
    return runs


def _facts(spec: StepSpec) -> ModelFacts:
    shape = sure(spec.model.shape)
    block = 4 * shape.d_model**2 + 3 * shape.d_model * shape.d_ff
    embedding = shape.vocab_size * shape.d_model
    return ModelFacts(
        num_parameters=shape.num_layers * block + 2 * embedding,
        num_embedding_parameters=embedding,
        num_layers=shape.num_layers,
        attention_width=shape.d_model,
    )


def _timing(spec: StepSpec, rng: random.Random, flops: float) -> Timing:
    rate = PEAKS[spec.precision] * (0.62 if spec.precision in ("fp32", "tf32") else 0.4)
    layers = spec.model.shape.num_layers if spec.model.shape else 1
    launch_s = layers * (0.0002 if spec.compile == "off" else 0.00009)
    score_s = 2e-13 * spec.batch * spec.context**2 * layers * (200 if spec.attention == "plain" else 60)
    base = flops / rate + launch_s + score_s

    def samples(share: float, count: int, slow: tuple[float, ...] = ()) -> tuple[float, ...]:
        drawn = [share * base * (1 + abs(rng.gauss(0, 0.008))) for _ in range(count)]
        return tuple(s * slow[i] if i < len(slow) else s for i, s in enumerate(drawn))

    shares = {
        "forward": {"step": 1.0, "forward": 1.0},
        "forward_backward": {"step": 1.0, "forward": 0.34, "backward": 0.66},
        "train": {"step": 1.1, "forward": 0.33, "backward": 0.65, "optimizer": 0.12},
    }[spec.pass_name]
    cold = (9.0, 1.8, 1.15)
    hosts = {phase: tuple(s + 2e-5 for s in samples(share, spec.steps)) for phase, share in shares.items()}
    return Timing(
        warmup=tuple(PhaseSamples(phase=p, device_s=samples(s, spec.warmup, cold)) for p, s in shares.items()),
        back_to_back=tuple(
            PhaseSamples(phase=p, device_s=samples(s, spec.steps, cold[spec.warmup :])) for p, s in shares.items()
        ),
        synchronised=tuple(
            PhaseSamples(phase=p, device_s=samples(s, spec.steps), host_s=hosts[p]) for p, s in shares.items()
        ),
        back_to_back_host_s=shares["step"] * base * spec.steps * 1.01,
        first_step_s=None if spec.compile == "off" else 21.0 + base,
    )


def _memory(spec: StepSpec, facts: ModelFacts) -> Memory:
    shape = sure(spec.model.shape)
    width = 4 if spec.precision in ("fp32", "tf32") else 2.6
    states = facts.num_parameters * (4 if spec.pass_name == "forward" else 8 if spec.pass_name != "train" else 16)
    per_layer = spec.tokens * (14 * shape.d_model + 4 * shape.d_ff)
    per_layer += 3 * spec.batch * shape.num_heads * spec.context**2 * (spec.attention == "plain")
    kept = 1 if spec.pass_name == "forward" else shape.num_layers
    peak = int(states + width * per_layer * kept)
    return Memory(
        peaks=(PeakMemory(phase="step", peak_allocated_bytes=peak, peak_reserved_bytes=int(peak * 1.12)),),
        total_bytes=150_000_000_000,
        host_peak_bytes=3 * GIB,
    )


def _utilizations(spec: StepSpec, timing: Timing, flops: float) -> tuple[Utilization, ...]:
    step = sure(timing.phase("step"))
    time_s = sorted(step.best_s)[len(step.best_s) // 2]
    peak = PEAKS[spec.precision]
    dtype = "float32" if spec.precision == "fp32" else "bfloat16"

    def one(kind: Any, convention: str, factor: float) -> Utilization:
        return Utilization(
            kind=kind,
            convention=convention,
            flops=flops * factor,
            dtype=dtype,
            peak_flops_per_s=peak,
            peak_source="NVIDIA H200 data sheet, 2024, dense",
            value=flops * factor / time_s / peak,
        )

    mfus = one("mfu", "causal", 1.0), one("mfu", "full", 1.05), one("mfu", "params", 0.97)
    return (*mfus, one("hfu", "as_executed", 1.05))


def steady(run: Run, number: int, name: str) -> Run:
    samples = tuple(0.01 * number + 1e-4 * step for step in range(10))
    timing = run.timing and Timing(warmup=(), back_to_back=(PhaseSamples(phase="step", device_s=samples),))
    created = f"2026-11-21T07:{number:02d}:00Z"
    return replace(run, id=f"{number:02d}" * 6, name=name, created_utc=created, timing=timing, utilizations=())
