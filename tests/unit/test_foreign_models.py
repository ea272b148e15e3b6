import dataclasses
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.first import first
from tests.runs import make_run
from tests.stored_records import stored
from tests.sure import sure
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from steplab.cli.app import main
from steplab.errors import Unsupported, UserError
from steplab.fake_step.step import fake_step, operators_of_fake
from steplab.lab.planning import plan_memory, plan_steps, plan_time, predicted
from steplab.lab.predicting import spread_model
from steplab.lab.utilization import PeakFigure, utilizations
from steplab.measurement.step.flop_count import _attention_flops, count_flops
from steplab.measurement.step.step import ModelStep
from steplab.measurement.step_job import facts_of
from steplab.model.build import build_workload
from steplab.model.compiling import repeated_blocks
from steplab.model.workload import loss_of
from steplab.plan.dry_run.events import READS_A_VALUE, Allocated, Began, Event, Freed
from steplab.plan.dry_run.sizes import Count, Split
from steplab.plan.dry_run.tensors import Piece
from steplab.plan.fusion import kernels_of
from steplab.records.run import Run
from steplab.specs.layout import Layout
from steplab.specs.model import ModelSpec
from steplab.specs.resolve import resolve_step
from steplab.specs.step import StepSpec

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA: dict[str, Any] = {"model_type": "llama", **SIZES, "num_key_value_heads": 2, "vocab_size": 500}
BERT: dict[str, Any] = {"model_type": "bert", **SIZES, "vocab_size": 500}
T5 = {"model_type": "t5", "d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 500}
VIT = {"model_type": "vit", **SIZES, "image_size": 32, "patch_size": 8}
MLA = {"model_type": "minicpm3", **SIZES, "vocab_size": 500, "q_lora_rank": 32, "kv_lora_rank": 16,
       "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 24}  # fmt: skip


def of_config(config: dict[str, Any], **fields: object) -> StepSpec:
    model = ModelSpec(name="hf:config.json", kind="hf", hf_config=config)
    return dataclasses.replace(resolve_step({"batch": 2, "context": 64, **fields}), model=model)


def mixtral(experts: int) -> dict[str, Any]:
    return LLAMA | {"model_type": "mixtral", "num_local_experts": experts, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (LLAMA, "LlamaForCausalLM"),
        (BERT, "BertForMaskedLM"),
        (BERT | {"architectures": ["BertLMHeadModel"]}, "BertLMHeadModel"),
        (BERT | {"is_decoder": True}, "BertLMHeadModel"),
        (T5, "T5ForConditionalGeneration"),
        (VIT, "ViTForImageClassification"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_configuration_builds_what_it_is_a_configuration_of(config: dict[str, Any], kind: str) -> None:
    spec = of_config(config)
    workload = build_workload(spec, CPU)
    assert type(workload.module).__name__ == kind
    assert workload.is_causal == (kind in ("LlamaForCausalLM", "BertLMHeadModel"))
    assert workload.knows_tokens == (config is not VIT)
    step = ModelStep(workload, spec, CPU)
    step.run()


def test_an_encoder_has_no_causal_convention_and_models_without_a_closed_form_are_counted() -> None:
    conventions = {}
    for config in (LLAMA, BERT, T5):
        facts = sure(facts_of(build_workload(of_config(config), CPU)))
        run = dataclasses.replace(make_run(), spec=of_config(config), model=facts)
        conventions[config["model_type"]] = {
            u.convention for u in utilizations(run, PeakFigure(flops_per_s=1.0, source=""))
        }
        assert facts.is_counted == (config is T5)
    assert conventions["llama"] == {"causal", "full", "params", "as_executed"}
    assert conventions["bert"] == {"full", "params", "as_executed"}


@pytest.mark.parametrize("experts", [4, 16])
def test_experts_count_by_the_rows_that_they_execute(experts: int) -> None:
    spec = of_config(mixtral(experts), attention="plain")
    workload = build_workload(spec, CPU)
    facts = sure(facts_of(workload))
    of_an_expert = 3 * 64 * 128
    assert facts.num_parameters - sure(facts.num_active_parameters) == 2 * (experts - 2) * of_an_expert
    rows = 2 * 64
    linear = 2 * 64 * (64 + 2 * 32 + 64) + 2 * 64 * experts + 2 * 2 * of_an_expert  # of a token in a block, and router
    by_hand = 3 * rows * (2 * linear + 2 * 64 * 500) + 3 * 2 * 2 * 4 * 64 * 64 * rows // 2 * 1
    counted = count_flops(ModelStep(workload, spec, CPU).phases, CPU).executed
    assert counted == pytest.approx(by_hand, rel=1e-6)
    run = dataclasses.replace(make_run(), spec=spec, model=facts)
    (hfu,) = (u.flops for u in utilizations(run, PeakFigure(flops_per_s=1.0, source="")) if u.kind == "hfu")
    assert hfu == pytest.approx(counted, rel=0.02)


def test_fused_attention_is_counted_where_heads_share_keys() -> None:
    forward, backward = (_attention_flops(*s, backward=b) for s, b in ((SHARED, False), ((SHARED[0], *SHARED), True)))
    assert forward == 2 * 2 * 4 * 32 * 32 * 2 * 16
    assert backward == forward * 5 // 2


SHARED = ((2, 4, 32, 16), (2, 2, 32, 16), (2, 2, 32, 16))


def test_a_dict_with_a_scalar_loss_is_a_loss() -> None:
    loss = torch.zeros(())
    assert loss_of({"loss": loss, "logits": torch.zeros(2)}) is loss


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("config", first(2, [LLAMA, BERT, mixtral(4)]), ids=lambda config: config["model_type"])
def test_masks_are_those_of_a_real_step(config: dict[str, Any]) -> None:
    spec = of_config(config, attention="sdpa_math", **{"pass": "forward_backward"}, precision="bf16_pure")
    step = ModelStep(build_workload(spec, CPU), spec, CPU)
    with Operators() as seen:
        step.run()
    traced = Counter(op.name for op in operators_of_fake(spec))
    for name in ("mm", "addmm", "bmm", "_grouped_mm", "cumsum", "embedding", "_softmax"):
        assert seen.found[name] == traced[name], name


@pytest.mark.parametrize("config", first(1, [LLAMA, MLA]), ids=lambda config: config["model_type"])
def test_compiled_attention_has_no_causal_mask_and_logits_that_the_loss_ignores_get_zeros(
    config: dict[str, Any],
) -> None:
    """Flash attention does not serve values wider than queries."""
    eager = "sdpa_efficient" if config is MLA else "sdpa_flash"
    whole = 4 * 2 * 4 * 64 * 64 * 16
    for compiled in ("off", "block", "default"):
        operators = operators_of_fake(of_config(config, attention="sdpa", precision="bf16", compile=compiled))
        attention = [op for op in operators if op.kind == "attention"]
        if compiled != "block":
            found = {(op.name, op.flops) for op in attention if op.phase == "forward"}
            assert found == {(eager, whole / 2) if compiled == "off" else ("sdpa_efficient", whole)}
        assert [op.dropout for op in attention] == [False] * 4
        zeros = [op for op in operators if op.name == "zero"]
        assert [op.written_bytes for op in zeros] == ([2 * 64 * 500 * 2] if compiled == "default" else [])
        kernels = kernels_of(operators, compiled=compiled != "off", blocks_alone=compiled == "block")
        assert [k.fused for k in kernels if k.operator in zeros] == [False for _ in zeros]


@pytest.mark.parametrize("compiled", first(1, ["off", "default"]))
def test_attention_that_drops_scores_is_told(compiled: str) -> None:
    dropping = of_config(LLAMA | {"attention_dropout": 0.1}, attention="sdpa", precision="bf16", compile=compiled)
    assert [op.dropout for op in operators_of_fake(dropping) if op.kind == "attention"] == [True] * 4


# --- one question, one answer ---------------------------------------------------------------------------------------


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, 4, bias=False)
        self.b = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.base(x) + self.b(self.a(x))
        return made


def adapted(batch: int, context: int, device: torch.device) -> tuple[nn.Module, Any]:
    return adapters_on(of_config(LLAMA, batch=batch, context=context, attention="sdpa"), device)


def adapters_on(spec: StepSpec, device: torch.device) -> tuple[nn.Module, Any]:
    workload = build_workload(spec, device)
    model: Any = workload.module
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    return model, workload.make_batch


QWEN2 = LLAMA | {"model_type": "qwen2", "vocab_size": 3000, "tie_word_embeddings": True}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 3000}
AT_HAND: dict[str, dict[str, Any] | str] = {
    **{str(c["model_type"]): c for c in (LLAMA, QWEN2, GPT2, BERT, MLA, mixtral(4))},
    "neox": LLAMA | {"model_type": "gpt_neox"},
    "adapted": f"{__name__}:adapted",
    "tiny": "tiny",
}
FIRST = ("mixtral", "tiny")


def step_of(name: str, **fields: object) -> StepSpec:
    model = AT_HAND[name]
    if isinstance(model, str):
        return resolve_step({"model": model, "batch": 2, "context": 64, **fields})
    return of_config(model, attention="sdpa", **fields)


@pytest.mark.parametrize("name", first(2, sorted(AT_HAND, key=lambda name: name not in FIRST)))
def test_every_command_has_one_answer(name: str) -> None:
    precision = "bf16_pure" if name in ("qwen2", "adapted") else "bf16"
    alone, spread, sharded = (
        step_of(name, precision=precision, **f) for f in ({}, {"layout": "dp=2"}, {"layout": "fsdp=2"})
    )
    planned = plan_steps([alone, spread, sharded])
    for spec, step in zip((alone, spread, sharded), planned, strict=True):
        memory = plan_memory(spec, gpu="H200 SXM")
        assert step.memory is not None
        assert step.memory.peak_bytes == memory.peak_bytes
        assert not step.why_not
    assert planned[0].time is not None
    assert planned[0].time.central_s == plan_time(alone).central_s == predicted(alone, "H200 SXM")[0].central_s
    for step in planned[1:]:
        assert step.layout is not None
        assert step.memory is not None
        (candidate,) = step.layout.candidates
        assert candidate.peak_bytes == step.memory.peak_bytes
        assert candidate.time is not None
    one, copies, shards = (step.memory for step in planned)
    assert one is not None
    assert copies is not None
    assert shards is not None
    assert copies.peak_bytes >= one.peak_bytes
    for category in ("parameters", "optimizer_state"):
        assert shards.at_peak.get(category, 0) <= one.at_peak.get(category, 0)


def test_a_pipeline_of_a_configuration_has_all_of_it_once_and_sends_the_residual_stream() -> None:
    spec = of_config(LLAMA | {"num_hidden_layers": 5}, batch=4, attention="sdpa", layout="pp=2")
    alone = of_config(LLAMA | {"num_hidden_layers": 5}, batch=4, attention="sdpa")
    piped = plan_memory(spec, gpu="H200 SXM")
    planned, as_one = plan_steps([spec, alone])
    whole = sure(as_one.memory)
    first, last = piped.ranks
    assert (first.has, last.has) == ("embedding, blocks 0 to 2", "blocks 3 to 4, head")
    assert whole.model is not None
    held = [whole.model.num_parameters * width for width in (4, 4, 8)]
    for size, key in zip(held, ("parameters_bytes", "gradients_bytes", "optimizer_bytes"), strict=True):
        assert sum(getattr(rank, key) for rank in piped.ranks) == pytest.approx(size, rel=1e-3)
    assert planned.layout is not None
    (candidate,) = planned.layout.candidates
    assert candidate.time is not None
    (sent,) = candidate.time.traffic
    assert (sent.axis, sent.messages, sent.total_bytes) == ("pp", 4, 4 * 64 * 64 * 4)
    assert candidate.time.seconds < 2 * sure(as_one.time).central_s
    with pytest.raises(Unsupported, match="share a weight"):
        plan_memory(of_config(QWEN2, batch=4, layout="pp=2"))
    with pytest.raises(UserError, match="the model has 2 blocks; valid for pp: 1 to 2"):
        plan_memory(of_config(LLAMA, batch=4, layout="pp=4"))


def test_a_convolution_is_a_product_of_patches_and_filters() -> None:
    spec = of_config(VIT, attention="sdpa", precision="bf16")
    operators = [op for op in operators_of_fake(spec) if "convolution" in op.name]
    of_patches = 2 * 2 * 16 * (3 * 8 * 8) * 64  # of 2 images of 4 x 4 patches; images have no gradient
    assert [(op.phase, op.kind, op.flops) for op in operators] == [
        ("forward", "matmul", of_patches),
        ("backward", "matmul", of_patches),
    ]
    (planned,) = plan_steps([spec])
    assert planned.memory is not None
    assert planned.time is not None


def test_tp_of_a_configuration_has_local_shapes_and_the_all_reduces_of_its_plan() -> None:
    spec = of_config(LLAMA, attention="sdpa", precision="bf16", layout="tp=2")
    model = sure(spread_model(spec))
    for whole, local in zip(model.weights("block", 1), model.weights("block", 2), strict=True):
        assert local.elements * (1 if "norm" in whole.name else 2) == whole.elements
    flops = [
        sum(op.flops for those in model.parts(spec, split=Split(tp, False), gathering=None, batch=2, recomputed="none")
            .operators.values() for op in those if op.kind == "matmul")
        for tp in (1, 2)
    ]  # fmt: skip
    assert flops[0] == 2 * flops[1]
    (planned,) = plan_steps([spec])
    time = sure(sure(planned.layout).candidates[0].time)
    assert [(each.collective, each.phase, each.messages) for each in time.traffic] == [
        ("all_reduce", "forward", 2 * 2 + 1),  # the last of the embedding
        ("all_gather", "forward", 1),
        ("all_reduce", "backward", 5 * 2 + 1),
    ]
    assert any("no sequence parallelism" in note for note in sure(planned.memory).notes)
    alone = of_config(LLAMA, attention="sdpa", precision="bf16")
    assert sure(planned.memory).peak_bytes < plan_memory(alone).peak_bytes
    with pytest.raises(UserError, match="tp=8 does not divide num_attention_heads 4"):
        plan_memory(dataclasses.replace(alone, layout=Layout(tp=8)))
    with pytest.raises(UserError, match="transformers has no tensor-parallel plan for gpt2"):
        plan_memory(of_config(GPT2, layout="tp=2"))


def test_merged_products_of_phi_gather_their_outputs_and_slice_their_inputs() -> None:
    phi = LLAMA | {"model_type": "phi3", "pad_token_id": None}
    (planned,) = plan_steps([of_config(phi, attention="sdpa", precision="bf16", layout="tp=2")])
    traffic = sure(sure(planned.layout).candidates[0].time).traffic
    sent = [(each.phase, each.messages, each.total_bytes) for each in traffic if each.collective == "all_gather"]
    bf16_tokens, blocks, key_width = 2 * 64 * 2, 2, 32
    forward = [500, blocks * (64 + 2 * key_width), blocks * 2 * 128]  # logits; queries, keys, values; gate and up
    backward = [blocks * 64, blocks * 128]  # gradients of the inputs of attention's output and of down
    assert sent == [
        ("forward", 1, bf16_tokens * forward[0]),
        *(("forward", blocks, bf16_tokens * width) for width in forward[1:]),
        *(("backward", blocks, bf16_tokens * width) for width in backward),
    ]


@pytest.mark.parametrize("config", first(1, [mixtral(4), LLAMA, QWEN2]), ids=lambda config: config["model_type"])
def test_every_answer_has_the_parameters_that_transformers_counts(config: dict[str, Any]) -> None:
    built = build_workload(of_config(config), CPU)
    assert built.module is not None
    number = sum(parameter.numel() for parameter in built.module.parameters())
    planned = plan_steps([of_config(config), of_config(config, layout="dp=2")])
    answers = [each.memory for each in planned] + [planned[0].time, planned[1].layout]
    for answer in answers:
        assert answer is not None
        assert answer.model is not None
        assert answer.model.num_parameters == number
        assert answer.model.num_active_parameters == built.num_active_parameters
    assert planned[0].time is not None
    causal = next(used for used in planned[0].time.utilizations if used.convention == "causal")
    run = dataclasses.replace(make_run(), spec=of_config(config), model=facts_of(built))
    assert causal.flops in [used.flops for used in utilizations(run, PeakFigure(flops_per_s=1.0, source=""))]


def test_grouped_products_in_fp32_wait_for_the_device_and_indices_are_priced_by_what_they_move() -> None:
    config = mixtral(4) | {"hidden_size": 128}
    mixed, pure = (operators_of_fake(of_config(config, precision=p)) for p in ("bf16", "bf16_pure"))
    products = sum(op.name == "_grouped_mm" for op in mixed)
    assert sum(op.name == READS_A_VALUE for op in mixed) == products > 0
    assert not any(op.name == READS_A_VALUE for op in pure)
    indexed = [op for op in pure if op.name == "index"]
    assert indexed
    for op in indexed:  # elements that are read, and their numbers
        assert op.read_bytes <= op.written_bytes + 8 * op.written_bytes
    assert any(op.rate == "added rows" for op in pure)


@cache
def recorded() -> tuple[Run, ...]:
    return tuple(stored("foreign_models_h200", Run))


def told() -> list[Run]:
    small = [
        run for run in recorded() if run.spec and (run.spec.model.label.endswith("-S") or run.spec.compile != "off")
    ]
    return [*small, *(run for run in recorded() if run.spec and run.spec.layout.world_size > 1 and run not in small)]


COMPILED_FIRST = ("hf:llama-T-default",)


def _case(run: Run) -> Any:
    assert run.spec is not None
    name = f"{run.spec.model.label}-{run.spec.compile}"
    often = run.spec.layout.world_size > 1 if run.spec.compile == "off" else name in COMPILED_FIRST
    return pytest.param(run, id=f"{name}-{run.id}", marks=[] if often else [pytest.mark.release])


@pytest.mark.parametrize("run", [_case(run) for run in told()])
def test_peaks_of_every_rank_are_those_that_were_measured(run: Run) -> None:
    assert run.spec is not None
    assert run.memory is not None
    (measured,) = (peak for peak in run.memory.peaks if peak.phase == "step")
    found = plan_memory(run.spec.as_predicted, gpu="H200 SXM")
    within = 6e-3 if run.spec.layout.fsdp > 1 else 1e-3
    if run.spec.compile != "off":
        within = 1.5e-2
    assert found.peak_bytes == pytest.approx(measured.peak_allocated_bytes, rel=within)


UNSEEN = stored("foreign_unseen_h200", Run)


@pytest.mark.parametrize(
    "run", first(1, reversed(UNSEEN)), ids=lambda run: f"{run.spec.model.label}-{run.spec.compile}"
)
def test_steps_of_families_that_no_fit_saw_are_predicted(run: Run) -> None:
    """Peaks of olmo2 are those of the transformers at hand, not of the one that was measured."""
    (planned,) = plan_steps([sure(run.spec).as_predicted], gpu="H200 SXM")
    time, memory, measured_s = sure(planned.time), sure(planned.memory), sure(run.median_s)
    assert time.central_s == pytest.approx(measured_s, rel=0.05)
    assert time.low_s <= measured_s <= time.high_s
    peak = sure(sure(run.memory).peak("step")).peak_allocated_bytes
    rel = 1e-3
    if "olmo2" in sure(run.spec).model.label:
        rel = 2e-3 if sure(run.spec).compile == "off" else 0.03
    assert memory.peak_bytes == pytest.approx(peak, rel=rel)


def test_a_configuration_is_traced_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    assert main(["plan", "memory", "--model", f"hf:{path}", "--context", "64"]) == 0
    assert "traced: torch ran the model on tensors without content" in " ".join(capsys.readouterr().out.split())
    wrongs: list[dict[str, Any]] = [{"attention": "flash_triton"}, {"checkpointing": "every_2"}]
    for wrong in wrongs:
        with pytest.raises(Unsupported, match="is not supported"):
            plan_memory(model=f"hf:{path}", context=64, **wrong)


@pytest.mark.parametrize("how", first(1, ["block full", "block selective_2", "default none", "default full"]))
def test_a_compiled_block_keeps_what_torch_keeps_of_it(how: str) -> None:
    """The difference between three blocks and two, so that the head, cast differently on other devices, cancels."""
    config = LLAMA | {"num_key_value_heads": 4}
    mode, checkpointing = how.split()
    fields: dict[str, object] = {"attention": "sdpa", "checkpointing": checkpointing, "compile": mode}
    few, more = (of_config(config | {"num_hidden_layers": number}, **fields) for number in (2, 3))
    assert kept_in_the_trace(more) - kept_in_the_trace(few) == kept_by_torch(more) - kept_by_torch(few)


STATE_OF_RANDOM_NUMBERS = 8


def kept_in_the_trace(spec: StepSpec) -> int:
    alive: dict[int, Piece] = {}
    kept: list[int] = []

    def listen(event: Event) -> None:
        if isinstance(event, Allocated):
            alive[id(event.piece)] = event.piece
        elif isinstance(event, Freed):
            del alive[id(event.piece)]
        elif isinstance(event, Began) and event.phase == "backward":
            kept.append(
                sum(
                    each.num_bytes
                    for each in alive.values()
                    if each.category == "activations" and each.num_bytes > STATE_OF_RANDOM_NUMBERS
                )
            )

    with fake_step(spec, Count(0, ""), listen, compiled=True) as run:
        run()
    return kept[0]


def kept_by_torch(spec: StepSpec) -> int:
    module: Any = build_workload(spec, CPU).module
    torch._dynamo.reset()
    for part in repeated_blocks(module) if spec.compile == "block" else [module]:
        part.forward = torch.compile(part.forward, backend="aot_eager_decomp_partition")
    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.numel() > 1:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(500, (spec.batch, spec.context))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = module(input_ids=tokens, labels=tokens).loss  # what it keeps is alive as long as this
    assert loss.requires_grad
    return sum(kept.values())
