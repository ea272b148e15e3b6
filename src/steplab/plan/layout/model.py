"""The model that a layout distributes: its weights, and the memory and operators of its parts.

They come from the sizes of steplab's Transformer (plan.dry_run), or from a trace of another model (fake_step). FSDP2
has a unit for each block; a third-party model's other parameters are in the root unit, which stays gathered throughout.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from steplab.costs.flops import num_embedding_parameters, num_parameters
from steplab.costs.weights import PartName, Weight, weights_of
from steplab.errors import SteplabError, Unsupported
from steplab.plan.dry_run.events import Listener
from steplab.plan.dry_run.machine import Gathering
from steplab.plan.dry_run.parts import Parts, parts_of, parts_of_run
from steplab.plan.dry_run.sizes import Split
from steplab.records.run import ModelFacts
from steplab.specs.layout import Layout
from steplab.specs.model import TransformerShape
from steplab.specs.step import StepSpec, refuse_stages_without_blocks
from steplab.specs.step_choices import ALONE

_FP32_BYTES = 4
TP_OF_TRANSFORMERS = (
    "tp is by transformers' plan of this configuration, with all tokens on every rank and all-reduces between products "
    "(no sequence parallelism); it is planned, not run, and a weight that embedding and head share stays whole"
)


@dataclass(frozen=True, slots=True)
class OwnModel:
    shape: TransformerShape
    is_own: bool = True

    @property
    def num_layers(self) -> int:
        return self.shape.num_layers

    @property
    def facts(self) -> ModelFacts:
        return own_facts(self.shape)

    def weights(self, part: PartName, tp: int) -> tuple[Weight, ...]:
        return weights_of(self.shape, part, tp)

    def parts(self, spec: StepSpec, *, split: Split, gathering: Gathering | None, batch: int, recomputed: str) -> Parts:
        return parts_of(spec, split=split, gathering=gathering, batch=batch, recomputed=recomputed)

    def table_bytes(self, spec: StepSpec) -> int:
        return 0 if self.shape.learned_positions else _FP32_BYTES * spec.context * self.shape.head_dim

    def input_bytes(self, spec: StepSpec) -> int:
        return 2 * 8 * spec.tokens

    @property
    def width(self) -> int:
        return self.shape.d_model


@dataclass(frozen=True, kw_only=True, slots=True)
class OverRanks:
    """Tensor-parallel communication in one forward and backward pass of a part of a model, by transformers' plan."""

    forward: int
    """Number of all-reduces of the residual stream in the forward pass."""
    backward: int
    gathered_forward: tuple[int, ...]
    """Elements per token of each all-gather of an output, such as logits."""
    gathered_backward: tuple[int, ...]
    """Elements per token of each all-gather of a gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A traced model as one tensor-parallel rank holds it: weights, sizes and communication."""

    num_layers: int
    embedding: tuple[Weight, ...]
    """Weights before the blocks, including weights shared with the head."""
    block: tuple[Weight, ...]
    head: tuple[Weight, ...]
    buffer_bytes: int
    batch_bytes: int
    """Bytes of the inputs of the traced step."""
    batch: int
    layers_in_config: int | None
    """Number of layers in the model's configuration; None: it differs from the number of blocks."""
    of_block: "OverRanks"
    """Tensor-parallel communication of one block."""
    of_ends: "OverRanks"
    is_tied: bool
    """True if two of its parts share a weight, such as embedding and head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    facts: ModelFacts
    spread: Spread | None
    why_not: str = ""
    """Reason that layouts cannot distribute the model; '' if they can."""
    inner_width: int | None = None
    key_width: int | None = None
    experts: tuple[int, int] | None = None
    """(experts in a block, experts per token); None: the model has no experts."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ForeignModel:
    facts: ModelFacts
    spread: Spread
    trace: "Trace"
    """Runs a micro-step of the model with two of its blocks, and reports its events."""
    split: Callable[[int], Spread]
    """Maps tp to the model as one of tp ranks holds it, with its shard of each weight.

    Raises Unsupported for a model without a plan for tp.
    """
    is_own: bool = False
    _known: dict[tuple[object, ...], Parts] = field(default_factory=dict)
    _spread: dict[int, Spread | SteplabError] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        return self.spread.num_layers

    def weights(self, part: PartName, tp: int) -> tuple[Weight, ...]:
        known = self.spread_over(tp)
        return {"embedding": known.embedding, "block": known.block, "head": known.head}[part]

    def spread_over(self, tp: int) -> Spread:
        """The model with one tp rank's weights; raises SteplabError as `split` does."""
        if tp not in self._spread:
            try:
                self._spread[tp] = self.split(tp) if tp > 1 else self.spread
            except SteplabError as error:
                self._spread[tp] = error
        found = self._spread[tp]
        if isinstance(found, SteplabError):
            raise found
        return found

    def parts(self, spec: StepSpec, *, split: Split, gathering: Gathering | None, batch: int, recomputed: str) -> Parts:
        step = (spec.context, spec.pass_name, spec.precision, spec.attention, spec.compile)
        key = (split.ranks, batch, recomputed, *step)
        if key not in self._known:
            of_two = replace(
                spec,
                layout=Layout(tp=split.ranks),
                batch=batch,
                accumulation=1,
                pass_name="forward" if spec.pass_name == "forward" else "forward_backward",
                checkpointing=recomputed,
                **ALONE,
            )
            found = parts_of_run(partial(self.trace, of_two, compiled=False))
            if spec.compile != "off":  # the memory of compiled code; its operators are the eager step's
                kept = parts_of_run(partial(self.trace, of_two, compiled=True))
                found = replace(kept, operators=found.operators)
            self._known[key] = found
        return self._known[key]

    def table_bytes(self, spec: StepSpec) -> int:
        return self.spread.buffer_bytes

    def input_bytes(self, spec: StepSpec) -> int:
        return self.spread.batch_bytes * spec.batch // self.spread.batch

    @property
    def width(self) -> int:
        return self.spread.embedding[0].row_elements

    def refuse_unplanned(self, spec: StepSpec) -> None:
        """Raise Unsupported or UserError for a pipeline that cannot be cut between blocks, or tp without a plan."""
        layout, spread = spec.layout, self.spread_over(spec.layout.tp)
        if layout.pp == 1:
            return
        refuse_stages_without_blocks(layout.pp, spec.pipeline_schedule, self.num_layers)
        if spread.is_tied or not spread.embedding:
            why = "its embedding and head share a weight" if spread.is_tied else "nothing comes before its blocks"
            what = f"layout {layout} for {spec.model.label}"
            raise Unsupported(what, f"{why}, and stages are cut between blocks", f"use fsdp={layout.world_size}")


SpreadModel = OwnModel | ForeignModel


class Trace(Protocol):
    def __call__(self, spec: StepSpec, listen: Listener, *, compiled: bool) -> None: ...


def own_facts(shape: TransformerShape) -> ModelFacts:
    return ModelFacts(
        num_parameters=num_parameters(shape),
        num_embedding_parameters=num_embedding_parameters(shape),
        num_layers=shape.num_layers,
        attention_width=shape.num_heads * shape.head_dim if shape.num_heads else None,
    )


def own_model(spec: StepSpec) -> SpreadModel:
    assert spec.model.shape is not None
    return OwnModel(spec.model.shape)
