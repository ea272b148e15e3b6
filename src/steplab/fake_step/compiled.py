"""Finds a compiled model's memory by AOTAutograd and the min-cut partitioner on fake tensors.

As with Inductor, only results and inputs of matmuls and fused attention, and a graph's outputs, are in memory; all else
is fused. Neither CUDA nor dynamo is needed. Reading a tensor's value in Python would end a graph, and is refused.
"""

import itertools
import operator
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._functorch import partitioners
from torch._functorch.aot_autograd import aot_function
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V
from torch.fx import traceback
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import checkpoint
from torch.utils._pytree import tree_flatten, tree_unflatten

from steplab.costs.kernel_time import FIRST_FACTOR
from steplab.fake_step.kernels import held_within
from steplab.fake_step.storages import Storages, formula_of
from steplab.fake_step.watching import Watcher
from steplab.measurement.step.step import ModelStep
from steplab.model.compiling import repeated_blocks

_VIEWS = frozenset(
    {
        *("view", "permute", "transpose", "t", "expand", "slice", "squeeze", "unsqueeze", "select", "alias", "reshape"),
        *("as_strided", "detach", "_unsafe_view", "split", "split_with_sizes", "unbind"),
    }
)
_PRODUCTS = (*FIRST_FACTOR, "_grouped_mm")
_EXTERN = (*_PRODUCTS, "convolution", "_scaled_dot_product", "sort", "cumsum")
_CASTS = ("_to_copy", "convert_element_type")


def compile_on_fakes(step: ModelStep, mode: str, watcher: Watcher, storages: Storages) -> None:
    """Make a built step run compiled graphs; mode: of torch.compile, or `block` for each block alone."""
    runner = _Runner(watcher, storages)
    if mode == "block":
        for block in repeated_blocks(step.module):
            block.forward = partial(runner.call, block, block.forward, _kind(block))
    else:
        whole = partial(runner.call, step.module, step.module, ())
        step.distributed = replace(step.distributed, call=whole)


def _kind(block: nn.Module) -> tuple[object, ...]:
    return tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters()) + tuple(
        (name, type(inner), getattr(inner, "sliding_window", None)) for name, inner in block.named_modules()
    )


class _Runner:
    def __init__(self, watcher: Watcher, storages: Storages) -> None:
        self._watcher, self._storages = watcher, storages
        self._known: dict[str, Any] = {}

    def call(self, module: nn.Module, function: Callable[..., Any], kind: object, *args: Any, **kwargs: Any) -> Any:
        """Run function(*args, **kwargs) of a module as compiled code.

        kind: modules of an equal kind share graphs; (): this module shares with no other.
        """
        leaves, tree = tree_flatten((args, kwargs))
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        shapes = [(tuple(each.shape), each.dtype, each.requires_grad) for each in tensors]
        rest = [repr(each) for each in leaves if not isinstance(each, Tensor)]
        key = repr((kind or id(module), shapes, rest, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        state = dict(module.named_parameters()) | dict(module.named_buffers())
        if key not in self._known:
            names = list(state)

            def run(values: list[Tensor], given: list[Tensor]) -> Any:
                left = iter(given)
                filled = [next(left) if isinstance(each, Tensor) else each for each in leaves]
                its_args, its_kwargs = tree_unflatten(filled, tree)
                its_state = dict(zip(names, values, strict=True))
                with _reparametrize_module(module, its_state, tie_weights=True), _recomputation_marked():
                    return function(*its_args, **its_kwargs)

            self._known[key] = self._compiled(run, len(names), is_whole=not kind)
        with self._watcher.paused():
            return self._known[key](list(state.values()), tensors)

    def _compiled(self, run: Callable[..., Any], num_state: int, *, is_whole: bool) -> Any:
        def partition(joint: fx.GraphModule, inputs: Any, **given: Any) -> Any:
            with V.set_fake_mode(detect_fake_mode(inputs)):
                joint_graph_passes(joint)
            static = list(range(num_state))
            return partitioners.min_cut_rematerialization_partition(
                joint, inputs, compiler="inductor", **(given | {"static_lifetime_input_indices": static})
            )

        def graph_of(graph: fx.GraphModule, inputs: Any) -> Callable[[list[Any]], list[Any]]:
            return _Graph(graph, self._watcher, self._storages, places=self._watcher.made_in if is_whole else None)

        return aot_function(
            run,
            fw_compiler=graph_of,
            bw_compiler=graph_of,
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )


def _recomputation_marked() -> AbstractContextManager[None]:
    """Mark operators that checkpointing recomputes, so that the partitioner knows them, as dynamo does
    (torch._higher_order_ops.wrap)."""
    numbers, module = itertools.count(), cast(Any, checkpoint)
    before = module._checkpoint_without_reentrant_generator

    def marked(run: Any, keeps_random_state: bool, contexts: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if contexts is checkpoint.noop_context_fn:
            contexts = partial(checkpoint.create_selective_checkpoint_contexts, [])

        def numbered() -> Any:
            forward, backward = contexts()
            forward.ac_graph_id = next(numbers)
            return forward, backward

        with traceback.preserve_node_meta():
            yield from before(run, keeps_random_state, numbered, *args, **kwargs)

    return mock.patch.multiple(module, _checkpoint_without_reentrant_generator=marked)


class _Made:
    def __init__(self, node: fx.Node, where: str | None) -> None:
        name, value, args = _name(node), node.meta.get("val"), None
        if _is_kernel(node) and node.target is not operator.getitem:
            args = fx.node.map_arg(node.args, lambda each: each.meta.get("val"))
        self.node, self.where = node, where
        self.value = value if isinstance(value, Tensor) else None
        """None: the node has several outputs, each a node itself."""
        self.is_product = name in _PRODUCTS
        self.within = held_within(name, args) if args else []
        self.cast_of = node.all_input_nodes[0] if name in _CASTS else None
        """The graph's input, if the node casts one to another format."""
        self.dies: list[fx.Node] = []


class _Graph:
    _boxed_call = True
    """Tells AOTAutograd that arguments come in a list, which the call may empty."""

    def __init__(
        self, graph: fx.GraphModule, watcher: Watcher, storages: Storages, places: Callable[[int], str] | None
    ) -> None:
        """places: maps a node's sequence number to a part of the model; None: the graph is of one part."""
        self._watcher, self._storages = watcher, storages
        nodes = list(graph.graph.nodes)
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        (given,) = next(node for node in nodes if node.op == "output").args
        self._outputs = [each if isinstance(each, fx.Node) else None for each in given]
        kept = {_memory_of(each) for each in self._outputs if each is not None}
        in_memory = kept | {_memory_of(each) for node in nodes if _is_kernel(node) for each in node.all_input_nodes}
        in_memory |= {node for node in nodes if _is_kernel(node)}
        self._kept = kept
        self._made: list[_Made] = []
        read_last: dict[fx.Node, _Made] = {}
        where = None
        for node in nodes:
            if places is not None and "seq_nr" in node.meta:
                where = places(node.meta["seq_nr"])
            if node.op == "placeholder" or node not in in_memory:
                continue
            made = _Made(node, where)
            self._made.append(made)
            for source in _sources(node, in_memory):
                read_last[source] = made
        for memory, made in read_last.items():
            if memory not in kept:
                made.dies.append(memory)

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run the graph; each input is removed from the list at its last read."""
        inputs = dict(zip(self._inputs, args, strict=True))
        args.clear()
        there: dict[fx.Node, Tensor] = {}
        numbers: dict[fx.Node, int] = {}
        with self._watcher.paused():
            place = self._watcher.place()
            for made in self._made:
                where = place if made.where is None else made.where
                if made.is_product:
                    self._watcher.start_products()
                for count in made.within:
                    self._storages.free(self._storages.make("within the kernel", count.symbols, count.value, where))
                self._make(made, where, inputs, there, numbers)
                for memory in made.dies:
                    if memory in numbers:
                        self._storages.free(numbers.pop(memory))
                    inputs.pop(memory, None)
            return [self._output(each, inputs, there) for each in self._outputs]

    def _make(
        self,
        made: _Made,
        where: str,
        inputs: dict[fx.Node, Any],
        there: dict[fx.Node, Tensor],
        numbers: dict[fx.Node, int],
    ) -> None:
        if made.value is None:
            return
        what = f"output of {_name(made.node)}"
        if made.node not in self._kept:
            num_bytes = made.value.untyped_storage().nbytes()
            numbers[made.node] = self._storages.make(what, formula_of(made.value), num_bytes, where)
            return
        value = torch.empty_strided(made.value.shape, made.value.stride(), dtype=made.value.dtype)
        self._storages.add(value, what, where)
        there[made.node] = value
        name = self._watcher.name_of_parameter(inputs.get(made.cast_of)) if made.cast_of is not None else None
        if name is not None:
            self._storages.call([value], "autocast_copies", name)

    def _output(self, node: fx.Node | None, inputs: dict[fx.Node, Any], there: dict[fx.Node, Tensor]) -> Any:
        if node is None:
            return None
        memory = _memory_of(node)
        whole = there[memory] if memory in there else inputs[memory]
        if node is memory:
            return whole
        value = node.meta["val"]
        return whole.as_strided(value.shape, value.stride(), value.storage_offset())


def _name(node: fx.Node) -> str:
    target: Any = node.all_input_nodes[0].target if node.target is operator.getitem else node.target
    return getattr(getattr(target, "overloadpacket", target), "__name__", str(target))


def _memory_of(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and _name(node) in _VIEWS:
        node = node.all_input_nodes[0]
    return node


def _is_kernel(node: fx.Node) -> bool:
    return node.op == "call_function" and _name(node).startswith(_EXTERN)


def _sources(node: fx.Node, in_memory: Set[fx.Node]) -> Iterator[fx.Node]:
    seen, left = set[fx.Node](), [*node.all_input_nodes]
    while left:
        each = _memory_of(left.pop())
        if each in seen:
            continue
        seen.add(each)
        if each in in_memory or each.op == "placeholder":
            yield each
        else:
            left += each.all_input_nodes
