"""Synthetic profiles: a small simulation of a launching host and a device. Sums are made plainly from the kernel list,
to check reports.
"""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import Any

from tests.runs import ENVIRONMENT, make_run
from tests.sure import sure

from steplab.records.environment import DeviceInfo, Environment
from steplab.records.profile import Communication, HostCallStats, KernelStats, OpStats, PhaseTime, Profile, Timeline
from steplab.records.run import Run
from steplab.records.timing import PhaseSamples, Timing
from steplab.specs.step import StepSpec

BANDWIDTH, PEAK = 4.8e12, 67e12


@dataclass(frozen=True, kw_only=True)
class Job:
    name: str
    category: str
    phase: str
    range: str
    op: str
    inputs: str = ""
    dtype: str = "fp32"
    flops: float | None = None
    moved_bytes: float | None = None
    stream: int = 7
    duration_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Kernel:
    job: Job
    step: int
    start_ns: int
    end_ns: int
    launched_ns: int


def simulate(steps: Sequence[Sequence[Job]], *, launch_ns: int, gap_ns: int = 900) -> list[Kernel]:
    host = 0
    free: dict[int, int] = defaultdict(int)
    kernels = []
    for step, jobs in enumerate(steps):
        for job in jobs:
            host += launch_ns
            start = max(free[job.stream] + gap_ns, host + 2_000)
            free[job.stream] = start + job.duration_ns
            kernels.append(Kernel(job=job, step=step, start_ns=start, end_ns=free[job.stream], launched_ns=host))
    return sorted(kernels, key=lambda k: k.start_ns)


def total_up(kernels: Sequence[Kernel], **fields: Any) -> Profile:
    num_steps = 1 + max(k.step for k in kernels)
    phases = _phases(kernels)
    values: dict[str, Any] = {
        "source": "torch.profiler",
        "device": "cuda",
        "num_steps": num_steps,
        "window_s": (max(k.end_ns for k in kernels) - min(k.start_ns for k in kernels)) / 1e9,
        "phases": phases,
        "kernels": _kernel_stats(kernels),
        "ops": _op_stats(kernels),
        "communication": _communication(kernels),
        "timeline": _timeline([k for k in kernels if k.step == num_steps - 1]),
        "num_launches": len(kernels),
    }
    return Profile(**(values | fields))


def _kernel_stats(kernels: Iterable[Kernel]) -> tuple[KernelStats, ...]:
    groups: dict[tuple[str, str, str, str, int], list[float]] = defaultdict(list)
    for k in kernels:
        job = k.job
        groups[job.name, job.category, job.phase, job.range, job.stream].append((k.end_ns - k.start_ns) / 1e9)
    stats = [
        KernelStats(
            name=name,
            category=category,
            phase=phase,
            range=where,
            stream=stream,
            calls=len(times),
            total_s=sum(times),
            median_s=median(times),
            max_s=max(times),
        )
        for (name, category, phase, where, stream), times in groups.items()
    ]
    return tuple(sorted(stats, key=lambda s: -s.total_s))


def _op_stats(kernels: Iterable[Kernel]) -> tuple[OpStats, ...]:
    groups: dict[tuple[str, str, str, str, str], list[Kernel]] = defaultdict(list)
    for k in kernels:
        groups[k.job.op, k.job.phase, k.job.range, k.job.inputs, k.job.dtype].append(k)

    def one(key: tuple[str, str, str, str, str], ran: list[Kernel]) -> OpStats:
        flops = [k.job.flops for k in ran]
        moved = [k.job.moved_bytes for k in ran]
        return OpStats(
            name=key[0],
            category=ran[0].job.category,
            phase=key[1],
            range=key[2],
            inputs=key[3],
            dtype=key[4],
            calls=len(ran),
            kernels=len(ran),
            device_s=sum(k.end_ns - k.start_ns for k in ran) / 1e9,
            flops=None if None in flops else float(sum(f for f in flops if f is not None)),
            moved_bytes=None if None in moved else float(sum(m for m in moved if m is not None)),
        )

    return tuple(sorted((one(key, ran) for key, ran in groups.items()), key=lambda s: -s.device_s))


def _phases(kernels: Sequence[Kernel]) -> tuple[PhaseTime, ...]:
    cuts = sorted({t for k in kernels for t in (k.start_ns, k.end_ns)} | {k.launched_ns for k in kernels})
    cuts = [t for t in cuts if t >= kernels[0].start_ns]
    begin: dict[int, list[Kernel]] = defaultdict(list)
    for k in kernels:
        begin[k.start_ns].append(k)
    launches = [k.launched_ns for k in kernels]
    names = list(dict.fromkeys(k.job.phase for k in kernels))
    busy, bound, idle = (dict.fromkeys(names, 0.0) for _ in range(3))
    categories: dict[str, dict[str, float]] = {name: defaultdict(float) for name in names}
    running: list[Kernel] = []
    following = 0
    for low, high in itertools.pairwise(cuts):
        running = [k for k in running if k.end_ns > low] + begin.get(low, [])
        while following < len(kernels) and kernels[following].start_ns <= low:
            following += 1
        length = (high - low) / 1e9
        if running:
            phase = running[0].job.phase
            busy[phase] += length
            for k in running:
                categories[phase][k.job.category] += length / len(running)
        else:
            phase = kernels[following].job.phase
            waits = launches[following] > low
            (bound if waits else idle)[phase] += length
    return tuple(
        PhaseTime(
            phase=name,
            window_s=busy[name] + bound[name] + idle[name],
            busy_s=busy[name],
            host_bound_s=bound[name],
            idle_s=idle[name],
            categories=dict(categories[name]),
            host_s=None if name == "outside" else 0.9 * busy[name],
            num_kernels=sum(k.job.phase == name for k in kernels),
        )
        for name in sorted(names, key=lambda name: name == "outside")
    )


def _communication(kernels: Sequence[Kernel]) -> Communication | None:
    talk = [k for k in kernels if k.job.category == "communication"]
    if not talk:
        return None
    work = [k for k in kernels if k.job.category != "communication"]
    total = sum(k.end_ns - k.start_ns for k in talk)  # one stream: no two at once
    both = 0
    for t in talk:
        both += sum(max(0, min(t.end_ns, w.end_ns) - max(t.start_ns, w.start_ns)) for w in work)
    return Communication(total_s=total / 1e9, overlapped_s=both / 1e9)


def _timeline(kernels: Sequence[Kernel]) -> Timeline:
    zero = min(k.start_ns for k in kernels)
    names = list(dict.fromkeys((k.job.name, k.job.category) for k in kernels))
    number = {name: index for index, name in enumerate(names)}

    def span(chosen: list[Kernel]) -> tuple[int, int]:
        return min(k.start_ns for k in chosen) - zero, max(k.end_ns for k in chosen) - zero

    phases: list[tuple[str, int, int]] = []
    at = 0
    for name in dict.fromkeys(k.job.phase for k in kernels):
        _, end = span([k for k in kernels if k.job.phase == name])
        phases.append((name, at, end))
        at = end
    ranges: list[tuple[str, int, int, int]] = []
    open_: list[Kernel] = []
    for k in [*kernels, None]:
        if open_ and (k is None or (k.job.phase, k.job.range) != (open_[0].job.phase, open_[0].job.range)):
            if open_[0].job.range:
                ranges.append((open_[0].job.range, *span(open_), 1))
            open_ = []
        if k is not None and k.job.stream == kernels[0].job.stream:
            open_.append(k)
    return Timeline(
        names=tuple(name for name, _ in names),
        categories=tuple(category for _, category in names),
        kernel=tuple(number[k.job.name, k.job.category] for k in kernels),
        stream=tuple(k.job.stream for k in kernels),
        start_ns=tuple(k.start_ns - zero for k in kernels),
        duration_ns=tuple(k.end_ns - k.start_ns for k in kernels),
        phases=tuple(phases),
        ranges=tuple(ranges),
    )


# --- the jobs of a training step --------------------------------------------------------------------------

_ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float, at::native::"
    "binary_internal::{}Functor<float> >, std::array<char*, 3ul> >(int, at::native::BinaryFunctor<float, float, float, "
    "at::native::binary_internal::{}Functor<float> >, std::array<char*, 3ul>)"
)
_COPY = (
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda"
    "(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#7}::operator()() const::{lambda(float)#1}>"
    "(at::TensorIteratorBase&)::{lambda(int)#1}>(int, at::native::gpu_kernel_impl_nocast<...>)"
)
_MASK = (
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<at::native::(anonymous namespace)::"
    "masked_fill_kernel(at::TensorIterator&, c10::Scalar const&)::{lambda(float, bool)#1}>>(int, ...)"
)
_REDUCE = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float>"
    ", unsigned int, float, 4, 4> >(at::native::ReduceOp<float, ...>)"
)
_NORM = (
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, true>"
    "(int, float, float const*, float const*)"
)
_SOFTMAX = (
    "void (anonymous namespace)::softmax_warp_{}<float, float, float, 10, false, false>(float*, float const*, int, int)"
)
_ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, "
    "(at::native::ADAM_MODE)1, false>, float const*, double>(...)"
)
_ODD = "triton_poi_fused_that_no_rule_knows_0"


def _gemm(tile: str) -> str:
    return f"void cutlass::Kernel2<cutlass_80_simt_sgemm_{tile}_align1>(cutlass_80_simt_sgemm_{tile}_align1::Params)"


class Shape:
    def __init__(self, spec: StepSpec, seed: int = 0) -> None:
        shape = sure(spec.model.shape)
        self.layers, self.heads, self.width, self.wide = shape.num_layers, shape.num_heads, shape.d_model, shape.d_ff
        self.vocabulary, self.tokens, self.batch, self.context = shape.vocab_size, spec.tokens, spec.batch, spec.context
        self.num_parameters = self.layers * (4 * self.width**2 + 3 * self.width * self.wide)
        self.num_parameters += 2 * self.vocabulary * self.width
        self.random = random.Random(seed)

    def timed(self, job: Job) -> Job:
        compute_s = (job.flops or 0) / PEAK / 0.78
        memory_s = (job.moved_bytes or 0) / BANDWIDTH / 0.72
        seconds = (max(compute_s, memory_s) + 1.8e-6) * (1 + abs(self.random.gauss(0, 0.01)))
        return replace(job, duration_ns=round(seconds * 1e9))

    def matmul(self, phase: str, where: str, m: int, k: int, n: int, tile: str, times: int = 1) -> Job:
        batched = times > 1
        shapes = (f"[{times}, {m}, {k}]", f"[{times}, {k}, {n}]") if batched else (f"[{m}, {k}]", f"[{k}, {n}]")
        return Job(
            name=_gemm(tile),
            category="matmul",
            phase=phase,
            range=where,
            op="aten::bmm" if batched else "aten::mm",
            inputs=" ".join(f"fp32{shape}" for shape in shapes),
            flops=2.0 * times * m * k * n,
            moved_bytes=4.0 * times * (m * k + k * n + m * n),
        )

    def pointwise(self, phase: str, where: str, name: str, category: str, op: str, size: int, tensors: int) -> Job:
        return Job(
            name=name,
            category=category,
            phase=phase,
            range=where,
            op=op,
            inputs=f"fp32[{size}]",
            flops=float(size),
            moved_bytes=4.0 * size * tensors,
        )


def _functor(kind: str) -> str:
    return _ELEMENTWISE.format(kind, kind)


def _forward(s: Shape) -> Iterator[Job]:
    phase, hidden = "forward", s.tokens * s.width
    scores = s.batch * s.heads * s.context**2
    yield Job(name="void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, "
              "true>(...)", category="embedding", phase=phase, range="embedding", op="aten::embedding")  # fmt: skip
    for _ in range(s.layers):
        for norm, rest in (("attention_norm", _attention_jobs), ("feed_forward_norm", _feed_forward_jobs)):
            yield s.pointwise(phase, f"blocks.*.{norm}", _functor("Pow"), "elementwise", "aten::pow", hidden, 2)
            yield s.pointwise(phase, f"blocks.*.{norm}", _REDUCE, "reduction", "aten::mean", hidden, 1)
            yield s.pointwise(phase, f"blocks.*.{norm}", _NORM, "normalisation", "aten::rms_norm", hidden, 2)
            yield from rest(s, phase, hidden, scores)
            yield s.pointwise(phase, "blocks.*", _functor("Add"), "elementwise", "aten::add", hidden, 3)
    yield s.matmul(phase, "head", s.tokens, s.width, s.vocabulary, "256x128_8x4_tn")
    logits = s.tokens * s.vocabulary
    yield s.pointwise(phase, "loss", _SOFTMAX.format("forward_log"), "softmax", "aten::_log_softmax", logits, 2)
    yield Job(name=_ODD, category="uncategorised", phase=phase, range="loss", op="aten::nll_loss_forward")


def _attention_jobs(s: Shape, phase: str, hidden: int, scores: int) -> Iterator[Job]:
    head = s.width // s.heads
    for name in ("query", "key", "value"):
        yield s.matmul(phase, f"blocks.*.attention.{name}", s.tokens, s.width, s.width, "128x64_8x5_tn")
    for _ in range(2):
        for kind in ("Mul", "Mul", "Mul", "Mul", "Sub", "Add"):
            yield s.pointwise(phase, "blocks.*.attention", _functor(kind), "elementwise", "aten::mul", hidden // 2, 3)
        yield s.pointwise(phase, "blocks.*.attention", _COPY, "copy", "aten::cat", hidden, 2)
    many = s.batch * s.heads
    at = "blocks.*.attention"
    yield s.matmul(phase, f"{at}.scores", s.context, head, s.context, "128x128_8x4_tn", many)
    yield s.pointwise(phase, f"{at}.scores", _functor("Mul"), "elementwise", "aten::mul", scores, 2)
    yield s.pointwise(phase, f"{at}.scores", _MASK, "elementwise", "aten::masked_fill", scores, 2)
    softmax = s.pointwise(phase, f"{at}.softmax", _SOFTMAX.format("forward"), "softmax", "aten::_softmax", scores, 2)
    yield replace(softmax, flops=5.0 * scores)
    yield s.matmul(phase, f"{at}.values", s.context, s.context, head, "128x64_8x5_nn", many)
    yield s.pointwise(phase, at, _COPY, "copy", "aten::copy_", hidden, 2)
    yield s.matmul(phase, f"{at}.output", s.tokens, s.width, s.width, "128x64_8x5_tn")


def _feed_forward_jobs(s: Shape, phase: str, hidden: int, scores: int) -> Iterator[Job]:
    at, wide = "blocks.*.feed_forward", s.tokens * s.wide
    for name in ("gate", "up"):
        yield s.matmul(phase, f"{at}.{name}", s.tokens, s.width, s.wide, "256x128_8x4_tn")
    yield s.pointwise(phase, at, _functor("Silu"), "elementwise", "aten::silu", wide, 2)
    yield s.pointwise(phase, at, _functor("Mul"), "elementwise", "aten::mul", wide, 3)
    yield s.matmul(phase, f"{at}.down", s.tokens, s.wide, s.width, "256x128_8x4_tn")


def _backward(s: Shape) -> Iterator[Job]:
    for job in reversed(list(_forward(s))):
        back = replace(job, phase="backward")
        if job.category == "matmul":
            yield replace(back, name=_gemm("128x128_8x4_nn"))
            yield replace(back, name=_gemm("128x128_8x4_nt"))
        elif job.category == "softmax":
            factor = 1.5 * (job.moved_bytes or 0)
            yield replace(back, name=_SOFTMAX.format("backward"), op="aten::_softmax_backward_data", moved_bytes=factor)
        else:
            yield back
            if job.category in ("elementwise", "normalisation"):
                yield replace(back, name=_functor("Add"), category="elementwise", op="aten::add_")


def _optimizer(s: Shape) -> Iterator[Job]:
    chunks = max(s.layers, 4)
    for _ in range(chunks):
        yield Job(
            name=_ADAM,
            category="optimizer",
            phase="optimizer",
            range="",
            op="aten::_fused_adamw_",
            flops=None,
            moved_bytes=28.0 * s.num_parameters / chunks,
        )


@cache
def training_jobs(spec: StepSpec, seed: int) -> tuple[Job, ...]:
    shape = Shape(spec, seed)
    makers: tuple[Callable[[Shape], Iterator[Job]], ...] = (_forward, _backward, _optimizer)
    return tuple(shape.timed(job) for make in makers for job in make(shape))


def training_kernels(spec: StepSpec, *, launch_ns: int, num_steps: int) -> list[Kernel]:
    return simulate([training_jobs(spec, seed) for seed in range(num_steps)], launch_ns=launch_ns)


# --- runs -------------------------------------------------------------------------------------------------


def profiled_run(
    fields: dict[str, object] | None = None, *, launch_ns: int = 4_500, num_steps: int = 3, **overrides: Any
) -> Run:
    fields = {"model": "large", "context": 1024, "precision": "fp32"} | (fields or {})
    run = make_run(fields)
    profile = replace(
        _profile_of_training(sure(run.spec), launch_ns, num_steps),
        host_calls=(
            HostCallStats(name="cudaMemcpyAsync (device to host)", phase="outside", range="", calls=num_steps,
                          total_s=num_steps * 41e-6),
            HostCallStats(name="cudaStreamSynchronize", phase="outside", range="", calls=num_steps,
                          total_s=num_steps * 8.1e-3),
        ),
        notes=("Kernels of 3 µs and less are lengthened by the profiler's own timestamps.",),
    )  # fmt: skip
    return replace(run, timing=agreeing_timing(profile), profile=profile, **overrides)


@cache
def _profile_of_training(spec: StepSpec, launch_ns: int, num_steps: int) -> Profile:
    return total_up(training_kernels(spec, launch_ns=launch_ns, num_steps=num_steps))


def agreeing_timing(profile: Profile, factor: float = 1.004) -> Timing:
    named = [p for p in profile.phases if p.phase != "outside"]
    times = {p.phase: (p.busy_s + p.idle_s + 0.6 * p.host_bound_s) / profile.num_steps * factor for p in named}
    times["step"] = sum(times.values())
    rng = random.Random(3)
    samples = tuple(
        PhaseSamples(phase=name, device_s=tuple(t * (1 + rng.gauss(0, 0.0008)) for _ in range(10)))
        for name, t in times.items()
    )
    return Timing(warmup=samples, back_to_back=samples)


def launch_bound_run(**overrides: Any) -> Run:
    return profiled_run({"model": "small", "context": 128}, launch_ns=20_000, **overrides)


def cpu_run(**overrides: Any) -> Run:
    run = profiled_run({"model": "small", "context": 128, "device": "cpu"}, num_steps=2)
    assert run.spec is not None
    steps = []
    for seed in range(2):
        jobs = training_jobs(run.spec, seed)
        steps.append([replace(j, name=j.op, stream=0, duration_ns=j.duration_ns * 300) for j in jobs])
    profile = total_up(simulate(steps, launch_ns=1, gap_ns=2_000), device="cpu", num_launches=0)
    device = DeviceInfo(kind="cpu", name="Intel Xeon Platinum 8480C", threads=16)
    environment: Environment = replace(ENVIRONMENT, device=device)
    timing = agreeing_timing(profile)
    return replace(run, id="cc0000000001", environment=environment, profile=profile, timing=timing, **overrides)


def imported_kernels() -> list[Kernel]:
    jobs: list[Job] = []
    rng = random.Random(5)
    for index in range(400):
        matmul = index % 2 == 0
        jobs.append(
            Job(
                name=_gemm("128x64_8x5_tn") if matmul else _functor("Mul"),
                category="matmul" if matmul else "elementwise",
                phase="outside",
                range="",
                op="aten::mm" if matmul else "aten::mul",
                duration_ns=rng.randrange(40_000, 90_000) if matmul else rng.randrange(4_000, 30_000),
            )
        )
        if index % 40 == 39:
            jobs.append(
                Job(
                    name="ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                    category="communication",
                    phase="outside",
                    range="",
                    op="c10d::allreduce_",
                    stream=20,
                    duration_ns=12_000_000 if index == 399 else rng.randrange(200_000, 1_500_000),
                )
            )
    return simulate([jobs], launch_ns=6_000)


def imported_run(**overrides: Any) -> Run:
    profile = total_up(
        imported_kernels(),
        source="kineto",
        file="rank0.json.gz",
        notes=("the trace marks no steps: it counts as one step",),
    )
    values: dict[str, Any] = {
        "id": "1a0000000001",
        "created_utc": "2026-11-21T09:00:00Z",
        "steplab_version": "0.1.0",
        "name": "rank0",
        "profile": profile,
        "notes": ("timing, memory: an imported trace has only profiled steps",),
    }
    return Run(**(values | overrides))


def told_runs() -> list[Run]:
    made = {"late": launch_bound_run(), "cpu": cpu_run(), "trace": imported_run()}
    return [
        replace(run, id=f"{number:02d}" * 6, name=name, created_utc=f"2026-11-21T07:{number:02d}:00Z", utilizations=())
        for number, (name, run) in enumerate(made.items(), start=1)
    ]
