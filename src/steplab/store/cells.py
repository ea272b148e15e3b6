"""Keys of cells and studies: equal work has equal keys."""

import dataclasses
import hashlib
from typing import Any

import msgspec

from steplab.specs.step import STEP_FIELDS, StepSpec
from steplab.specs.study import Part, StudySpec


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
    return _short_hash("\n".join(sorted(study_keys(study))).encode())


def _beyond_defaults(value: Any) -> dict[str, object]:
    pairs = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return {
        field.name: _beyond_defaults(content) if dataclasses.is_dataclass(content) else content
        for field, content in pairs
        if content != field.default
    }


def _json(value: object) -> bytes:
    return msgspec.json.encode(value, order="sorted")


def _short_hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]
