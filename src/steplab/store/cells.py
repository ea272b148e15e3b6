"""The identity of a cell and of a study: the same work has the same key, whoever asks for it, and when."""

import dataclasses
import hashlib
from typing import Any

import msgspec

from steplab.specs.step import STEP_FIELDS, StepSpec
from steplab.specs.study import StudySpec

_FIELDS_OF_FORMAT_1 = (
    *("model", "batch", "context", "pass_name", "precision", "compile", "attention", "checkpointing", "optimizer"),
    *("warmup", "steps", "seed", "device"),
)
_OF_SEVERAL_PROCESSES = (
    *("layout", "data_parallel", "bucket_size_mb", "reshard_after_forward", "pipeline_schedule", "microbatches"),
)


def cell_key(spec: StepSpec) -> str:
    """Sixteen hexadecimal digits of the SHA-256 over what the spec says beyond the defaults.

    Canonical JSON, sorted by name. A field that has its default, or that is refused for such a step because it changes
    nothing of it, does not count: so a new field leaves the keys of all cells as they are that do not use it.
    """
    unused = {field.attribute for field in STEP_FIELDS if field.unused(spec)}
    return _short_hash(_json({name: value for name, value in _beyond_defaults(spec).items() if name not in unused}))


def study_fingerprint(study: StudySpec) -> str:
    """The same over the study's cells; neither their order nor the study's name matters."""
    return _fingerprint([cell_key(cell) for cell in study.cells])


def fingerprint_of_format_1(study: StudySpec) -> str | None:
    """What a store of format 1 called the study; None where it cannot hold it, because a cell uses a newer field."""
    keys = [_key_of_format_1(cell) for cell in study.cells]
    return _fingerprint([key for key in keys if key]) if all(keys) else None


def _key_of_format_1(spec: StepSpec) -> str | None:
    """The key as it was while every field counted, whatever its value."""
    fields = _FIELDS_OF_FORMAT_1 + (_OF_SEVERAL_PROCESSES if spec.layout.world_size > 1 else ())
    known = {*_FIELDS_OF_FORMAT_1, *_OF_SEVERAL_PROCESSES}
    if _beyond_defaults(spec).keys() - known:
        return None
    return _short_hash(_json({name: msgspec.to_builtins(getattr(spec, name)) for name in fields}))


def _beyond_defaults(value: Any) -> dict[str, object]:
    """The fields of a dataclass that differ from their defaults, and those that have none."""
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
