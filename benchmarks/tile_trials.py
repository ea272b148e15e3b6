"""Checks and times one kernel of flash_triton with given tiles.

Runs in `tune_attention`'s processes, a function per kind of task; tasks of a process share cached results.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from steplab.measurement.attention.error import Inputs, Reference
from steplab.measurement.attention.variant import make_inputs
from steplab.measurement.clock import ColdCaches, ColdCall, repeats_within
from steplab.measurement.machine.device import Device, open_device
from steplab.measurement.machine.failures import failure_of
from steplab.ops.attention.flash_reference import reference_backward, reference_forward
from steplab.ops.attention.triton_backward import prepared, sweep
from steplab.ops.attention.triton_forward import triton_forward
from steplab.ops.attention.triton_tensors import writable
from steplab.ops.attention.triton_tuning import Tiles
from steplab.specs.attention import AttentionSpec

MOST_ERROR = {16: 2.0, 32: 4.0}
"""Largest error as a multiple of plain attention's, by bits of the number format. In 32 bits both are rounding errors
of sums. Plain attention sums products in parts, more accurately: 2.2 to 2.4 times on an H200, for all tiles. A TF32
product would be off a thousand times as much.
"""
MOST_LSE_ERROR = {16: 1e-3, 32: 1e-5}
"""Largest error of the log-sum-exp, near log(tokens), against the tiled reference, by bits of the inputs. In 32 bits:
20 units in the last place of a float32 between 4 and 8; both are off by about two.
"""
_MADE = {"forward": ("output",), "backward_kv": ("keys", "values"), "backward_q": ("queries",)}
_WARMUP_S, _MEASURED_S = 0.02, 0.04
_LEAST_REPEATS, _MOST_REPEATS = 5, 50


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckTask:
    device: str
    tiles: Tiles
    shape: AttentionSpec
    """A small shape that is not a whole number of tiles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeTask:
    device: str
    candidates: tuple[Tiles, ...]
    shape: AttentionSpec


class _Problem(NamedTuple):
    inputs: Inputs
    o: Tensor
    lse: Tensor


def check(task: CheckTask) -> str:
    """The fault of a candidate, '' without one. Raises if the device stops answering."""
    device = _opened(task.device)
    try:
        with torch.no_grad():
            wrong = _wrong(task)
        device.synchronize()
    except Exception as error:
        device.synchronize()
        return failure_of(error, None).message
    return wrong


def _opened(name: str) -> Device:
    torch.set_float32_matmul_precision("highest")
    return open_device(name)


def _wrong(task: CheckTask) -> str:
    problem, (dq, dk, dv), reference = _solved(task.device, task.shape)
    run, o = launcher(task.tiles, task.shape, problem), problem.o
    first = [result.clone() for result in run()]
    if not all(torch.equal(again, result) for again, result in zip(run(), first, strict=True)):
        return "a second run gives other bits"
    if task.tiles.kernel == "forward":
        o, own_lse = first
        if not float((own_lse - problem.lse).abs().max()) <= MOST_LSE_ERROR[task.tiles.bits]:
            return "the log-sum-exp is wrong"
    elif task.tiles.kernel == "backward_kv":
        dk, dv = first
    else:
        (dq,) = first
    for error in reference.errors(o, (dq, dk, dv)):
        if error.tensor in _MADE[task.tiles.kernel]:
            assert error.plain_relative is not None
            if error.relative is None:
                return f"{error.tensor} not finite"
            if error.relative > MOST_ERROR[task.tiles.bits] * error.plain_relative:
                return f"error of {error.tensor} {error.relative:.1e}, plain attention's {error.plain_relative:.1e}"
    return ""


def time_candidates(task: TimeTask) -> list[tuple[float, ...]]:
    """Seconds per repeat of each candidate, alternating with a cold cache, as in `steplab attention`."""
    device = _opened(task.device)
    caches, problem = ColdCaches(device), _timed(task.device, task.shape)
    with torch.no_grad():
        launchers = [launcher(candidate, task.shape, problem) for candidate in task.candidates]
        runs = [ColdCall(run=lambda _, launch=launch: launch()) for launch in launchers]  # type: ignore[misc]
        calls_s = [caches.warm_up(run, _WARMUP_S) for run in runs]
        rounds = repeats_within(_MEASURED_S * len(runs), sum(calls_s), least=_LEAST_REPEATS, most=_MOST_REPEATS)
        return caches.in_turns(runs, rounds)


def launcher(tiles: Tiles, shape: AttentionSpec, problem: _Problem) -> Callable[[], tuple[Tensor, ...]]:
    """Launches the candidate and returns its outputs: output and log-sum-exp, dK and dV, or dQ."""
    q, k, v, do = problem.inputs.q, problem.inputs.k, problem.inputs.v, problem.inputs.do
    causal, scale = shape.causal, float(shape.dim**-0.5)
    if tiles.kernel == "forward":
        return lambda: triton_forward(q, k, v, causal=causal, scale=scale, tiles=tiles)
    operands = prepared(do, q, k, v, problem.o, problem.lse, causal=causal, scale=scale)
    dq, dk, dv = (writable(torch.empty_like(x)) for x in (q, k, v))

    def keys_and_values() -> tuple[Tensor, ...]:
        sweep(operands, tiles, dk, dv)
        return dk[..., : shape.dim], dv[..., : shape.dim]

    def queries() -> tuple[Tensor, ...]:
        sweep(operands, tiles, dq)
        return (dq[..., : shape.dim],)

    return keys_and_values if tiles.kernel == "backward_kv" else queries


@cache
def _solved(device: str, shape: AttentionSpec) -> tuple[_Problem, tuple[Tensor, Tensor, Tensor], Reference]:
    """A small problem with the tiled reference's results, its gradients, and plain attention's errors against
    float64."""
    inputs = make_inputs(shape, open_device(device), seed=0)
    scale = float(shape.dim**-0.5)
    o, lse = reference_forward(inputs.q, inputs.k, inputs.v, causal=shape.causal, scale=scale)
    gradients = reference_backward(*(inputs.do, *inputs.leaves, o, lse), causal=shape.causal, scale=scale)
    reference = Reference(shape, inputs)
    with torch.enable_grad():
        reference.look_at_plain(shape, inputs)
    return _Problem(inputs, o, lse), gradients, reference


@lru_cache(maxsize=1)
def _timed(device: str, shape: AttentionSpec) -> _Problem:
    """A large problem for timing, with an estimated log-sum-exp: log n + 1/2 for n normally distributed scores."""
    inputs = make_inputs(shape, open_device(device), seed=0)
    seen = torch.arange(1, shape.queries + 1, device=inputs.q.device) if shape.causal else torch.tensor(shape.num_keys)
    lse = (seen.float().log() + 0.5).to(inputs.q.device).expand(shape.batch, shape.heads, shape.queries)
    return _Problem(inputs, 0.1 * inputs.do, lse.contiguous())
