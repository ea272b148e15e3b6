"""Writes a step as lines of Python for a user's own training loop.

Sections follow from the step's fields, in program order, and use the variables `model`, `batches`, `device` and `lr`.
Functions of a measured step call the model, find the loss and split a batch, so the lines run for every measurable
model.
"""

from collections.abc import Iterable, Iterator

from steplab.specs.checkpointing import SELECTIVE, num_first, period_of
from steplab.specs.step import AUTOCAST, StepSpec
from steplab.specs.step_choices import FP8, OVERLAPPED, RECORD_THEIR_OWN, WITH_MASTERS


def own_model(spec: StepSpec) -> tuple[str, ...]:
    """Lines for the model, in the order of its forward pass; empty for a plain one. Names that they use but do not
    define are the model's own."""
    return _with_imports_first(_model(spec))


def own_loop(spec: StepSpec, device_kind: str = "cuda") -> tuple[str, ...]:
    loop = (*_formats(spec), *_blocks(spec), *_ranks(spec), *_optimizer(spec), *_step(spec), *_loop(spec, device_kind))
    return _with_imports_first(loop)


def _with_imports_first(texts: Iterable[str]) -> tuple[str, ...]:
    lines = [line for text in texts for line in text.splitlines()]
    imports = {line for line in lines if line.startswith(("from ", "import "))}
    if any("torch." in line for line in lines if line not in imports):
        imports.add("import torch")
    return (
        *sorted(imports, key=lambda line: (line.startswith("from"), line)),
        *(line for line in lines if line not in imports),
    )


def _model(spec: StepSpec) -> Iterator[str]:
    shape, fused = spec.model.shape, spec.block_ops == "triton"
    merged = shape is not None and shape.projections == "merged"
    swiglu = shape is not None and shape.feed_forward == "swiglu"
    if merged:
        yield "widths = d_model, d_kv, d_kv\nqkv = torch.nn.Linear(d_model, sum(widths), bias=False)"
    if merged and swiglu:
        yield "gate_up = torch.nn.Linear(d_model, 2 * d_ff, bias=False)"
    if fused:
        yield """from steplab.ops.rms_norm import add_rms_norm
from steplab.ops.rotary_heads import rotary_heads
normed, x = add_rms_norm(x, branch, attention_norm.weight, eps)  # the branch before the first block is zeros
q, k, v = rotary_heads(qkv(normed), table, num_heads)"""
    elif merged:
        yield "q, k, v = qkv(normed).split(widths, dim=-1)"
    if spec.attention == "sdpa":
        yield "out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)"
    elif spec.attention != "plain":
        yield f"""from steplab.ops.attention import attention
out = attention(q, k, v, causal=True, implementation="{spec.attention}")"""
    if fused:
        yield """from steplab.ops.swiglu import swiglu
branch = output(out.transpose(1, 2).flatten(2))
normed, x = add_rms_norm(x, branch, feed_forward_norm.weight, eps)
branch = down(swiglu(gate_up(normed)))"""
    elif merged and swiglu:
        yield "gate, up = gate_up(normed).chunk(2, dim=-1)"
    if spec.loss != "plain":
        yield f"""from steplab.ops.cross_entropy import linear_cross_entropy
loss = linear_cross_entropy(hidden, head.weight, targets, implementation="{spec.loss}")"""


def _formats(spec: StepSpec) -> Iterator[str]:
    if spec.precision == "tf32":
        yield 'torch.set_float32_matmul_precision("high")'
    elif spec.precision == "bf16_pure":
        yield "for parameter in model.parameters():\n    parameter.data = parameter.data.to(torch.bfloat16)"
    elif spec.precision in WITH_MASTERS:
        # The gradient of a loss in chunks is summed, which bf16 would round.
        stay = "" if spec.loss == "plain" else ", stay=[model.head.weight]"
        yield f"""from steplab.ops.adamw import bf16_with_masters
masters = bf16_with_masters(model{stay})"""
    if spec.precision in FP8:
        function = "products_in_fp8" if spec.precision == "fp8" else "products_by_torchao"
        yield f"from steplab.model.fp8_blocks import {function}\n{function}(model)"


def _blocks(spec: StepSpec) -> Iterator[str]:
    if spec.checkpointing != "none" and spec.checkpoints_apply:
        first, period = num_first(spec.checkpointing), period_of(spec.checkpointing)
        some = f"[:{first}]" if first else f"[::{period}]" if period > 1 else ""
        options = "use_reentrant=False"
        if spec.checkpointing in SELECTIVE:
            options += ", context_fn=contexts"
            yield f"""from steplab.model.checkpointing import selective_contexts
contexts = partial(selective_contexts, "{spec.checkpointing}", is_compiled={spec.compile != "off"})"""
        yield f"""from functools import partial
from torch.utils.checkpoint import checkpoint
for block in model.blocks{some}:
    block.forward = partial(checkpoint, block.forward, {options})"""
    mode = "" if spec.compile in ("block", "default") else f', mode="{spec.compile}"'
    if spec.compile == "block" or (spec.compile != "off" and spec.layout.world_size > 1):
        yield f"for block in model.blocks:\n    block.forward = torch.compile(block.forward{mode})"
    elif spec.compile != "off":
        yield f"model = torch.compile(model{mode})"


def _ranks(spec: StepSpec) -> Iterator[str]:
    layout = spec.layout
    if spec.strategy:
        size = f", bucket_size_mb={spec.bucket_mb:g}" if spec.bucket_mb else ""
        yield f"""from steplab.parallel import DataParallel
model = DataParallel(model, "{spec.strategy}"{size})"""
    elif layout.data_ranks > 1:
        sizes = f"({layout.dp}, {layout.fsdp})" if layout.dp > 1 else f"({layout.fsdp},)"
        policy = ""
        if spec.precision == "bf16" and spec.model.kind == "transformer":
            # Only blocks: autocast reads an embedding in its stored format.
            policy = "mp_policy=half, "
            yield """from torch.distributed.fsdp import MixedPrecisionPolicy
half = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)"""
        yield f"""from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh(device.type, {sizes})
for block in model.blocks:
    fully_shard(block, mesh=mesh, {policy}reshard_after_forward={spec.reshards})
fully_shard(model, mesh=mesh, reshard_after_forward=False)"""
    if layout.tp * layout.pp > 1:
        yield f"# these lines leave out the axes tp and pp of layout {layout}"


def _optimizer(spec: StepSpec) -> Iterator[str]:
    if spec.pass_name != "train":
        return
    if spec.optimizer == "adamw_triton":
        masters = ", masters=masters" if spec.precision in WITH_MASTERS else ""
        yield f"""from steplab.ops.adamw import OneKernelAdamW
optimizer = OneKernelAdamW(model.parameters(), lr=lr{masters})"""
    elif spec.optimizer == "sgd":
        yield "optimizer = torch.optim.SGD(model.parameters(), lr=lr)"
    else:
        kind = {"adamw_fused": "fused=True", "adamw_foreach": "foreach=True", "adamw_loop": "foreach=False"}
        capturable = ", capturable=True" if spec.cuda_graph == "step" else ""
        yield f"optimizer = torch.optim.AdamW(model.parameters(), lr=lr, {kind[spec.optimizer]}{capturable})"
    if spec.precision == "fp16":
        yield "scaler = torch.amp.GradScaler(device.type)"
    if spec.updates_in_backward:
        yield """from steplab.ops.update import UpdateInBackward
update = UpdateInBackward(optimizer, model.blocks)"""
    elif spec.update == OVERLAPPED:
        yield "from steplab.ops.update import UpdateByParts\nupdate = UpdateByParts(optimizer)"


def _step(spec: StepSpec) -> Iterator[str]:
    count, waits = spec.micro_steps, ""
    if spec.updates_in_backward:
        waits = "update.paused()"
    elif spec.strategy:
        waits = "model.no_sync()"
    elif spec.layout.data_ranks > 1 and count > 1:
        yield "from steplab.parallel.layout import no_gradient_sync"
        waits = f"no_gradient_sync(model, keep_gathered={not spec.reshards})"
    contexts = ["torch.no_grad()"] if spec.pass_name == "forward" else []
    if spec.precision in AUTOCAST:
        dtype = {"bf16": "bfloat16", "fp16": "float16"}[AUTOCAST[spec.precision]]
        contexts.append(f"torch.autocast(device.type, dtype=torch.{dtype})")
    output = f"call(model, {'batch' if count == 1 else 'part'})"
    loss = output if spec.pass_name == "forward" else f"loss = loss_of({output})" + f" / {count}" * (count > 1)
    lines = [f"with {', '.join(contexts)}:", f"    {loss}"] if contexts else [loss]
    if spec.pass_name != "forward":
        is_scaled = spec.precision == "fp16" and spec.pass_name == "train"
        lines.append("scaler.scale(loss).backward()" if is_scaled else "loss.backward()")
    if count > 1:
        yield "from steplab.measurement.tensors import with_tensors"
        if waits:
            yield "import contextlib"
            last = f"contextlib.nullcontext() if number == {count - 1} else {waits}"
            lines[-1:] = [f"with {last}:", f"    {lines[-1]}"]
        part = f"part = with_tensors(batch, lambda tensor: tensor.chunk({count})[number])"
        lines = [f"for number in range({count}):", *(f"    {line}" for line in (part, *lines))]
    called = "# call(model, batch) is model(batch), of a tuple model(*batch), of a dict model(**batch)"
    if spec.pass_name == "forward":
        yield f"from steplab.model.workload import call\n{called}"
    else:
        yield f"""from steplab.model.workload import call, loss_of
{called}
# loss_of finds the loss in the result: the scalar, .loss, or the one scalar in a tuple"""
    yield "def step(batch):"
    yield from (f"    {line}" for line in (*lines, *_update(spec)))


def _update(spec: StepSpec) -> Iterator[str]:
    if spec.pass_name == "forward":
        return
    trains = spec.pass_name == "train"
    in_parts = trains and spec.update == OVERLAPPED and not spec.updates_in_backward
    if in_parts:
        yield from ("for parameters in model.finish_in_parts():", "    update.of(parameters)")
    elif spec.strategy:
        yield "model.finish_gradient_synchronization()"
    if trains and spec.precision == "fp16":
        yield from ("scaler.step(optimizer)", "scaler.update()")
    elif trains and not in_parts:
        yield "update.finish()" if spec.updates_in_backward else "optimizer.step()"
    yield f"{'optimizer' if trains else 'model'}.zero_grad(set_to_none=True)"


def _loop(spec: StepSpec, device_kind: str) -> Iterator[str]:
    graph = spec.cuda_graph == "step"
    beside = spec.updates_in_backward and device_kind == "cuda"
    if graph:
        yield """from steplab.measurement.tensors import tensors_in
from steplab.measurement.tensors import with_tensors
static = with_tensors(next(iter(batches)), torch.clone)  # where the graph reads each batch"""
    if graph or beside:
        first = "priority=-1)  # its kernels precede the updates' kernels" if beside else ")"
        yield f"stream = torch.cuda.Stream({first}\nstream.wait_stream(torch.cuda.current_stream())"
    if graph:
        yield """with torch.cuda.stream(stream):
    for _ in range(3):  # steps of the training, which compile and make the optimizer's state
        step(static)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=stream):
    step(static)  # is recorded, and changes nothing yet
for batch in batches:
    for kept, new in zip(tensors_in(static), tensors_in(batch), strict=True):
        kept.copy_(new)
    graph.replay()"""
        return
    lines = ["for batch in batches:", "    step(batch)"]
    if spec.compile in RECORD_THEIR_OWN and device_kind == "cuda":
        lines.insert(1, "    torch.compiler.cudagraph_mark_step_begin()")
    yield from ["with torch.cuda.stream(stream):", *(f"    {line}" for line in lines)] if beside else lines
