"""The tables of the fastest steps, from their records.

    python benchmarks/fast_table.py RECORDS... [--into benchmarks/results/fast_h200_202611.md]

RECORDS are what `steplab export` writes of training steps, gzipped or not; those with a profile make a table of their
own. With --into, the tables replace what stands between the marks in a page. Every figure is computed from the samples
in the records; nothing is typed in but the ceilings below.
"""

import argparse
import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from page_tables import table_of_texts, write_between_marks

from steplab.costs.flops import model_flops_per_token
from steplab.records.codec import decode
from steplab.records.profile import CATEGORIES
from steplab.records.run import Run
from steplab.report.kit.document import Table
from steplab.report.kit.markup import markdown_table
from steplab.specs.hardware import find_hardware

MATMUL_FLOPS_PER_S = 790e12
"""What a bf16 matmul of 8192³ reaches on an H200, random numbers."""
COPY_BYTES_PER_S = 4.28e12
"""What a copy on the device reaches, read and written (adamw_h200_202611.json)."""
ADAMW_BYTES = 28
"""That an update reads and writes for each parameter (docs/cross_entropy.md)."""
OWN_ATTENTION = ("forward_kernel", "prepare_kernel", "backward_kernel", "finish_kernel")
"""Kernels of `flash_triton` by the names that they had until 2026-11-23, which put them into no category."""
PHASES = ("forward", "backward", "optimizer")
STEP = (
    *("model", "context", "precision", "attention", "loss", "projections", "block ops", "compile", "graph"),
    "optimizer",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--into", type=Path)
    options = parser.parse_args()
    runs = {run.id: run for path in options.records for run in read(path)}
    text = "\n\n".join(parts(list(runs.values())))
    if options.into:
        write_between_marks(options.into, "fast_table.py", text)
    else:
        print(text)


def read(path: Path) -> Iterator[Run]:
    """The measured training steps of a file."""
    content = path.read_bytes()
    for line in (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines():
        run = decode(line)
        if isinstance(run, Run) and run.spec and run.samples_s and not run.failure:
            yield run


def parts(runs: Sequence[Run]) -> Iterator[str]:
    """The page, piece by piece: the fastest step of each size, its distance to the roofline, all steps, and where the
    time of profiled ones goes."""
    order = sorted(runs, key=lambda run: (_parameters(run), run.spec.context if run.spec else 0, run.median_s))
    fastest = dict[tuple[str, int], Run]()
    for run in order:
        assert run.spec is not None
        if run.spec.model.kind == "transformer":
            fastest.setdefault((run.spec.model.name, run.spec.context), run)
    yield "## The fastest step of each size"
    yield markdown_table(steps(list(fastest.values())))
    yield "## Their distance to the roofline"
    yield markdown_table(floors(list(fastest.values())))
    yield "## All steps"
    yield markdown_table(steps(order))
    if profiled := [run for run in order if run.profile and run.spec and run.spec.pass_name == "train"]:
        yield "## Where the time goes"
        yield markdown_table(shares(profiled))


def _parameters(run: Run) -> int:
    return run.model.num_parameters if run.model else 0


def steps(runs: Sequence[Run]) -> Table:
    """Step and phase times, MFU and memory of each run."""
    rows = []
    for run in runs:
        assert run.spec is not None
        assert run.timing is not None
        spec, peak = run.spec, run.memory.peak("step") if run.memory else None
        projections = spec.model.shape.projections if spec.model.shape else ""
        rows.append(
            (
                *(spec.model.name, str(spec.context), spec.precision, spec.attention, spec.loss, projections),
                *(
                    spec.block_ops,
                    spec.compile,
                    spec.cuda_graph,
                    spec.optimizer,
                    _ms(run.median_s),
                    _ms(min(run.samples_s)),
                ),
                *(_phase_ms(run, name) for name in PHASES),
                f"{run.mfu:.1%}" if run.mfu else "–",
                *(f"{size / 2**30:.1f}" if size else "–" for size in _sizes(peak)),
                run.id,
            )
        )
    headers = (
        *STEP,
        "step",
        "shortest",
        "forward",
        "backward",
        "update",
        "MFU (causal)",
        "allocated",
        "reserved",
        "record",
    )
    caption = "Milliseconds, medians of the measured steps; GiB at the peak."
    return table_of_texts(
        "steps", headers, rows, numeric=[h not in (*STEP, "record") for h in headers], caption=caption
    )


def _phase_ms(run: Run, name: str) -> str:
    assert run.spec is not None
    assert run.timing is not None
    if name == "optimizer" and run.spec.updates_in_backward:
        return "in backward"
    phase = run.timing.phase(name)
    return _ms(median(phase.best_s)) if phase else "–"


def _sizes(peak: object) -> tuple[int | None, int | None]:
    return getattr(peak, "peak_allocated_bytes", None), getattr(peak, "peak_reserved_bytes", None)


def shares(runs: Sequence[Run]) -> Table:
    """Milliseconds of a profiled step by what binds them, and beside two of them the rate that they reach."""
    rows = []
    for run in runs:
        assert run.spec is not None
        assert run.profile is not None
        assert run.model is not None
        spec, profile, model = run.spec, run.profile, run.model
        count = profile.num_steps
        idle_s = sum(phase.idle_s + phase.host_bound_s for phase in profile.phases) / count
        unnamed_s = sum(kernel.total_s for kernel in profile.kernels if kernel.name in OWN_ATTENTION) / count
        products_s, attention_s, adamw_s, all_s = (
            sum(profile.category_s(category) for category in categories) / count
            for categories in (("matmul",), ("attention",), ("optimizer",), CATEGORIES)
        )
        attention_s += unnamed_s
        rest_s = all_s - products_s - attention_s - adamw_s
        flops = spec.tokens_of_all * _linear_flops_per_token(run)
        moved = ADAMW_BYTES * model.num_parameters
        rows.append(
            (
                *(spec.model.name, str(spec.context), spec.precision, spec.block_ops, spec.compile, spec.cuda_graph),
                *(
                    _ms(run.median_s),
                    _ms(products_s),
                    _tera(flops, products_s, digits=0),
                    _ms(flops / MATMUL_FLOPS_PER_S),
                ),
                *(_ms(adamw_s), _tera(moved, adamw_s, digits=2), _ms(moved / COPY_BYTES_PER_S)),
                *(_ms(attention_s), _ms(rest_s), _ms(all_s - profile.busy_s / count), _ms(idle_s), run.id),
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
        "by memory. At once: time in which two kernels ran, such as those of an overlapped update, which both columns "
        "have. Idle: no kernel ran."
    )
    return table_of_texts(
        "shares", headers, rows, numeric=[h not in (*own, "record") for h in headers], caption=caption
    )


def floors(runs: Sequence[Run]) -> Table:
    """What the GPU's stated figures take for what a step cannot leave out, beside the step."""
    rows = []
    for run in runs:
        assert run.spec is not None
        assert run.model is not None
        known = find_hardware(run.device_name or "")
        assert known is not None
        peak = known.peaks["bf16"].flops_per_s
        tokens, linear, all_flops = run.spec.tokens_of_all, *(_flops_per_token(run, n) for n in (0, run.spec.context))
        update_s = ADAMW_BYTES * run.model.num_parameters / known.memory_bandwidth_bytes_per_s
        parts_s = tokens * linear / peak, tokens * (all_flops - linear) / peak, update_s
        step_s = run.median_s
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
    return table_of_texts(
        "floors", headers, rows, numeric=[h not in (*own, "record") for h in headers], caption=caption
    )


def _linear_flops_per_token(run: Run) -> float:
    """FLOPs that the linear layers need for a token, forward and backward."""
    return _flops_per_token(run, 0)


def _flops_per_token(run: Run, context: int) -> float:
    """FLOPs that a token needs in a context, forward and backward."""
    assert run.model is not None
    flops = model_flops_per_token(
        "causal",
        num_parameters=run.model.num_parameters,
        num_embedding_parameters=run.model.num_embedding_parameters,
        num_layers=run.model.num_layers,
        attention_width=run.model.attention_width,
        context=context,
        backward=True,
    )
    assert flops is not None
    return flops


def _tera(amount: float, seconds: float, *, digits: int) -> str:
    return f"{amount / seconds / 1e12:.{digits}f}" if seconds else "–"


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.2f}" if seconds < 0.1 else f"{seconds * 1e3:.1f}"


if __name__ == "__main__":
    main()
