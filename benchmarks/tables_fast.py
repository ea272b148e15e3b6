"""Tables of the fastest steps and the 8b step on two GPUs, from records and `steplab advise`.

The peaks below are typed in. eight_b_study.py recorded the 8b steps; its traces were imported by `steplab import-trace
TRACE.json.gz --name ours`, and `steplab report` shows them.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from statistics import median

from benchmarks.tables import RESULTS, read, table
from benchmarks.tables_attention import MATMUL_FLOPS_PER_S
from examples.eight_b import CONTEXT, FF, LAYERS, VOCABULARY, WIDTH

from steplab.costs.flops import model_flops_per_token
from steplab.records.advice import Advice
from steplab.records.rows import run_row
from steplab.records.run import Run
from steplab.records.timing import waits_for_host
from steplab.report.kit.document import Table
from steplab.report.run.columns import list_document
from steplab.specs.hardware import find_hardware

COPY_BYTES_PER_S = 4.28e12
"""Rate of a device copy, read and written (adamw_h200_202611.json)."""
ADAMW_BYTES = 28
"""Bytes per parameter that an update moves (docs/cross_entropy.md)."""
OWN_ATTENTION = ("forward_kernel", "prepare_kernel", "backward_kernel", "finish_kernel")
"""Kernels of `flash_triton` by their names until 2026-11-23, which have no category."""
SAME_RUN = timedelta(minutes=10)
"""Most distance between two records of one GPU in one run."""
STEP = (
    *("model", "context", "precision", "attention", "loss", "block_ops", "compile", "cuda_graph", "optimizer"),
    *("step_time_s", "forward_s", "backward_s", "optimizer_s", "mfu", "peak_allocated_bytes", "peak_reserved_bytes"),
    "id",
)
STEP_CAPTION = (
    "Medians of the measured steps. An overlapped update has no time of its own: it is in the backward pass. What the "
    "CUDA graphs of `reduce-overhead` keep is reserved, and not counted as allocated."
)


def measured() -> tuple[list[Run], list[Advice]]:
    """Measured training steps, each once, and the advice that ended with a step."""
    runs = [run for run in read(RESULTS / "fast_h200_202611.jsonl.gz", Run) if run.spec and run.samples_s]
    walks = read(RESULTS / "walk_h200_202611.jsonl.gz", Advice)
    return [run for run in runs if not run.failure], [walk for walk in walks if walk.spec and walk.best_s]


def fast() -> Iterator[str | Table]:
    """The page in parts: each size against others and by `advise`, its fastest step and distance to the roofline, all
    steps, and the profiled time.
    """
    runs, walks = measured()
    order = sorted(runs, key=lambda run: (_parameters(run), run.spec.context if run.spec else 0, run.median_s))
    fastest = dict[tuple[str, int], Run]()
    for run in order:
        assert run.spec is not None
        if run.spec.model.kind == "transformer":
            fastest.setdefault((run.spec.model.name, run.spec.context), run)
    yield from ("## Beside transformers, and by `advise`", beside(runs, walks))
    yield from ("## The fastest step of each size", steps(list(fastest.values())))
    yield from ("## Their distance to the roofline", floors(list(fastest.values())))
    yield from ("## All steps", steps(order))
    profiled = [run for run in order if run.profile and run.spec and run.spec.pass_name == "train"]
    yield from ("## Where the time goes", shares(profiled))


def _parameters(run: Run) -> int:
    return run.model.num_parameters if run.model else 0


def steps(runs: Sequence[Run]) -> Table:
    """Step and phase times, MFU and memory of each run, as in `steplab list --columns`."""
    [listed] = list_document([run_row(run) for run in runs], STEP).sections[0].blocks
    assert isinstance(listed, Table)
    return replace(listed, caption=STEP_CAPTION)


def beside(runs: Sequence[Run], walks: Sequence[Advice]) -> Table:
    """The recipe's step of each size against transformers' of the same run, and `advise`'s last."""
    rows = []
    sizes = {(r.spec.model.name, r.spec.context): _parameters(r) for r in runs if r.spec and not _peer(r)}
    for size in sorted(sizes, key=lambda size: (sizes[size], size[1])):
        cast = [run for run in runs if _size(run) == size and _is_the_recipe(run, "bf16")]
        walked = max((w for w in walks if _size(w) == size), key=lambda walk: walk.created_utc, default=None)
        ours = [run for run in runs if _size(run) == size and _is_the_recipe(run)]
        pairs = [(run, peer) for run in ours for peer in runs if _peer(peer) == size and _in_one_run(run, peer)]
        last = max((run.created_utc for run, _ in pairs), default=None)
        pair = min((two for two in pairs if two[0].created_utc == last), key=lambda two: _step_s(two[1]), default=None)
        recipe, peer = pair or (min(ours, key=_step_s, default=None), None)
        if recipe is None:
            continue
        autocast = max(cast, key=lambda run: run.created_utc, default=None)
        rows.append(
            (
                *(size[0], str(size[1]), _ms(_step_s(recipe)), _ms(walked.best_s if walked else None)),
                _ms(peer.median_s if peer else None) + "†" * (peer is not None and _waited(peer)),
                f"{_step_s(recipe) / _step_s(peer):.3f}" if peer else "–",
                _ms(autocast.median_s if autocast else None),
                ", ".join(record.id for record in (recipe, walked, peer, autocast) if record),
            )
        )
    own = ("model", "context")
    headers = (*own, "recipe", "by advise", "transformers", "times as long", "with fp32 weights", "records")
    caption = (
        "Milliseconds, medians of the measured steps. Recipe: `--recipe fast --attention flash_triton`, whose weights "
        "are bf16 with fp32 masters (`--precision bf16_master`). By advise: the walk from the plain step. "
        "Transformers: its Llama of the same sizes, bf16 autocast, compiled, cuDNN's attention or torch's choice, "
        "torch's fused AdamW, on the GPU of the recipe's step and within ten minutes of it; the fastest where it was "
        "compiled in several ways, as layer by layer and as a whole in CUDA graphs; †: the device waited for Python. "
        "With fp32 weights: the recipe with `--precision bf16`, which is autocast "
        "over fp32 weights."
    )
    return table(headers, rows, (*own, "records"), caption)


def _waited(run: Run) -> bool:
    return run.timing is not None and waits_for_host(run.timing.back_to_back)


def _size(record: Run | Advice) -> tuple[str, int] | None:
    return (record.spec.model.name, record.spec.context) if record.spec else None


def _is_the_recipe(run: Run, precision: str = "bf16_master") -> bool:
    spec, asked = run.spec, (precision, "triton", "overlapped", "flash_triton")
    return spec is not None and (spec.precision, spec.block_ops, spec.update, spec.attention) == asked


def _peer(run: Run) -> tuple[str, int] | None:
    """The size of transformers' model; None for other models."""
    assert run.spec is not None
    found = re.fullmatch(r"hf:.*llama-(.+)\.json", run.spec.model.name)
    return (found[1], run.spec.context) if found else None


def _in_one_run(a: Run, b: Run) -> bool:
    gpus = {run.environment.device.uuid for run in (a, b) if run.environment}
    apart = datetime.fromisoformat(a.created_utc) - datetime.fromisoformat(b.created_utc)
    return len(gpus) == 1 and abs(apart) <= SAME_RUN


def shares(runs: Sequence[Run]) -> Table:
    """Milliseconds of a profiled step by bound, two of them with the rate reached."""
    rows = []
    for run in runs:
        assert run.spec is not None
        assert run.model is not None
        assert run.profile is not None
        spec, model, profile = run.spec, run.model, run.profile
        lasted_s = defaultdict[str, float](float)
        for kernel in profile.kernels:
            part = "attention" if kernel.name in OWN_ATTENTION else kernel.category
            lasted_s[part] += kernel.total_s / profile.num_steps
        products_s, attention_s, adamw_s = (lasted_s[each] for each in ("matmul", "attention", "optimizer"))
        all_s = sum(lasted_s.values())
        at_once_s = all_s - profile.busy_s / profile.num_steps
        idle_s = sum(phase.idle_s + phase.host_bound_s for phase in profile.phases) / profile.num_steps
        rest_s = all_s - products_s - attention_s - adamw_s
        flops = spec.tokens_of_all * _flops_per_token(run, 0)
        moved = ADAMW_BYTES * model.num_parameters
        rows.append(
            (
                *(spec.model.name, str(spec.context), spec.precision, spec.block_ops, spec.compile, spec.cuda_graph),
                *(_ms(run.median_s), _ms(products_s), _tera(flops, products_s, 0), _ms(flops / MATMUL_FLOPS_PER_S)),
                *(_ms(adamw_s), _tera(moved, adamw_s, 2), _ms(moved / COPY_BYTES_PER_S)),
                *(_ms(attention_s), _ms(rest_s), _ms(at_once_s), _ms(idle_s), run.id),
            )
        )
    own = ("model", "context", "precision", "block ops", "compile", "graph")
    products = ("products", "TFLOP/s", f"at {MATMUL_FLOPS_PER_S / 1e12:.0f}")
    adamw = ("AdamW", "TB/s", f"at {COPY_BYTES_PER_S / 1e12:.2f}")
    headers = (*own, "step", *products, *adamw, "attention", "other kernels", "at once", "idle", "record")
    caption = (
        "Milliseconds of a profiled step; beside it (step) those of the same step without the profiler. Products: "
        "matrix products outside of attention, 6 FLOPs for each token and parameter that they use; beside them their "
        f"time at the rate of a matmul of 8192³. AdamW: {ADAMW_BYTES} bytes for each parameter; beside it the time of "
        "a copy of as many bytes. Other kernels (casts, norms, activations, residual sums, embedding, loss) are bound "
        "by memory. Durations are those of the kernels: where an overlapped update runs beside others, both take "
        "longer, and both columns have that time, which the step has once (at once). Idle: no kernel ran."
    )
    return table(headers, rows, (*own, "record"), caption)


def floors(runs: Sequence[Run]) -> Table:
    """Least time by the GPU's stated figures, against the step."""
    rows = []
    for run in runs:
        assert run.spec is not None
        assert run.model is not None
        known = find_hardware(run.device_name or "")
        assert known is not None
        peak = known.peaks["bf16"].flops_per_s
        tokens, linear, all_flops = run.spec.tokens_of_all, _flops_per_token(run, 0), _flops_per_token(run)
        update_s = ADAMW_BYTES * run.model.num_parameters / known.memory_bandwidth_bytes_per_s
        parts_s = tokens * linear / peak, tokens * (all_flops - linear) / peak, update_s
        step_s = _step_s(run)
        rows.append(
            (
                *(run.spec.model.name, str(run.spec.context), _ms(step_s), *map(_ms, parts_s), _ms(sum(parts_s))),
                *(f"{sum(parts_s) / step_s:.0%}", run.id),
            )
        )
    own = ("model", "context")
    headers = (*own, "step", "products", "attention", "AdamW", "together", "of the step", "record")
    caption = (
        "Milliseconds. Products and attention: the FLOPs that are needed, by the causal convention, at the stated "
        f"dense peak; AdamW: {ADAMW_BYTES} bytes for each parameter at the stated bandwidth. Together, if nothing "
        "overlapped."
    )
    return table(headers, rows, (*own, "record"), caption)


def _flops_per_token(run: Run, context: int | None = None) -> float:
    assert run.model is not None
    assert run.spec is not None
    flops = model_flops_per_token(
        "causal",
        num_parameters=run.model.num_parameters,
        num_embedding_parameters=run.model.num_embedding_parameters,
        num_layers=run.model.num_layers,
        attention_width=run.model.attention_width,
        context=run.spec.context if context is None else context,
        backward=True,
    )
    assert flops is not None
    return flops


def _tera(amount: float, seconds: float, digits: int) -> str:
    return f"{amount / seconds / 1e12:.{digits}f}" if seconds else "–"


def _step_s(run: Run) -> float:
    assert run.median_s is not None
    return run.median_s


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.2f}" if seconds < 0.1 else f"{seconds * 1e3:.1f}"


# --- the 8b step on two GPUs ----------------------------------------------------------------------------------------

NAMES = {
    "ours": "examples/eight_b.py",
    "fp8": "examples/eight_b.py --fp8",
    "fp8_torchao": "its blocks converted to fp8 by torchao",
    "peer": "of torch's own parts",
}


def eight_b() -> Iterator[Table]:
    """Runs with known step times; `steplab report` has the advice and the profiles.

    The bound counts a GPU's FLOPs per step, a multiply-add as two: products outside attention, forward and backward, of
    all parameters except the embedding's; two attention products forward and five backward, under the mask.
    """
    linear = LAYERS * (4 * WIDTH**2 + 3 * WIDTH * FF) + VOCABULARY * WIDTH
    needed, rows = 6.0 * CONTEXT * linear + 7.0 * WIDTH * CONTEXT**2 * LAYERS, []
    for run in json.loads((RESULTS / "eight_b_h200_202611.json").read_text(encoding="utf-8")):
        if step_s := run.get("step_s"):
            began, what, middle_s = run["created_utc"][:16].replace("T", " "), run["what"], median(step_s)
            times = f"{middle_s:.3f}", f"{min(step_s):.3f} to {max(step_s):.3f}"
            peaks = (f"{run[f'peak_{kind}_bytes'] / 1e9:.1f}" for kind in ("allocated", "reserved"))
            share = f"{needed / MATMUL_FLOPS_PER_S / middle_s:.0%}"
            rows.append((began, NAMES.get(what, what), str(len(step_s)), *times, share, *peaks))
    headers = ("UTC", "what", "steps", "step", "range", "of the bound", "allocated", "reserved")
    caption = (
        "Seconds from barrier to barrier by the host's clock of the first rank, medians; GB (1e9 bytes) at the peak. "
        f"The bound is the time of the needed FLOPs ({needed:.3g} a GPU) at {MATMUL_FLOPS_PER_S / 1e12:.0f} TFLOP/s, "
        "which a bf16 product of 8192³ reaches; fp8 products are faster."
    )
    yield table(headers, rows, ("UTC", "what"), caption)
