"""Changes that may speed up a step without changing its training. `steplab advise` tries them by ORDER; the recipe
`fast` applies those that made steps faster.

A change sets one field; specs.own_loop writes it as lines for a user's loop. Changes of the model, the batch or the
optimizer's rule would change the training. Changes of the number format are included, with a note.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from steplab.errors import Remark, Unsupported, UserError, warn_caller
from steplab.specs.resolve import resolve_step, with_fields
from steplab.specs.step import FIELDS, StepSpec
from steplab.specs.step_choices import FP8
from steplab.specs.step_fields import option_name

DeviceKind = Literal["cuda", "cpu", "mps"]
_ANY: tuple[DeviceKind, ...] = ("cuda", "cpu", "mps")
_CUDA: tuple[DeviceKind, ...] = ("cuda",)
_EVERY_MODEL = ("transformer", "hf", "factory")
RECIPE = "recipe"
"""Key of a recipe's name among a step's fields. A spec has only the fields that the recipe sets."""
RECIPES = ("fast",)
ORDER = {
    "saves": "predicted to save enough to be kept: most saved per second of trial first",
    "tight": "the same, of a step that fits the GPU's memory too tightly to be promised",
    "recipe": "set by the recipe `fast`, which is known to pay on devices of this kind",
    "unknown": "no saving is predicted: the shortest trial first",
    "little": "predicted to save too little to be kept",
    "costs": "predicted to cost time",
}
"""Ranks of changes in the order of trial, with meanings. Changes predicted not to fit come last."""
LAUNCHING = ("compile", "cuda_graph")
"""Fields of how kernels are launched. They are tried first while the GPU waits for Python, whose noise hides savings of
GPU time."""
FREEING = ("attention", "loss", "precision")
"""Fields whose changes may need less memory and no more time; tried first if a step does not fit. One that keeps
the numbers is also joined to a faster change that does not fit alone."""
_MEASURED_ON = {"cuda": "an H200", "cpu": "a CPU"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One value for one field of a step."""

    field: str
    """Name of the field in study files."""
    value: str
    """Value that the change sets."""
    devices: tuple[DeviceKind, ...] = _ANY
    """Kinds of devices on which the change is worth trying."""
    replaces: tuple[str, ...] = ()
    """Current values that the change may replace; empty: any other value."""
    needs: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    """Values that other fields must have; each is also a change in CHANGES. A search sets them together."""
    pointless_after: tuple[str, ...] = ()
    """Values of the field that do the same and more, so this change saves nothing after them."""
    makes_room: bool = False
    """True if it saves memory at the cost of time: tried only when the step runs out of memory."""
    numerics: str = ""
    """Effect on the numbers beyond the order of additions; empty: none."""
    opt_in: bool = False
    """True if a search tries it only when its value is requested."""

    fast: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict, compare=False)
    """Kinds of models to which the recipe `fast` applies it, by kind of device. A later change of the field replaces an
    earlier one if the step supports it."""

    @property
    def words(self) -> str:
        return f"{self.field.removeprefix('model.')} {self.value}"

    def words_along(self, spec: StepSpec) -> str:
        return words_with(self.words, [each.words for each in self.brings(spec)])

    @property
    def fields(self) -> frozenset[str]:
        return frozenset((self.field, *self.needs))

    def applies(self, spec: StepSpec, device_kind: str) -> bool:
        return (
            device_kind in self.devices
            and self.matters(spec)
            and all(change.matters(spec) for change in self.brings(spec))
            and self.is_supported(spec)
        )

    def is_fast(self, spec: StepSpec, device_kind: str) -> bool:
        return spec.model.kind in self.fast.get(device_kind, ())

    def matters(self, spec: StepSpec) -> bool:
        """True if the change would replace the current value of a field that affects this step."""
        changed, now = FIELDS[self.field], str(FIELDS[self.field].read(spec))
        return (
            now != self.value
            and (not self.replaces or now in self.replaces)
            and changed.about.applies(spec)
            and changed.unused(spec) is None
        )

    def brings(self, spec: StepSpec) -> tuple["Change", ...]:
        """Further changes that the step needs before this one, from `needs`."""
        missing = (need for need in self.needs.items() if str(FIELDS[need[0]].read(spec)) != need[1])
        return tuple(next(change for change in CHANGES if (change.field, change.value) == need) for need in missing)

    def joined(self, others: Sequence["Change"]) -> "Change":
        made = {field: value for each in others for field, value in (*each.needs.items(), (each.field, each.value))}
        return dataclasses.replace(self, needs={**self.needs, **made})

    def made(self, spec: StepSpec) -> StepSpec:
        """Step with the change and its `needs`. Raises UserError as with_fields does."""
        return with_fields(spec, {**self.needs, self.field: self.value})

    def is_supported(self, spec: StepSpec) -> bool:
        try:
            self.made(spec)
        except UserError:
            return False
        return True


CHANGES = (
    Change(
        field="precision",
        value="bf16",
        replaces=("fp32", "tf32"),
        numerics="matrix products take bf16, with 8 bits of precision for 24; weights and sums stay in fp32",
        fast={"cuda": _EVERY_MODEL},
    ),
    Change(
        field="precision",
        value="tf32",
        devices=_CUDA,
        replaces=("fp32",),
        numerics="matrix products round their fp32 inputs to 11 bits of precision",
    ),
    Change(field="attention", value="auto", devices=_CUDA, fast={"cuda": ("transformer",)}),
    Change(
        field="attention",
        value="sdpa",
        devices=("cpu", "mps"),
        replaces=("plain",),
        fast={"cuda": ("hf",), "cpu": ("transformer", "hf")},
    ),
    Change(field="compile", value="block", fast={"cuda": ("transformer", "hf")}, replaces=("off",)),
    Change(field="compile", value="default", replaces=("off", "block"), fast={"cuda": ("factory",)}),
    Change(field="loss", value="fused", devices=_CUDA),
    Change(field="loss", value="chunked", replaces=("plain",), pointless_after=("fused",)),
    Change(field="model.projections", value="merged", replaces=("separate",), fast={"cuda": ("transformer",)}),
    Change(
        field="block_ops",
        value="triton",
        devices=_CUDA,
        needs={"model.projections": "merged"},
        fast={"cuda": ("transformer",)},
    ),
    Change(field="optimizer", value="adamw_fused", replaces=("adamw_loop", "adamw_foreach")),
    Change(
        field="optimizer",
        value="adamw_triton",
        devices=_CUDA,
        replaces=("adamw_fused", "adamw_loop", "adamw_foreach"),
        fast={"cuda": ("transformer",)},
    ),
    Change(
        field="precision",
        value="bf16_master",
        devices=_CUDA,
        replaces=("bf16",),
        needs={"optimizer": "adamw_triton"},
        fast={"cuda": ("transformer",)},
    ),
    Change(
        field="precision",
        value="fp8",
        devices=_CUDA,
        replaces=("bf16", "bf16_master"),
        needs={"optimizer": "adamw_triton"},
        numerics="products of linear layers within blocks take fp8: 4 bits of precision, and 3 for gradients, for 8 of "
        "bf16; short runs do not show what that does to a long training",
        opt_in=True,
    ),
    Change(field="checkpointing", value="none"),
    Change(field="checkpointing", value="selective", replaces=("full",), pointless_after=("none",)),
    Change(field="reshard_after_forward", value="never"),
    Change(field="data_parallel", value="bucketed"),
    Change(field="checkpointing", value="auto", devices=_CUDA, replaces=("none",), makes_room=True),
    Change(field="attention", value="sdpa_cudnn", devices=_CUDA),
    Change(field="attention", value="flash_triton", devices=_CUDA),
    Change(field="cuda_graph", value="step", devices=_CUDA, fast={"cuda": ("transformer",)}),
    Change(field="update", value="overlapped", devices=_CUDA, fast={"cuda": ("transformer",)}),
    Change(field="compile", value="reduce-overhead", devices=_CUDA, replaces=("off", "block", "default")),
    Change(
        field="compile",
        value="max-autotune-no-cudagraphs",
        devices=_CUDA,
        replaces=("block", "default", "reduce-overhead"),
    ),
)
"""Without predicted savings they are tried in this order."""


def words_with(own: str, others: Sequence[str]) -> str:
    return f"{own} with {' and '.join(others)}" if others else own


OPT_IN: tuple[str, ...] = tuple(change.value for change in CHANGES if change.opt_in)
"""Values that a search tries only on request."""


def numerics_of_fp8(precisions: Collection[str]) -> tuple[str, ...]:
    in_fp8 = [each for each in FP8 if each in precisions]
    if not in_fp8 or all(each in FP8 for each in precisions):
        return ()
    [words] = [change.numerics for change in CHANGES if (change.field, change.value) == ("precision", "fp8")]
    return (f"{' and '.join(in_fp8)} changes the numbers: {words}. MFU stays a share of bf16's peak.",)


def changes_for(
    spec: StepSpec, device_kind: str, *, keep_precision: bool, opt_in: Collection[str] = ()
) -> list[Change]:
    """Changes that apply to the step. `keep_precision` excludes number formats; `opt_in` lists requested values."""
    return [
        change
        for change in CHANGES
        if change.applies(spec, device_kind)
        and not (keep_precision and change.numerics and change.value not in opt_in)
        and (not change.opt_in or change.value in opt_in)
    ]


def resolve_with_recipe(fields: Mapping[str, object], device_kind: Callable[[str], str]) -> StepSpec:
    """Like resolve_step, with the recipe that the fields name.

    `device_kind` maps a device's name, such as `auto`, to cpu, mps or cuda; it is called only with a recipe. A Remark
    lists the fields that the recipe set, and those that it could not. Raises UserError also for an unknown recipe.
    """
    given = dict(fields)
    name = given.pop(RECIPE, None)
    spec = resolve_step(given)
    if name is None:
        return spec
    if name not in RECIPES:
        raise UserError(f"recipe '{name}' is not known; choose one of {', '.join(RECIPES)}")
    kind = device_kind(spec.device)
    added, numerics, refused = dict[str, str](), dict[str, None](), list[str]()
    for change in CHANGES:
        if change.field in given or not change.is_fast(spec, kind) or not change.matters(spec):
            continue
        option = f"{option_name(change.field)} {change.value}"
        try:
            spec = with_fields(spec, {change.field: change.value})
        except Unsupported as error:
            refused.append(f"{option} is left out: {error.why}")
        else:
            added[change.field] = option  # a later row of a field replaces an earlier one
            if change.numerics:
                numerics[change.field] = None
    sets = "sets nothing"
    if added:
        sets = f"sets {' '.join(added.values())}, which made steps faster on {_MEASURED_ON[kind]}"
    changing = [f"{added[field]} changes the numbers" for field in numerics]
    warn_caller(Remark("; ".join([f"recipe {name} on {kind} {sets}", *changing, *refused])))
    return spec


def recipe_help() -> str:
    of_kinds = []
    for kind in get_args(DeviceKind):
        values = dict[str, list[str]]()
        for change in CHANGES:
            if "transformer" in change.fast.get(kind, ()):
                values[change.field] = [change.value, *values.get(change.field, [])]
        words = [f"{option_name(field)} {' or '.join(those)}" for field, those in values.items()]
        if words:
            of_kinds.append(f"on {kind} {', '.join(words)}")
    return f"Set options that are left open: fast ({'; '.join(of_kinds)})"
