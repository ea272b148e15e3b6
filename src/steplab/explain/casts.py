"""Copies between fp32 and low precision among a profile's operators, weights apart."""

from steplab.explain.shapes import shapes_of
from steplab.records.profile import OpStats, Profile

_LOW = ("bf16", "fp16")


def weight_cast_ops(profile: Profile) -> list[OpStats]:
    """Copies of a matrix between fp32 and low precision: weights have two dimensions where activations have three.
    Weights are cast down in forward, and their gradients up in backward. Logits, which a loss may flatten to two
    dimensions, go the other way, so the direction distinguishes them."""
    return [op for op in profile.ops if op.category == "copy" and _is_cast(op)]


def cast_ops(profile: Profile) -> list[OpStats]:
    return [op for op in profile.ops if op.category == "copy" and _changes_precision(op)]


def cast_bytes(op: OpStats) -> float:
    return op.calls * sum(shape.size_bytes or 0 for shape in shapes_of(op))


def _changes_precision(op: OpStats) -> bool:
    dtypes = {shape.dtype for shape in shapes_of(op)}
    return "fp32" in dtypes and not dtypes.isdisjoint(_LOW)


def _is_cast(op: OpStats) -> bool:
    shapes = shapes_of(op)
    if len(shapes) != 2 or shapes[0].sizes != shapes[1].sizes or len(shapes[0].sizes) != 2:
        return False
    # copy_(to, from); Inductor's kernels name their inputs first.
    to, source = reversed(shapes) if op.name.startswith("triton_") else shapes
    down, up = to.dtype in _LOW and source.dtype == "fp32", to.dtype == "fp32" and source.dtype in _LOW
    return up if op.phase == "backward" else down
