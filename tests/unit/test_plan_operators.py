import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from tests.first import first
from tests.shapes import GPT_2, VARIANTS
from tests.sure import sure
from tests.unit.test_plan_memory import SERVED
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode

from steplab.costs.flops import executed_flops_per_token, num_embedding_parameters, num_parameters
from steplab.model.build import build_workload
from steplab.model.transformer import Transformer
from steplab.ops.attention.api import attention_named
from steplab.ops.triton_places import chunk_tokens
from steplab.plan.dry_run.events import Operator
from steplab.plan.dry_run.step import operators_of
from steplab.plan.memory import predict_memory
from steplab.specs.model import TransformerShape
from steplab.specs.resolve import resolve_step
from steplab.specs.step import StepSpec

B, T, V, L, d, f, h = 2, 24, 70, 3, 32, 80, 4
TINY: dict[str, object] = {
    "model": "tiny", "model.num_layers": L, "model.d_model": d, "model.d_ff": f, "model.num_heads": h,
    "model.vocab_size": V, "batch": B, "context": T, "device": "cpu",
}  # fmt: skip


def operators(**fields: object) -> tuple[Operator, ...]:
    return operators_of(resolve_step(TINY | fields))


def computed(spec: StepSpec) -> float:
    return sum(op.flops for op in operators_of(spec) if op.kind != "streaming")


def executed(spec: StepSpec) -> float:
    shape = sure(spec.model.shape)
    per_token = sure(
        executed_flops_per_token(
            spec,
            num_parameters=num_parameters(shape),
            num_embedding_parameters=num_embedding_parameters(shape),
            num_layers=shape.num_layers,
            attention_width=shape.d_model,
        )
    )
    passes = 1 if spec.pass_name == "forward" else 3
    vectors = passes * 2 * (num_parameters(shape) - num_embedding_parameters(shape) - num_matrix_elements(shape))
    return (per_token - vectors) * spec.tokens * spec.micro_steps


def num_matrix_elements(shape: TransformerShape) -> int:
    with torch.device("meta"):
        module = Transformer(shape, context=1, attention=attention_named("plain"))
    return sum(inner.weight.numel() for inner in module.modules() if isinstance(inner, torch.nn.Linear))


# --- FLOPs against the closed form --------------------------------------------------------------------------------


@given(SERVED)
def test_the_flops_are_those_of_hfu(fields: dict[str, Any]) -> None:
    spec = resolve_step(fields)
    # The closed form takes `sdpa` for a fused kernel; heads that none takes are composed, over the whole square.
    assume(spec.attention != "sdpa" or any(op.kind == "attention" for op in operators_of(spec)))
    assert computed(spec) == pytest.approx(executed(spec), rel=1e-12)


def test_what_is_recomputed_says_so() -> None:
    again = sum(op.flops for op in operators(checkpointing="full") if op.kind == "matmul" and op.recomputed)
    plain = [op for op in operators() if op.kind == "matmul" and op.phase == "forward" and op.where.startswith("block")]
    left_out = L * 2 * B * T * d * f  # torch stops before the last product, whose result backward does not need
    assert again == sum(op.flops for op in plain) - left_out
    assert not any(op.recomputed for op in operators())
    assert all(op.kind == "streaming" for op in operators(checkpointing="selective") if op.recomputed)


# --- against what torch dispatches --------------------------------------------------------------------------------


def real_step(spec: StepSpec) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    workload = build_workload(spec, torch.device("cpu"))
    assert workload.module is not None
    batch = sure(workload.make_batch)()
    with torch.no_grad() if spec.pass_name == "forward" else torch.enable_grad():
        workload.module(*batch)  # whatever is only made once
    return lambda: workload.module(*batch), lambda loss: loss.backward()


RECOMPUTED = [
    *((variant, "full") for variant in VARIANTS),
    *((variant, checkpointing) for variant in ({}, GPT_2) for checkpointing in ("none", "every_2", "selective")),
]


@pytest.mark.parametrize("attention", first(1, ["plain", "sdpa_math"]))
@pytest.mark.parametrize(("variant", "checkpointing"), RECOMPUTED, ids=str)
def test_the_matmuls_are_those_that_torch_counts(
    variant: dict[str, object], attention: str, checkpointing: str
) -> None:
    fields = {"attention": attention, "checkpointing": checkpointing, "pass": "forward_backward"}
    spec = resolve_step(TINY | variant | fields)
    forward, backward = real_step(spec)
    counts = {}
    with FlopCounterMode(display=False) as counter:
        loss = forward()
        counts["forward"] = dict(counter.get_flop_counts()["Global"])
    with FlopCounterMode(display=False) as counter:
        backward(loss)
        counts["backward"] = dict(counter.get_flop_counts()["Global"])
    predicted = operators_of(spec)
    for phase, found in counts.items():
        by_name = {str(packet).removeprefix("aten."): flops for packet, flops in found.items()}
        own = {name: sum(op.flops for op in predicted if (op.phase, op.name) == (phase, name)) for name in PRODUCTS}
        assert own == dict.fromkeys(PRODUCTS, 0) | by_name, phase


class Moved(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read, self.written, self.calls = Counter[str](), Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.removesuffix("_") if not func.is_view else ""
        inputs = [a for a in torch.utils._pytree.tree_leaves(args) if isinstance(a, torch.Tensor) and a.dim()]
        outputs = [o for o in torch.utils._pytree.tree_leaves(output) if isinstance(o, torch.Tensor)]
        self.calls[name] += 1
        self.read[name] += sum(t.numel() * t.element_size() for t in inputs)
        self.written[name] += sum(t.numel() * t.element_size() for t in outputs)
        return output


class OneNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with _disable_current_modes():
            return gradient.clone(), gradient.sum((0, 1))


def one_norm(norm: torch.nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = OneNorm.apply(x, norm.weight)  # type: ignore[no-untyped-call]
    return output


PRODUCTS = ("mm", "addmm", "bmm")
ALIKE = (*PRODUCTS, "mul", "add", "sub", "neg", "cat", "silu", "silu_backward", "gelu", "gelu_backward", "sum",
         "masked_fill", "triu", "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data",
         "embedding_dense_backward")  # fmt: skip
LAYER_NORM = ("native_layer_norm", "native_layer_norm_backward")
"""A CPU has its means in the input's type, CUDA in fp32."""


COMPOSED = (*PRODUCTS, "sum")


@pytest.mark.parametrize(
    ("variant", "attention", "checkpointing", "precision"),
    [
        *((variant, "plain", "none", "fp32") for variant in VARIANTS),
        *((variant, "plain", "full", "bf16_pure") for variant in VARIANTS),
        *(({}, "plain", *others) for others in (("full", "fp32"), ("none", "bf16_pure"))),
        *(
            pytest.param(each, "sdpa_math", "none", "fp32", marks=[pytest.mark.release] * (each not in ({}, GPT_2)))
            for each in VARIANTS
        ),
    ],
    ids=str,
)
def test_operators_move_the_bytes_of_the_tensors_that_torch_gives_them(
    variant: dict[str, object], attention: str, checkpointing: str, precision: str
) -> None:
    fields = {"checkpointing": checkpointing, "precision": precision, "pass": "forward_backward"}
    spec = resolve_step(TINY | variant | fields | {"attention": attention})
    workload = build_workload(spec, torch.device("cpu"))
    assert workload.module is not None
    if precision == "bf16_pure":
        for parameter in workload.module.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    for module in workload.module.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.forward = partial(one_norm, module)  # type: ignore[method-assign]
    batch = sure(workload.make_batch)()
    with Moved() as moved:
        workload.module(*batch).backward()
    predicted = operators_of(spec)
    alike = ALIKE if attention == "plain" else COMPOSED
    for name in (*alike, *(LAYER_NORM if precision == "fp32" else ())):
        own = [op for op in predicted if op.name == name]
        assert len(own) == moved.calls[name], name
        assert sum(op.read_bytes for op in own) == moved.read[name], name
        assert sum(op.written_bytes for op in own) == moved.written[name], name
    copies = [op for op in predicted if op.name == "copy"]
    assert sum(op.written_bytes for op in copies) == moved.written["clone"] + moved.written["_to_copy"]


# --- the loss in chunks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pass_name", ["forward", "train"])
def test_a_loss_in_chunks_has_the_flops_of_the_plain_one(pass_name: str) -> None:
    plain, *others = (
        resolve_step({"model": "small", "context": 512, "pass": pass_name, "loss": loss, "batch": 64})
        for loss in ("plain", "chunked", "fused")
    )
    assert chunk_tokens(plain.tokens, 10_000, 4) < plain.tokens
    for spec in others:
        assert computed(spec) == executed(spec) == executed(plain)


def test_the_matmuls_of_a_loss_in_chunks_are_those_that_torch_counts() -> None:
    spec = resolve_step(TINY | {"loss": "chunked", "pass": "forward_backward"})
    forward, backward = real_step(spec)
    predicted = operators_of(spec)
    with FlopCounterMode(display=False) as counter:
        loss = forward()
    assert sum(op.flops for op in predicted if op.product and op.phase == "forward") == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        backward(loss)
    assert sum(op.flops for op in predicted if op.product and op.phase == "backward") == counter.get_total_flops()


# --- the whole step, against what a CPU allocates -----------------------------------------------------------------

SCALARS = 64
"""Bytes of single elements, which live elsewhere on a CPU; other tensors are larger."""
LIKE_CUDA: list[dict[str, object]] = [
    variant | {"model.norm": "layernorm"} for variant in VARIANTS if variant.get("model.norm") != "layernorm"
]


def most_allocated(spec: StepSpec) -> int:
    forward, backward = real_step(spec)
    divide = spec.micro_steps > 1

    def step() -> None:
        loss = forward()
        backward(loss / spec.micro_steps if divide else loss)

    if divide:
        step()  # whose gradients stay
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = profiled.profiler.kineto_results.events()
    sizes = [
        event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()) if event.name() == "[memory]"
    ]
    return max(itertools.accumulate(sizes))


@pytest.mark.parametrize(
    ("variant", "checkpointing", "accumulation"),
    [
        *((variant, "none", 1) for variant in LIKE_CUDA),
        *((GPT_2, *others) for others in (("none", 1), ("full", 1), ("selective", 1), ("none", 2))),
        ({"model.norm": "layernorm", "model.head": "tied"}, "none", 2),
        (GPT_2 | {"batch": 1, "context": 3}, "none", 1),  # most where the gradients of the tied weight are added
        (GPT_2 | {"batch": 1, "context": 3, "model.num_kv_heads": 1}, "none", 2),
    ],
    ids=str,
)
def test_a_step_allocates_what_is_predicted(variant: dict[str, object], checkpointing: str, accumulation: int) -> None:
    fields = {"checkpointing": checkpointing, "pass": "forward_backward", "accumulation": accumulation}
    spec = resolve_step(TINY | variant | fields | {"model.vocab_size": 5000})
    found = predict_memory(dataclasses.replace(spec, device="auto")).at_peak
    before = {"parameters", "inputs", "workspaces", "rounding"} | ({"gradients"} if accumulation > 1 else set())
    predicted = sum(size for category, size in found.items() if category not in before)
    assert abs(most_allocated(spec) - predicted) <= SCALARS
