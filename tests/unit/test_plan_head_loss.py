from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from tests.stored_records import stored
from tests.sure import sure
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from steplab.ops import cross_entropy_chunks as chunks
from steplab.ops import triton_places
from steplab.ops.cross_entropy import linear_cross_entropy
from steplab.ops.cross_entropy_chunks import OPERATORS, Operators, Terms, losses_in_chunks
from steplab.ops.triton_places import implementation, padded_entries
from steplab.plan.dry_run.events import Allocated, Event, Freed
from steplab.plan.dry_run.head_loss import head_loss
from steplab.plan.dry_run.machine import Machine, Parameter
from steplab.plan.dry_run.sizes import Count, Sizes
from steplab.plan.dry_run.tape import run_backward
from steplab.plan.memory import predict_memory
from steplab.records.prediction import MemoryPrediction
from steplab.records.run import Run
from steplab.specs.model import TransformerShape
from steplab.specs.resolve import resolve_step

B, T, V, d = 2, 24, 70, 16
SHAPE = TransformerShape(vocab_size=V, d_model=d, d_ff=32, num_layers=1, num_heads=2)
DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp16": torch.float32, "bf16_pure": torch.bfloat16}
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def makes_nothing(*arguments: object, **options: object) -> None: ...


def losses_without_rows(
    hidden: Tensor, weight: Tensor, bias: None, targets: Tensor, scale: Tensor | None, ignore_index: int,
    label_smoothing: float, z_loss: float, dtype: torch.dtype, wanted: list[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    with torch.autocast("cpu", enabled=False):
        losses, gradients = losses_in_chunks(
            hidden, weight, bias, targets, scale, Terms(ignore_index, label_smoothing, z_loss),
            dtype=dtype, wanted=(wanted[0], wanted[1], False), rows=makes_nothing,
        )  # fmt: skip
    return losses, *gradients


def peaks_of_torch(run: Callable[[], Iterator[None]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    alive, most = 0, 0
    parts = run()
    while True:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            is_over = next(parts, "over") == "over"
        if is_over:
            return found
        most = alive
        for event in profiler.profiler.kineto_results.events():
            if event.name() == "[memory]":
                alive += event.nbytes()
                most = max(most, alive)
        found.append((most, alive))


def peaks_of_the_dry_run(precision: str) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    alive, most = 0, 0

    def listen(event: Event) -> None:
        nonlocal alive, most
        if isinstance(event, Allocated | Freed):
            alive += event.piece.num_bytes if isinstance(event, Allocated) else -event.piece.num_bytes
            most = max(most, alive)

    machine = Machine(Sizes(SHAPE, B, T), precision, Count(0, ""), listen)
    weight = Parameter(machine, "head.weight", machine.sizes.vocabulary)
    weight.convert(machine, machine.weight_dtype)
    x = machine.new(machine.sizes.residual, machine.weight_dtype, "final norm")
    machine.node((), (), lambda m, kept, gradient: ()).gives(x)
    at_start, most = alive, alive
    machine.begin("forward")
    with machine.forward_pass(gradients=True):
        loss = head_loss(machine, x, weight, implementation("fused"), scaled=False)
    found.append((most - at_start, alive - at_start))
    most = alive
    machine.begin("backward")
    sure(loss.slot).gradient = machine.new(machine.sizes.one, loss.dtype, "gradient of the loss")
    run_backward(machine)
    found.append((most - at_start, alive - at_start))
    return found


@pytest.mark.parametrize("tokens_in_a_chunk", [7, 16, 100])
@pytest.mark.parametrize("precision", list(DTYPES))
def test_what_the_fused_loss_allocates_is_predicted_to_the_byte(
    precision: str, tokens_in_a_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, low = DTYPES[precision], AUTOCAST.get(precision, DTYPES[precision])
    monkeypatch.setattr(triton_places, "CHUNK_BYTES", tokens_in_a_chunk * padded_entries(V) * low.itemsize)
    monkeypatch.setitem(OPERATORS, "fused", Operators(losses_without_rows, makes_nothing))  # type: ignore[arg-type]
    if low != torch.float32:  # a CPU's products of short numbers widen them first
        monkeypatch.setattr(torch, "mm", makes_nothing)
        monkeypatch.setattr(chunks, "_product", makes_nothing)
    x = torch.randn(B * T, d, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, d, dtype=dtype, requires_grad=True)
    targets = torch.randint(V, (B * T,))

    def run() -> Iterator[None]:
        with torch.autocast("cpu", dtype=low) if precision in AUTOCAST else nullcontext():
            loss = linear_cross_entropy(x, weight, targets, implementation="fused")
        yield
        loss.backward()
        yield

    for _ in run():  # whatever is only made once
        pass
    x.grad = weight.grad = None
    assert peaks_of_torch(run) == peaks_of_the_dry_run(precision)


def test_the_peak_of_a_fused_loss_by_hand() -> None:
    fields: dict[str, object] = {"model": "small", "context": 128, "batch": 256, "precision": "bf16_pure"}
    fields |= {
        "pass": "forward_backward",
        "attention": "sdpa_flash",
        "model.vocab_size": 131_072,
        "model.num_layers": 1,
    }
    plain, fused = (predict_memory(resolve_step(fields | {"loss": loss})) for loss in ("plain", "fused"))
    tokens, width = 256 * 128, 768
    assert fused.peak_where == "head and loss: logits of a chunk"
    (logits,) = (term for term in fused.terms if term.what == "logits of a chunk")
    assert (logits.num_bytes, logits.formula) == (2**29, "2 2048 131072")
    assert fused.at_peak["gradients"] == 2 * 131_072 * width
    assert plain.peak_bytes - fused.peak_bytes > 2 * 2 * tokens * 131_072 - 2**30
    assert fused.kind == plain.kind == "dry_run"


def test_the_plain_softmax_of_chunks_is_an_estimate() -> None:
    fused, chunked = (predict_memory(resolve_step({"loss": loss})) for loss in ("fused", "chunked"))
    assert chunked.kind == "estimate"
    assert any("loss chunked: temporaries" in note for note in chunked.notes)
    assert chunked.peak_bytes >= fused.peak_bytes


def test_a_compiled_model_has_the_loss_in_chunks_of_an_eager_one() -> None:
    fields: dict[str, object] = {"model": "small", "context": 512, "precision": "bf16", "attention": "sdpa_flash"}
    fields |= {"model.vocab_size": 131_072, "model.num_layers": 2}
    plain, fused = (predict_memory(resolve_step(fields | {"loss": loss, "compile": "default"})) for loss in LOSSES)
    eager = predict_memory(resolve_step(fields | {"loss": "fused"}))
    tokens, width = 4 * 512, 768

    def at_the_head(found: MemoryPrediction) -> dict[str, int]:
        names = ("logits of a chunk", "losses of the tokens", "gradient of final norm")
        return {term.what: term.num_bytes * term.count for term in found.terms if term.what in names}

    assert fused.kind == "estimate"
    assert at_the_head(fused) == at_the_head(eager)
    assert at_the_head(fused)["gradient of final norm"] == 4 * tokens * width
    assert fused.at_peak["gradients"] == 4 * 131_072 * width
    assert not any(term.what == "logits" for term in fused.terms)
    assert fused.at_peak["optimizer_state"] == plain.at_peak["optimizer_state"]
    micro_steps = predict_memory(resolve_step(fields | {"loss": "fused", "compile": "default", "accumulation": 2}))
    assert micro_steps.peak_bytes > fused.peak_bytes


LOSSES = ("plain", "fused")


def test_the_peaks_of_an_8b_model_that_two_h200s_share_are_predicted() -> None:
    """Recorded with torch 2.11, whose compiler keeps flash_triton's results of recomputed blocks."""
    errors = {}
    for run in stored("eight_b_h200", Run):
        if run.spec and run.memory and (peak := run.memory.peak("step")):
            found = predict_memory(run.spec, device="NVIDIA H200")
            kept_bytes = 0
            if run.spec.compile == "block" and run.spec.checkpointing == "full":
                kept_bytes = 34 * 32_768 * (2 * 4096 + 4 * 32)  # of 34 blocks the output and the sums of rows
                assert any("torch 2.11" in note and "260 MiB" in note for note in found.notes)
            key = run.spec.compile, run.spec.checkpointing, run.spec.loss
            errors[key] = (found.peak_bytes + kept_bytes) / peak.peak_allocated_bytes - 1
    assert errors == {
        ("off", "full", "plain"): pytest.approx(0.005, abs=0.001),
        ("block", "full", "plain"): pytest.approx(0.0045, abs=0.001),
        ("block", "selective", "fused"): pytest.approx(0.017, abs=0.001),
    }


def test_the_loss_of_ranks_that_share_parameters_has_the_memory_of_one_process() -> None:
    fields = {"model": "small", "context": 1024, "batch": 8, "precision": "bf16", "attention": "sdpa_cudnn"}

    def saved(layout: str) -> int:
        plain, fused = (predict_memory(resolve_step(fields | {"layout": layout, "loss": loss})) for loss in LOSSES)
        return plain.phase_peaks["forward"] - fused.phase_peaks["forward"]

    assert saved("dp=2") == pytest.approx(saved("dp=1"), rel=0.01)
    assert saved("fsdp=2") == pytest.approx(saved("dp=1"), rel=0.05)


def test_the_memory_of_a_step_on_an_h200_is_predicted() -> None:
    errors: dict[str, set[int]] = {}
    for run in stored("cross_entropy_h200", Run):
        assert run.spec is not None
        assert run.memory is not None
        predicted = predict_memory(run.spec, device="NVIDIA H200").phase_peaks
        for phase in ("forward", "backward"):
            peak = sure(run.memory.peak(phase))
            errors.setdefault(run.spec.loss, set()).add(predicted[phase] - peak.peak_allocated_bytes)
    assert errors["fused"] == errors["plain"] == {1_167_360}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_pure", "bf16_master"])
@pytest.mark.parametrize("head", ["untied", "tied"])
def test_parts_of_a_step_have_the_memory_of_the_whole(precision: str, head: str) -> None:
    """Blocks compiled alone are composed of parts. With all recomputed and short sequences, head and loss dominate, as
    in an eager step.
    """
    fields = {
        "model": "small", "model.vocab_size": 131_072, "model.head": head, "context": 64, "batch": 8, "loss": "fused",
        "precision": precision, "attention": "flash_triton", "checkpointing": "full", "pass": "forward_backward",
    }  # fmt: skip
    whole, parts = (predict_memory(resolve_step(fields | {"compile": choice})) for choice in ("off", "block"))
    assert parts.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.025)
    if precision != "bf16":  # eager blocks hold autocast's copies of their weights, compiled ones do not
        assert parts.phase_peaks["forward"] == pytest.approx(whole.phase_peaks["forward"], rel=0.025)
