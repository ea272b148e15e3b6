"""Keys of cells and studies: equal work has equal keys."""

import dataclasses
import hashlib
from typing import Any

import msgspec

from steplab.specs.step import STEP_FIELDS, StepSpec
from steplab.specs.study import Part, StudySpec

_FIELDS_OF_FORMAT_1 = (
    *("model", "batch", "context", "pass_name", "precision", "compile", "attention", "checkpointing", "optimizer"),
    *("warmup", "steps", "seed", "device"),
)
_OF_SEVERAL_PROCESSES = (
    *("layout", "data_parallel", "bucket_size_mb", "reshard_after_forward", "pipeline_schedule", "microbatches"),
)
_SIZES_OF_FORMAT_1 = ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads")


def cell_key(spec: StepSpec) -> str:
    """Sixteen hexadecimal digits of the SHA-256 of the spec's non-default fields, as canonical JSON sorted by name.

    Defaults and fields refused for the step are left out, so a new field changes no other cell's key.
    """
    unused = {field.attribute for field in STEP_FIELDS if field.unused(spec)}
    return _short_hash(_json({name: value for name, value in _beyond_defaults(spec).items() if name not in unused}))


def part_key(part: Part) -> str:
    """Key of a further measurement: its command, with its step's key or its options' hash."""
    return f"{part.kind}:{cell_key(part.step) if part.step else _short_hash(_json(part.options))}"


def study_keys(study: StudySpec) -> list[str]:
    return [*map(cell_key, study.cells), *map(part_key, study.parts)]


def study_fingerprint(study: StudySpec) -> str:
    """Key of a study over all measurements, without order and name."""
    return _fingerprint(study_keys(study))


def fingerprint_of_format_1(study: StudySpec) -> str | None:
    """The study's fingerprint in format 1; None if a cell uses a newer field."""
    keys = [_key_of_format_1(cell) for cell in study.cells]
    return _fingerprint([key for key in keys if key]) if all(keys) and not study.parts else None


def _key_of_format_1(spec: StepSpec) -> str | None:
    fields = _FIELDS_OF_FORMAT_1 + (_OF_SEVERAL_PROCESSES if spec.layout.world_size > 1 else ())
    known = {*_FIELDS_OF_FORMAT_1, *_OF_SEVERAL_PROCESSES}
    shape = spec.model.shape
    newer_parts = shape is not None and _beyond_defaults(shape).keys() - set(_SIZES_OF_FORMAT_1)
    if _beyond_defaults(spec).keys() - known or newer_parts:
        return None
    values = {name: msgspec.to_builtins(getattr(spec, name)) for name in fields}
    if shape is not None:
        values["model"]["shape"] = {name: getattr(shape, name) for name in _SIZES_OF_FORMAT_1}
    return _short_hash(_json(values))


def _beyond_defaults(value: Any) -> dict[str, object]:
    pairs = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return {
        field.name: _beyond_defaults(content) if dataclasses.is_dataclass(content) else content
        for field, content in pairs
        if content != field.default
    }


def _json(value: object) -> bytes:
    return msgspec.json.encode(value, order="sorted")


def _fingerprint(keys: list[str]) -> str:
    return _short_hash("\n".join(sorted(keys)).encode())


def _short_hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]
