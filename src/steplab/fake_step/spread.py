"""Prepares a third-party model for layouts: its weights, and traces of a step with two of its blocks."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from steplab.costs.weights import Weight
from steplab.fake_step.step import blocks_of, built_on_fakes, fake_step
from steplab.fake_step.tensor_parallel import GATHERED, SLICED, SUMS
from steplab.measurement.step.step import ModelStep
from steplab.measurement.step_job import facts_of
from steplab.model.compiling import repeated_blocks
from steplab.plan.dry_run.events import Listener
from steplab.plan.dry_run.sizes import Count
from steplab.plan.layout.model import Known, OverRanks, Spread
from steplab.specs.step import StepSpec

_BLOCKS = 2


def known_of(spec: StepSpec, of: int | None) -> Known:
    """Facts and weights of a spec's model. Weights are one rank's shards by tp; the layout's other axes are ignored.

    of: number of layers in the model's configuration, to build only two blocks; None: build all blocks. Raises
    Unsupported as `fake_step` does.
    """
    with built_on_fakes(spec if of is None else _built_less(spec, _BLOCKS, of)) as step:
        facts = facts_of(step.workload)
        assert facts is not None
        blocks = blocks_of(step.module)
        if why := _why_not(blocks):
            return Known(facts=facts, spread=None, why_not=why)
        work = step.workload
        inside = {id(parameter) for block in blocks for parameter in block.parameters()}
        ends: tuple[list[Weight], list[Weight]] = ([], [])
        first = next(iter(blocks[0].parameters()))
        behind = False
        for name, parameter in step.module.named_parameters():
            behind |= parameter is first
            if id(parameter) not in inside:
                ends[behind].append(_weight(name, parameter))
        within = set().union(*(block.modules() for block in blocks))
        spread = Spread(
            of_block=_over_ranks(blocks[0].modules(), spec.layout.tp),
            of_ends=_over_ranks(set(step.module.modules()) - within, spec.layout.tp),
            num_layers=len(blocks),
            embedding=tuple(ends[0]),
            block=tuple(_weight(name, parameter) for name, parameter in blocks[0].named_parameters()),
            head=tuple(ends[1]),
            buffer_bytes=sum(buffer.nbytes for buffer in step.module.buffers()),
            batch_bytes=_bytes_of(step.batches[0]),
            batch=spec.batch,
            layers_in_config=work.num_layers if work.num_layers == len(blocks) else None,
            is_tied=len(list(step.module.named_parameters(remove_duplicate=False)))
            > len(list(step.module.parameters())),
        )
        inner, key = work.inner_width, work.key_width
        return Known(facts=facts, spread=spread, inner_width=inner, key_width=key, experts=work.experts)


def with_blocks(
    spec: StepSpec, listen: Listener, *, blocks: int, of: int | None, compiled: bool = False, with_state: bool = False
) -> AbstractContextManager[Callable[[], None]]:
    """`fake_step` with only the model's first `blocks` blocks; of: number of layers in its configuration."""
    cut, less = partial(_cut, number=blocks), _built_less(spec, blocks, of)
    return fake_step(less, Count(0, ""), listen, cut=cut, compiled=compiled, with_state=with_state)


def _built_less(spec: StepSpec, blocks: int, of: int | None) -> StepSpec:
    """A spec that builds only the first blocks, which is faster than cutting the others off. The spec itself if its
    configuration does not have the number of layers `of`.
    """
    config = spec.model.hf_config or {}
    key = next((key for key in ("num_hidden_layers", "n_layer") if config.get(key) == of), None)
    if key is None:
        return spec
    by_layer = {name: each[:blocks] for name, each in config.items() if isinstance(each, list) and len(each) == of}
    return replace(spec, model=replace(spec.model, hf_config={**config, **by_layer, key: blocks}))


def _cut(step: ModelStep, number: int) -> None:
    blocks = repeated_blocks(step.module)
    for module in step.module.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) and child[0] is blocks[0]:
                setattr(module, name, nn.ModuleList(blocks[:number]))
                return


def _why_not(blocks: list[nn.Module]) -> str:
    if len(blocks) < _BLOCKS:
        return f"it has fewer than {_BLOCKS} blocks in an nn.ModuleList"
    if len({tuple(map(repr, _kind(block))) for block in blocks}) > 1:
        return "its blocks are of several kinds, and are planned as equal"
    return ""


def _kind(block: nn.Module) -> list[object]:
    """A block's modules, sizes of weights, and choices such as a sliding window: blocks with equal ones are equal."""
    found: list[object] = [(name, tuple(p.shape), p.requires_grad) for name, p in block.named_parameters()]
    for name, inner in block.named_modules():
        plain = (str, float, bool, type(None))
        choices = {key: value for key, value in vars(inner).items() if isinstance(value, plain) and key != "training"}
        found.append((name, type(inner).__name__, sorted(choices.items(), key=lambda one: one[0])))
    return found


def _over_ranks(modules: Iterable[nn.Module], tp: int) -> OverRanks:
    every: Iterable[Any] = modules
    styled = [(each.tp_style, each) for each in every if getattr(each, "tp_style", None)]
    forward, backward = (sum(SUMS.get(style, (0, 0))[place] for style, _ in styled) for place in (0, 1))
    return OverRanks(
        forward=forward,
        backward=backward,
        gathered_forward=tuple(tp * each.weight.shape[0] for style, each in styled if style in GATHERED),
        gathered_backward=tuple(tp * each.weight.shape[-1] for style, each in styled if style in SLICED),
    )


def _weight(name: str, parameter: nn.Parameter) -> Weight:
    rows = parameter.shape[0] if parameter.dim() else 1
    elements = parameter.numel() // max(rows, 1)
    return Weight(name=name, rows=rows, row_elements=elements, trained=parameter.requires_grad)


def _bytes_of(batch: object) -> int:
    leaves, _ = torch.utils._pytree.tree_flatten(batch)
    tensors = {id(each): each for each in leaves if isinstance(each, torch.Tensor)}
    return sum(tensor.nbytes for tensor in tensors.values())
