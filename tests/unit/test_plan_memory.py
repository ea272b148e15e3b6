import csv
import io
import itertools
import os
import re
import subprocess
import sys
from functools import cache
from statistics import median
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.documents import chapter_says
from tests.shapes import GPT_2, VARIANTS, draw_parts, named
from tests.stored_records import stored
from tests.sure import sure

from steplab import units
from steplab.cli.app import main
from steplab.costs.flops import num_parameters
from steplab.errors import Unsupported
from steplab.model.checkpointing import _recomputed
from steplab.model.fused_block import FusedBlock
from steplab.model.transformer import SelfAttention, Transformer, feed_forward_of, rotary_table
from steplab.ops.attention.api import attention_named
from steplab.plan.cards import BLOCKS_MARGIN, OUTSIDE_BYTES
from steplab.plan.dry_run.allocator import CachingAllocator
from steplab.plan.dry_run.attention import attention_of
from steplab.plan.dry_run.events import Allocated, Event
from steplab.plan.dry_run.machine import Machine
from steplab.plan.dry_run.sizes import BF16, Count, Sizes
from steplab.plan.dry_run.tape import run_backward
from steplab.plan.dry_run.transformer import Block, Parameters
from steplab.plan.memory import HOPPER_WORKSPACE, WORKSPACE, predict_memory
from steplab.records.memory_profile import MEMORY_CATEGORIES
from steplab.records.prediction import MemoryPrediction
from steplab.records.run import Run
from steplab.report.kit.rendering import render
from steplab.report.plan.document import plan_document
from steplab.specs.model import TransformerShape
from steplab.specs.resolve import resolve_step
from steplab.specs.step import CHOICES, StepSpec
from steplab.specs.step_choices import FP8
from steplab.units import MIB

B, T, V, L, d, f, h = 2, 48, 5000, 3, 32, 80, 4
TINY: dict[str, object] = {
    "model": "tiny", "model.num_layers": L, "model.d_model": d, "model.d_ff": f, "model.num_heads": h,
    "model.vocab_size": V, "batch": B, "context": T,
}  # fmt: skip
FUSED: dict[str, object] = {"model.projections": "merged", "block_ops": "triton"}
INTERPRETED = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
SHAPE = TransformerShape(vocab_size=V, d_model=d, d_ff=f, num_layers=L, num_heads=h)
N = num_parameters(SHAPE)
ROTARY = 4 * T * d // h
STREAM, INNER, SCORES, LOGITS, ROWS, WEIGHTS = (
    B * T * d,
    B * T * f,
    B * h * T * T,
    B * T * V,
    B * T,
    4 * d * d + 3 * d * f,
)


def predict(**fields: object) -> MemoryPrediction:
    return predict_memory(resolve_step(TINY | fields))


# --- against the H200 -------------------------------------------------------------------------------------


@cache
def golden() -> tuple[Run, ...]:
    runs: dict[tuple[object, ...], Run] = {}
    for run in stored("step_h200", Run):
        if run.spec and run.spec.model.shape and run.memory and run.memory.peaks:
            runs.setdefault((run.spec.model.name, run.spec.context, run.spec.pass_name, run.spec.precision,
                             run.spec.compile, run.spec.attention), run)  # fmt: skip
    return tuple(runs.values())


@cache
def on_h200(spec: StepSpec) -> MemoryPrediction:
    return predict_memory(spec, device="NVIDIA H200")


def errors(run: Run) -> dict[str, float]:
    assert run.memory is not None
    found = on_h200(sure(run.spec))
    assert found.safe_device_bytes is not None
    assert found.safe_device_bytes >= max(p.peak_reserved_bytes for p in run.memory.peaks) + OUTSIDE_BYTES
    predicted = {"step": found.peak_bytes} | found.phase_peaks
    return {p.phase: predicted[p.phase] / p.peak_allocated_bytes - 1 for p in run.memory.peaks}


def is_accepted(spec: StepSpec) -> bool:
    size, whole = (spec.model.name, spec.context), spec.pass_name != "forward_backward"
    return whole and (size[0] == "2.7b" or size in {("small", 512), ("large", 512), ("xl", 512)})


@pytest.mark.release
def test_eager_peaks_of_the_h200_are_predicted() -> None:
    eager = [run for run in golden() if run.spec and run.spec.compile == "off" and is_accepted(run.spec)]
    assert len(eager) == (4 + 3) * 2 * 2
    of_steps = [abs(errors(run)["step"]) for run in eager]
    assert median(of_steps) <= 1e-5
    assert max(of_steps) <= 0.002
    exact = sum(error == 0 for error in of_steps)
    assert exact >= len(of_steps) // 2  # to the byte
    told = f"of {len(eager)} cells {exact} are predicted to the byte, the largest error is {100 * max(of_steps):.2f} %."
    chapter_says("memory_formulas", told)


@pytest.mark.release
def test_every_phase_is_predicted() -> None:
    eager = [run for run in golden() if run.spec and run.spec.compile == "off" and run.spec.model.name == "small"]
    assert len(eager) == 4 * 2 * 3
    of_phases = [abs(error) for run in eager for error in errors(run).values()]
    assert median(of_phases) <= 5e-4
    assert max(of_phases) <= 0.005


@pytest.mark.release
def test_compiled_peaks_of_the_h200_are_estimated() -> None:
    compiled = [run for run in golden() if run.spec and run.spec.compile != "off"]
    assert len(compiled) == 32
    of_steps = [abs(errors(run)["step"]) for run in compiled]
    assert median(of_steps) <= 0.005
    assert max(of_steps) <= 0.04
    of_compiled = f"median {100 * median(of_steps):.2f} %, largest {100 * max(of_steps):.1f} %"
    chapter_says("memory_formulas", f"Against the {len(compiled)} compiled cells: {of_compiled}")


def test_peaks_of_steps_that_are_compiled_block_by_block_are_estimated() -> None:
    of_steps, reserved = list[float](), list[float]()
    for name in ("fast_h200", "walk_h200", "walk_fitted_h200", "other_gpu_h100"):
        for run in stored(name, Run):
            spec = run.spec
            if spec and spec.compile == "block" and spec.model.shape and run.memory:
                of_steps.append(abs(errors(run)["step"]))
                found = sure(on_h200(spec).reserved_bytes)
                reserved.append(max(peak.peak_reserved_bytes for peak in run.memory.peaks) / found - 1)
    assert BLOCKS_MARGIN - 0.02 < max(reserved) < BLOCKS_MARGIN
    chapter_says("memory_formulas", f"up to {100 * max(reserved):.1f} % more was reserved in a recorded step")
    assert median(of_steps) <= 0.002
    assert max(of_steps) <= 0.01
    of_blocks = f"median {100 * median(of_steps):.2f} %, largest {100 * max(of_steps):.2f} %"
    chapter_says("memory_formulas", f"the {len(of_steps)} steps compiled block by block", of_blocks)


# --- against sums by hand ---------------------------------------------------------------------------------


def test_what_an_eager_step_holds_in_fp32_by_hand() -> None:
    """The peak is at the loss with its vocabulary: log softmax kept, its gradient and the logits' made."""
    found = predict(**{"pass": "forward_backward"})
    # A block keeps its input, norm, q, k, v, attention output, the stream between its halves and the second norm.
    block = 4 * (8 * STREAM + 4 * INNER + SCORES + 2 * ROWS) + T * T
    head = 4 * (2 * STREAM + ROWS + LOGITS)
    assert found.at_peak["activations"] == L * block + head + 4  # the loss; nll_loss's other scalar is gone by then
    assert found.at_peak["temporaries"] == 4 * (2 * LOGITS) + 4
    assert found.at_peak["parameters"] == 4 * N + ROTARY
    assert found.at_peak["inputs"] == 2 * 2 * 8 * ROWS
    assert found.at_peak["workspaces"] == 2 * HOPPER_WORKSPACE.value  # autograd has a thread of its own
    assert "gradients" not in found.at_peak
    assert found.peak_phase == "backward"
    assert found.peak_where == "head and loss: gradient of the logits"


def test_what_an_eager_step_holds_under_bf16_autocast_by_hand() -> None:
    found = predict(precision="bf16", **{"pass": "forward_backward"})
    # Norms are cast once for each matmul that takes them; softmax keeps fp32 and its product a copy in bf16.
    block = 4 * (2 * STREAM + SCORES + 2 * ROWS) + 2 * (3 + 2 + 4) * STREAM + 2 * (4 * INNER + SCORES) + T * T
    head = 4 * (STREAM + ROWS) + 2 * STREAM + (2 + 4) * LOGITS
    assert found.at_peak["activations"] == L * block + head + 8
    assert found.at_peak["autocast_copies"] == 2 * (L * WEIGHTS + d * V)
    assert found.at_peak["temporaries"] == 4 * LOGITS + 4
    assert found.at_peak["parameters"] == 4 * N + ROTARY
    assert found.peak_where == "head and loss: gradient of log probabilities, in fp32"


def test_checkpointing_keeps_one_residual_stream_a_block() -> None:
    found = predict(checkpointing="full", **{"pass": "forward_backward"})
    head = 4 * (2 * STREAM + ROWS + LOGITS)
    assert found.at_peak["activations"] == L * 4 * STREAM + head + 4
    every = predict(checkpointing="every_2", **{"pass": "forward_backward"})  # blocks 0 and 2
    block = 4 * (8 * STREAM + 4 * INNER + SCORES + 2 * ROWS) + T * T
    assert every.at_peak["activations"] == 2 * 4 * STREAM + block + head + 4
    selective = predict(checkpointing="selective", **{"pass": "forward_backward"})
    products = 4 * (6 * STREAM + 2 * INNER + SCORES)  # outputs of seven linear layers and both batched products
    assert selective.at_peak["activations"] == L * (products + 4 * STREAM) + head + 4
    second = predict(checkpointing="selective_2", **{"pass": "forward_backward"})  # without key, output and up
    assert second.at_peak["activations"] == L * (products + 4 * STREAM - 4 * (2 * STREAM + INNER)) + head + 4


def test_from_the_second_micro_step_on_gradients_are_there_at_the_peak_by_hand() -> None:
    # The loss, divided; at the peak of bf16 the backward function of the loss still holds the gradient that it took.
    for fields, scalars in (({"pass": "forward_backward"}, 4), ({"precision": "bf16"}, 4 + 4)):
        one, three = predict(**fields), predict(accumulation=3, **fields)
        assert "gradients" not in one.at_peak
        assert three.at_peak["gradients"] == 4 * N
        same = set(one.at_peak) - {"rounding", "temporaries"}
        assert {name: three.at_peak[name] for name in same} == {name: one.at_peak[name] for name in same}
        assert three.at_peak["temporaries"] == one.at_peak["temporaries"] + scalars
        million = predict(accumulation=1_000_000, **fields)  # which is not run a million times
        assert (million.peak_bytes, million.phase_peaks) == (three.peak_bytes, three.phase_peaks)
    # A model compiled as a whole has all gradients of a micro-step before adding them.
    compiled = predict(accumulation=2, compile="default", batch=1, context=1)
    assert compiled.phase_peaks["backward"] >= 4 * N + ROTARY // T + 2 * 4 * N + 8 * N


def test_blocks_compiled_one_by_one_keep_what_they_keep_compiled_as_a_whole() -> None:
    eager, whole, blocks = (
        predict(compile=mode, attention="sdpa_flash", precision="bf16") for mode in ("off", "default", "block")
    )
    assert blocks.kind == "estimate"
    assert (blocks.rank, blocks.ranks) == ("", ())
    assert not any("most of it NCCL" in note for note in blocks.notes)
    for category in ("parameters", "optimizer_state", "workspaces"):
        assert blocks.at_peak[category] == whole.at_peak[category] == eager.at_peak[category]

    def of_blocks(found: MemoryPrediction) -> dict[str, int]:
        return {term.what: term.num_bytes * term.count for term in found.terms if term.what in IN_BLOCKS}

    assert of_blocks(blocks) == of_blocks(whole)
    assert {term.what for term in blocks.terms} & {term.what for term in eager.terms} >= {"log probabilities"}


IN_BLOCKS = ("query, key, value and output", "gate, up and their product", "attention output")


@pytest.mark.parametrize(
    ("optimizer", "precision", "state", "within"),
    [
        ("adamw_fused", "fp32", 8 * N + 4 * (9 * L + 3), 0),
        ("adamw_foreach", "fp32", 8 * N, 4 * N),
        ("adamw_loop", "fp32", 8 * N, 4 * 2 * d * V),
        # Addresses, sizes and first blocks of each weight, and of each 512 elements whose they are.
        (
            "adamw_triton",
            "fp32",
            8 * N + (4 + 40 + 8 + 8 + 12) * (9 * L + 3) + 32 + 4 * (2 * 313 + L * (4 * 2 + 3 * 5 + 2) + 1),
            0,
        ),
        ("sgd", "fp32", 0, 0),
        ("adamw_fused", "bf16_pure", 4 * N + 4 * (9 * L + 3), 0),
        ("sgd", "bf16_pure", 0, 0),
    ],
)
def test_what_an_optimizer_holds_by_hand(optimizer: str, precision: str, state: int, within: int) -> None:
    found = predict(optimizer=optimizer, precision=precision, batch=1, context=1)
    width = 2 if precision == "bf16_pure" else 4
    weights = width * N + 4 * d // h
    held = weights + width * N + state + within + 4 * 8
    assert found.at_peak.get("optimizer_state", 0) == state
    assert found.phase_peaks["optimizer"] >= held + 2 * HOPPER_WORKSPACE.value
    assert (
        found.phase_peaks["optimizer"] <= held + 2 * HOPPER_WORKSPACE.value + 30 * MIB
    )  # rounding, and what begins it


MATRICES = L * WEIGHTS + d * V


def test_what_weights_in_bf16_with_masters_hold_by_hand() -> None:
    """For one token, at the optimizer's step: 16 bytes per weight of a linear layer, 2 of them its gradient's."""
    masters: dict[str, object] = {"precision": "bf16_master", "optimizer": "adamw_triton", "batch": 1, "context": 1}
    found, others, layers = predict(**masters), N - MATRICES, 7 * L + 1
    each = 4 + 8 + 8 + 12  # the number of its steps, and rows of tables
    tables = (
        each * (9 * L + 3) + 40 * (2 * L + 2) + 48 * layers + 2 * 32 + 4 * (2 * 313 + 2 * L + 1 + L * (4 * 2 + 3 * 5))
    )
    state = 4 * MATRICES + 8 * N + tables
    assert found.phase_peaks["optimizer"] >= 4 * others + 2 * MATRICES + 4 * d // h + state + 2 * MATRICES + 4 * others
    assert found.at_peak["optimizer_state"] == state
    assert found.at_peak["parameters"] == 4 * others + 2 * MATRICES + 4 * d // h
    assert "autocast_copies" not in found.at_peak
    forward = predict(**masters | {"pass": "forward"})
    assert forward.at_peak["parameters"] == found.at_peak["parameters"]
    assert "optimizer_state" not in forward.at_peak
    # The gradient of the head's weight is added up over chunks, in fp32 under autocast: that weight stays fp32.
    chunked = predict(**masters | {"loss": "chunked"})
    assert chunked.at_peak["parameters"] == found.at_peak["parameters"] + 2 * d * V
    tied = predict(**masters | {"model.head": "tied"})
    assert tied.at_peak["parameters"] == found.at_peak["parameters"] - 2 * d * V


def test_weights_in_bf16_with_masters_have_no_copies_where_autocast_makes_them() -> None:
    for compiled in ("off", "default", "block"):
        fields: dict[str, object] = {"pass": "forward_backward", "attention": "sdpa_flash", "compile": compiled}
        autocast, masters = (predict(**fields, precision=name) for name in ("bf16", "bf16_master"))
        assert autocast.at_peak["autocast_copies"] == 2 * MATRICES
        assert "autocast_copies" not in masters.at_peak
        assert masters.at_peak["activations"] == autocast.at_peak["activations"]
        assert masters.at_peak["parameters"] == autocast.at_peak["parameters"] - 2 * MATRICES


def test_a_step_compiled_block_by_block_has_its_masters_beside_other_state() -> None:
    few: dict[str, object] = {"precision": "bf16_master", "optimizer": "adamw_triton", "batch": 1, "context": 1}
    blocks, whole = predict(**few, compile="block"), predict(**few)
    for category in ("parameters", "gradients"):
        assert blocks.at_peak.get(category) == whole.at_peak.get(category)
    assert blocks.at_peak["optimizer_state"] == whole.at_peak["optimizer_state"]
    assert blocks.phase_peaks["optimizer"] == pytest.approx(whole.phase_peaks["optimizer"], abs=5e5)
    passes = predict(**few | {"pass": "forward_backward"}, compile="block")
    assert passes.at_peak["parameters"] == whole.at_peak["parameters"]
    assert "optimizer_state" not in passes.at_peak


def test_a_planning_size_has_masters_beside_its_moments() -> None:
    fields: dict[str, object] = {"precision": "bf16_master", "optimizer": "adamw_triton"}
    weights = 126 * 2 * 16384 * 53248
    assert predict_memory(resolve_step({"model": "xxl"} | fields)).at_peak == {
        "parameters": 2 * weights,
        "gradients": 2 * weights,
        "optimizer_state": 12 * weights,
    }


def test_what_a_model_like_gpt_2_holds_in_fp32_by_hand() -> None:
    """LayerNorm keeps two numbers a row; plain attention keeps unrotated copies of queries and keys."""
    found = predict(**GPT_2, **{"pass": "forward_backward"})
    block = 4 * (8 * STREAM + 2 * INNER + SCORES + 4 * ROWS) + T * T
    head = 4 * (2 * STREAM + 2 * ROWS + LOGITS)
    assert found.at_peak["activations"] == L * block + head + 8 * T + 4  # the numbers of the positions, and the loss
    weights = L * (4 * d * d + 2 * d * f + 5 * d + f + 4 * d) + 2 * d + d * V + 1024 * d
    assert found.at_peak["parameters"] == 4 * weights
    assert predict(**GPT_2, optimizer="sgd", batch=1, context=1).at_peak["gradients"] == 4 * weights


def test_a_tied_weight_has_two_gradients_until_both_are_there() -> None:
    """In fp32 torch adds the second to the first, a view, out of place: three at that moment."""
    few: dict[str, object] = {"pass": "forward_backward", "batch": 1, "context": 1}
    tied, untied = predict(**few, **{"model.head": "tied"}), predict(**few)
    weight = 4 * d * V
    assert tied.at_peak["parameters"] == untied.at_peak["parameters"] - weight
    assert sum(term.num_bytes * term.count for term in tied.terms if term.num_bytes == weight) == weight + 3 * weight
    autocast = predict(**few, precision="bf16", **{"model.head": "tied"})
    assert (
        sum(term.num_bytes * term.count for term in autocast.terms if term.num_bytes == weight) == weight + 2 * weight
    )


def test_grouped_heads_keep_fewer_keys_by_hand() -> None:
    fused: dict[str, object] = {"attention": "sdpa_flash", "precision": "bf16_pure", "pass": "forward_backward"}
    all_heads, grouped = (predict(**fused, **{"model.num_kv_heads": heads}) for heads in (4, 1))
    fewer = L * 2 * 2 * (STREAM - STREAM // 4)  # keys and values, two bytes each
    assert all_heads.at_peak["activations"] - grouped.at_peak["activations"] == fewer


def test_a_size_for_planning_only_has_the_least_it_can_have() -> None:
    found = predict_memory(resolve_step({"model": "xxl"}))
    weights = 126 * 2 * 16384 * 53248
    assert found.at_peak == {"parameters": 4 * weights, "gradients": 4 * weights, "optimizer_state": 8 * weights}
    assert found.kind == "at_least"
    assert "at least this" in found.notes[0]
    assert {card.verdict for card in found.cards} == {"does not fit"}
    assert predict_memory(resolve_step({"model": "xxl", "pass": "forward"})).peak_bytes == 4 * weights


# --- against what torch keeps -----------------------------------------------------------------------------


def kept_by_torch(module: torch.nn.Module, *arguments: torch.Tensor | None) -> int:
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.numel() > 1:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(*arguments)  # what it keeps is alive as long as this
    assert output.requires_grad
    rotary = arguments[1].untyped_storage().data_ptr() if len(arguments) > 1 and arguments[1] is not None else None
    return sum(size for address, size in kept.items() if address != rotary)


def kept_in_the_dry_run(shape: TransformerShape, part: str, precision: str, attention: str) -> int:
    machine = Machine(Sizes(shape, B, T), precision, Count(0, ""), lambda event: None)
    machine.begin("forward")
    parameters = Parameters(machine)
    for parameter in parameters.all:
        parameter.convert(machine, machine.weight_dtype)
    block = Block(machine, attention_of(attention), parameters.of_blocks[0])
    x = machine.new(machine.sizes.residual, machine.weight_dtype, "input")
    start = machine.allocations.num_made
    with machine.forward_pass(gradients=True):
        output = block._attention(x) if part == "attention" else block._feed_forward(x)
    made = [piece for piece in machine.allocations.made_since(start) if piece.what != output.what]
    return sum(piece.num_bytes for piece in made) + x.storage.piece.num_bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure"])
@pytest.mark.parametrize(
    ("part", "attention", "dry"),
    [("attention", "plain", "plain"), ("attention", "sdpa", "sdpa_flash"), ("feed_forward", "plain", "plain")],
)
@pytest.mark.parametrize("variant", VARIANTS, ids=named)
def test_a_block_keeps_what_autograd_keeps(
    variant: dict[str, object], part: str, attention: str, dry: str, precision: str
) -> None:
    shape = sure(resolve_step(TINY | variant).model.shape)
    module: torch.nn.Module = feed_forward_of(shape)
    if part == "attention":
        module = SelfAttention(shape, attention_named(attention))
    module = module.to(torch.bfloat16 if precision == "bf16_pure" else torch.float32)
    x = torch.randn(B, T, d, dtype=next(module.parameters()).dtype, requires_grad=True)
    table = (None if shape.learned_positions else rotary_table(T, d // h),) if part == "attention" else ()
    assert kept_by_torch(module, x, *table) == kept_in_the_dry_run(shape, part, precision, dry)


@pytest.mark.release
def test_what_is_kept_is_what_torchs_partitioner_chooses() -> None:
    """In a process of its own: Inductor, once imported, changes how the partitioner's backend decomposes operators."""
    words = ("-q", "-p", "no:cacheprovider", "-o", "python_functions=partitioned_*", __file__)
    found = subprocess.run([sys.executable, "-m", "pytest", *words], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
    assert "9 passed" in found.stdout or "8 passed, 1 skipped" in found.stdout


@pytest.mark.parametrize(
    "variant",
    [GPT_2 | {"model.num_kv_heads": 1}, {"model.projections": "merged"}, pytest.param(FUSED, marks=INTERPRETED)],
    ids=named,
)
def partitioned_steps_keep_about_what_is_predicted(variant: dict[str, object]) -> None:
    """The lists in dry_run/compiled.py are read off; scalars and one number per row are partly missing."""
    fields = TINY | variant | {"pass": "forward_backward", "model.num_layers": 1}
    shape = sure(resolve_step(fields).model.shape)
    block = FusedBlock if "block_ops" in variant else None
    module = Transformer(shape, context=T, attention=attention_named("sdpa"), block=block)
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(V, (B, T))
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = compiled(tokens, tokens)  # what it keeps is alive as long as this
    assert loss.requires_grad
    # flex saves what every fused kernel does, and takes fp32.
    found = predict_memory(resolve_step(fields | {"attention": "flex", "compile": "default"}))
    assert found.at_peak["activations"] == pytest.approx(sum(kept.values()), rel=0.01)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "selective_2"])
@pytest.mark.parametrize("variant", [{}, {"model.projections": "merged"}], ids=named)
def partitioned_blocks_keep_what_is_predicted(variant: dict[str, object], checkpointing: str) -> None:
    """Two blocks less one, so that head and loss, cast differently on other devices, cancel."""

    def kept(num_layers: int) -> int:
        fields = TINY | variant | {"model.num_layers": num_layers}
        shape = sure(resolve_step(fields).model.shape)
        module = Transformer(shape, context=T, attention=attention_named("sdpa"))
        torch._dynamo.reset()
        for block in module.blocks:
            forward = block.forward
            if checkpointing != "none":
                forward = _recomputed(forward, checkpointing, is_compiled=True)
            block.forward = torch.compile(forward, backend="aot_eager_decomp_partition")
        tokens = torch.randint(V, (B, T))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return kept_by_torch(module, tokens, tokens)

    def predicted(num_layers: int) -> int:
        at_peak = predict(
            **variant | {"model.num_layers": num_layers, "pass": "forward_backward", "precision": "bf16"},
            compile="block",
            checkpointing=checkpointing,
            attention="sdpa_flash",
        ).at_peak
        return at_peak["activations"] + at_peak["autocast_copies"]

    assert kept(2) - kept(1) == predicted(2) - predicted(1)


@pytest.mark.parametrize(("num_heads", "num_copied"), [(4, (0, 0)), (8, (4, 8))], ids=["16 bytes a row", "8 bytes"])
def test_the_triton_kernels_take_two_rows_of_numbers_sums_and_copies_where_rows_are_not_16_bytes(
    num_heads: int, num_copied: tuple[int, int]
) -> None:
    """In ops/attention: `triton_backward._subtrahends` and `one_sweep`, `triton_tensors.readable` and `writable`."""
    shape = TransformerShape(vocab_size=V, d_model=d, d_ff=f, num_layers=L, num_heads=num_heads)
    made: list[int] = []

    def listen(event: Event) -> None:
        if isinstance(event, Allocated):
            made.append(event.piece.num_bytes)

    machine = Machine(Sizes(shape, B, 130), "bf16_pure", Count(0, ""), listen)
    machine.begin("forward")
    q, k, v = (machine.new(machine.sizes.residual, BF16, name) for name in ("query", "key", "value"))
    gradient = machine.new(machine.sizes.residual, BF16, "gradient of the output")
    tensor, padded, lse = (2 * B * 130 * width for width in (d, 8 * num_heads, 2 * num_heads))
    rows = 4 * B * num_heads * 256
    made.clear()
    with machine.forward_pass(gradients=True):
        output = attention_of("flash_triton")(machine, q, k, v)
        assert made == [tensor, lse, *[padded] * num_copied[0]]
        made.clear()
        assert output.slot is not None
        output.slot.gradient = gradient
        run_backward(machine)
    # d / h is less than 64 columns, to which the sums are filled up.
    assert made == [*[tensor] * 3, *[padded] * num_copied[1], *[rows] * 2, rows * 64]


# --- what holds for every step ----------------------------------------------------------------------------

STEPS = st.fixed_dictionaries(
    {
        "pass": st.sampled_from(CHOICES["pass_name"]),
        "accumulation": st.integers(1, 3),
        "model.num_layers": st.integers(1, 4),
        "model.d_model": st.sampled_from([16, 48, 256]),
        "model.d_ff": st.integers(1, 700),
        "model.num_heads": st.sampled_from([1, 2, 8]),
        "model.vocab_size": st.integers(1, 3000),
        "batch": st.integers(1, 8),
        "context": st.integers(1, 300),
        "precision": st.sampled_from([name for name in CHOICES["precision"] if name not in FP8]),  # test_fp8_step
        "compile": st.sampled_from(["off", "off", "default"]),
        "attention": st.sampled_from(CHOICES["attention"]),
        "checkpointing": st.sampled_from(["none", "full", "every_2", "first_1", "selective"]),
        "optimizer": st.sampled_from(CHOICES["optimizer"]),
        "parts": draw_parts(),
    }
).map(lambda fields: _valid(fields))


def _valid(drawn: dict[str, Any]) -> dict[str, Any]:
    fields, parts = {name: value for name, value in drawn.items() if name != "parts"}, drawn["parts"]
    if fields["pass"] == "forward":
        del fields["accumulation"]
    if fields["precision"] == "bf16_pure" and fields["optimizer"] == "adamw_triton":
        fields["optimizer"] = "adamw_fused"
    if fields["precision"] == "bf16_master":
        fields = {name: value for name, value in fields.items() if name != "accumulation"} | {
            "optimizer": "adamw_triton"
        }
    heads = parts.get("model.num_kv_heads", 1)
    return fields | parts | ({"model.num_kv_heads": min(heads, fields["model.num_heads"])} if heads > 1 else {})


def is_served(fields: dict[str, Any]) -> bool:
    attention, half = fields["attention"], "16" in fields["precision"]
    width = fields["model.d_model"] // fields["model.num_heads"]
    if attention in ("sdpa_flash", "sdpa_cudnn", "flash_attn_4") and not half:
        return False
    if attention == "flash_attn_4":
        return bool(width % 8 == 0)
    if attention == "sdpa_cudnn":
        return bool(width % 8 == 0 and fields["context"] > 1)
    grouped = fields["model.num_heads"] > fields.get("model.num_kv_heads", fields["model.num_heads"])
    return attention != "sdpa_efficient" or (width % (8 if half else 4) == 0 and not grouped)


SERVED = STEPS.filter(is_served)


@settings(max_examples=25)
@given(STEPS.filter(lambda fields: not is_served(fields)))
def test_a_step_that_no_kernel_serves_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match=r"on cuda is not supported: that kernel takes .*; use --attention sdpa, "):
        predict_memory(resolve_step(fields))
    found = predict_memory(resolve_step(fields | {"attention": "sdpa"}))  # what is to be used instead
    assert found.peak_bytes > 0


@settings(max_examples=20)
@given(SERVED, st.sampled_from(["batch", "context", "model.num_layers"]))
def test_the_summands_sum_to_the_peak_and_twice_as_much_of_a_size_never_takes_less(
    fields: dict[str, Any], size: str
) -> None:
    found = predict_memory(resolve_step(fields))
    assert sum(found.at_peak.values()) == found.peak_bytes == max(found.phase_peaks.values())
    assert list(found.at_peak) == [name for name in MEMORY_CATEGORIES if name in found.at_peak]
    for category in MEMORY_CATEGORIES:
        told = sum(term.num_bytes * term.count for term in found.terms if term.category == category)
        assert told == found.at_peak.get(category, 0)
        assert told >= 0
    assert found.phase_peaks[found.peak_phase] == found.peak_bytes
    more = predict_memory(resolve_step(fields | {size: 2 * fields[size]}))
    slack = found.at_peak.get("rounding", 0)  # a larger request may fit its segment better
    assert more.peak_bytes >= found.peak_bytes - slack


@given(st.lists(st.one_of(st.integers(1, 40 * MIB), st.integers(1, 3000)), min_size=1, max_size=60), st.data())
def test_the_allocator_hands_out_blocks_that_do_not_overlap(sizes: list[int], data: st.DataObject) -> None:
    allocator, held = CachingAllocator(), []
    for size in sizes:
        held.append((allocator.allocate(size), size))
        if data.draw(st.booleans()):
            allocator.free(held.pop(data.draw(st.integers(0, len(held) - 1)))[0])
        spans = sorted((block.address, block.address + block.num_bytes) for block, _ in held)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert all(size <= block.num_bytes <= max(size + 512, size + MIB + 512) for block, size in held)
        assert allocator.allocated_bytes == sum(block.num_bytes for block, _ in held)
    for block, _ in held:
        allocator.free(block)
    assert allocator.allocated_bytes == 0


@pytest.mark.parametrize(
    ("asked", "given_out"),
    [
        ([1], 512),
        ([513], 1024),
        ([MIB], MIB),
        ([9 * MIB], 9 * MIB),  # of a segment of 20 MiB
        ([9 * MIB, 9 * MIB, 2 * MIB], 20 * MIB),
        ([9 * MIB, 10 * MIB], 20 * MIB),  # the last of its segment is not split off
        ([12 * MIB + MIB // 2], 12 * MIB + MIB // 2),  # of 14 MiB
        ([13 * MIB + MIB // 2], 14 * MIB),
    ],
)
def test_what_the_allocator_adds(asked: list[int], given_out: int) -> None:
    allocator = CachingAllocator()
    for size in asked:
        allocator.allocate(size)
    assert allocator.allocated_bytes == given_out


# --- what is not known, and what is assumed ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": "toy"}, "its operators are known by a trace alone"),
        ({"model": "package.module:function"}, "measure it with `steplab memory`"),
        ({"device": "cpu"}, "leave --device out"),
        ({"device": "mps"}, "leave --device out"),
        ({"model": "xxl", "layout": "fsdp=2"}, "on layout fsdp=2 is not supported: .* leave --layout out"),
        ({"model": "small", "model.num_layers": 10**9}, "take --model.num-layers 200 or fewer"),
    ],
)
def test_what_is_not_known_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        predict_memory(resolve_step(fields))


def test_another_card_has_another_workspace() -> None:
    hopper, other = (predict_memory(resolve_step(TINY), device=name) for name in (None, "NVIDIA A100-SXM4-80GB"))
    assert hopper.at_peak["workspaces"] == 2 * HOPPER_WORKSPACE.value == 67_108_864
    assert other.at_peak["workspaces"] == 2 * WORKSPACE.value == 17_039_360
    assert "A100" in other.notes[0]


@pytest.mark.parametrize(
    ("fields", "kind", "said"),
    [({"compile": "default"}, "estimate", "an estimate"), ({"compile": "max-autotune"}, "at_least", "CUDA graphs"),
     ({"attention": "sdpa", "precision": "bf16"}, "dry_run", "the flash kernel"),
     ({"attention": "sdpa"}, "dry_run", "the memory-efficient kernel"),
     ({"attention": "sdpa", "model.num_heads": 16}, "dry_run", "torch's own composition"),
     ({"attention": "sdpa_cudnn", "precision": "bf16"}, "estimate", "cuDNN's workspace"),
     ({"checkpointing": "every_99"}, "dry_run", "only the first of 3 blocks is recomputed; take N below 3"),
     ({"checkpointing": "full", "pass": "forward"}, "dry_run", "checkpointing: no effect")],
)  # fmt: skip
def test_what_is_assumed_is_said(fields: dict[str, object], kind: str, said: str) -> None:
    found = predict(**fields)
    assert found.kind == kind
    assert any(said in note for note in found.notes)
    assert not any(said in note for note in predict().notes)


# --- the command ------------------------------------------------------------------------------------------


def test_the_command_says_the_peak_and_its_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "memory", "--model", "2.7b", "--context", "512", "--precision", "bf16"]) == 0
    told = capsys.readouterr().out
    assert "The peak is 60.0 GiB (64,388,067,840 bytes) allocated, in backward" in told
    assert "4 B h T²" in told


@pytest.mark.parametrize("width", [60, 100, 160])
def test_the_text_says_peak_summands_and_cards_at_every_width(width: int) -> None:
    spec = resolve_step({"model": "small", "context": 256})
    found = predict_memory(spec)
    told = render(plan_document(spec, found), width=width)
    assert max(map(len, told.splitlines())) <= width
    assert f"{found.peak_bytes:,}" in told
    assert "B = 4, T = 256, d = 768, f = 3072, h = 12, L = 12, V = 10000" in " ".join(told.split())
    assert "H200 SXM" in told


def test_programs_get_rows_that_sum_to_the_peak(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "memory", "--model", "tiny", "--format", "json"]) == 0
    told = capsys.readouterr().out
    record = msgspec.json.decode(told, type=MemoryPrediction)
    assert record == predict_memory(resolve_step({"model": "tiny"}))
    assert sum(record.at_peak.values()) == record.peak_bytes
    assert main(["plan", "memory", "--model", "tiny", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    sums = {
        kind: sum(int(row["total_bytes"]) for row in rows if row["row"] == kind) for kind in ("category", "summand")
    }
    (peak,) = (int(row["total_bytes"]) for row in rows if row["row"] == "peak")
    assert sums == {"category": peak, "summand": peak}
    assert peak == record.peak_bytes
    assert {row["category"] for row in rows if row["category"]} <= set(MEMORY_CATEGORIES)
    assert {row["bound"] for row in rows} == {"dry_run"}
    cards = [(row["what"], row["total_bytes"], row["verdict"]) for row in rows if row["row"] == "card"]
    assert cards == [(card.gpu, str(card.usable_bytes), card.verdict) for card in record.cards]
    assert [row["what"] for row in rows if row["row"] == "note"] == list(record.notes)


@pytest.mark.parametrize(("width", "gone"), [(60, "category, bytes each"), (72, "bytes each"), (100, None)])
def test_the_text_says_which_columns_it_leaves_out(width: int, gone: str | None) -> None:
    spec = resolve_step({"model": "tiny"})
    told = " ".join(render(plan_document(spec, predict_memory(spec)), width=width).split())
    assert re.findall(r"Not shown at this width: ([^;]*);", told) == ([gone] if gone else [])


def test_small_summands_come_last_and_the_caption_says_what_they_hold() -> None:
    spec = resolve_step({"model": "2.7b", "context": 512})
    found = predict_memory(spec)
    small = [
        term.num_bytes * term.count for term in found.terms if term.num_bytes * term.count < found.peak_bytes / 1e3
    ]
    text = render(plan_document(spec, found), width=120)
    assert f"{len(small)} more rows; --format md has all." in text
    assert f"The last {len(small)} rows, each below 0.1 % of the peak, sum to {units.format_bytes(sum(small))}." in (
        " ".join(text.split())
    )
    whole = render(plan_document(spec, found), "md")
    table = whole.partition("## Components of the peak")[2].partition("A formula gives")[0].splitlines()
    assert sum(line.startswith("| ") for line in table) == len(found.terms) + 2  # the header and its rule


def test_shares_and_sizes_never_round_away() -> None:
    spec = resolve_step({"context": 10**8})
    for width in (60, 80, 160):
        told = render(plan_document(spec, predict_memory(spec)), width=width)
        assert re.search(r"^ *gradients .* <0\.0001 %$", told, re.MULTILINE)  # 1.3 MiB of 2.8 EiB
        assert re.search(r"^ *peak .*2\.79 EiB.* 100\.0 %$", told, re.MULTILINE)


def test_workspaces_are_told_as_the_blocks_that_the_library_is_given() -> None:
    spec = resolve_step({})
    for device, told in ((None, "8 x 4 MiB"), ("NVIDIA L40S", "2 x 4 MiB + 8 x 16 KiB")):
        terms = [term for term in predict_memory(spec, device=device).terms if term.category == "workspaces"]
        assert {term.formula for term in terms} == {told}
        sizes = {"KiB": 2**10, "MiB": 2**20}
        parts = [part.split() for part in told.split(" + ")]
        assert {term.num_bytes for term in terms} == {sum(int(n) * int(size) * sizes[u] for n, _, size, u in parts)}


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_lower_bound_says_so_everywhere(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    spec = resolve_step({"model": "xxl", "model.num_layers": 1, "pass": "forward"})
    told = render(plan_document(spec, predict_memory(spec)), width=width)
    assert "The peak is at least 6.50 GiB" in told
    assert re.search(r"peak, at least +6\.50 GiB", told)
    assert "d = 16384, f = 53248, L = 1." in " ".join(told.split())  # it has neither heads nor a vocabulary
    assert re.search(r"RTX 5070 Ti +≈ 15\.4 GiB +not known", told)
    assert not re.search(r"\bfits$", told, re.MULTILINE)
    for written, sign in (("csv", ",at_least"), ("md", "The peak is at least")):
        assert main(["plan", "memory", "--model", "xxl", "--format", written]) == 0
        assert sign in capsys.readouterr().out


@pytest.mark.parametrize("fields", [{"context": 10**9}, {"batch": 2**62, "model": "8b", "model.num_layers": 2}])
def test_absurd_sizes_have_a_true_answer(fields: dict[str, object]) -> None:
    found = predict_memory(resolve_step(fields))
    assert sum(term.num_bytes * term.count for term in found.terms) == found.peak_bytes
    assert {card.verdict for card in found.cards} == {"does not fit"}
    spec = sure(found.spec)
    assert f"{found.peak_bytes:,}" in render(plan_document(spec, found), width=60).replace("\n", "")


def test_a_wrong_request_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "memory", "--model", "no_such_module:build"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("steplab: cannot import no_such_module for model no_such_module:build")
