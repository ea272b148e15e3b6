"""The identity of a cell and of a study: the same work has the same key, whoever asks for it, and when."""

import hashlib

import msgspec

from steplab.specs.step import StepSpec
from steplab.specs.study import StudySpec

_OF_SEVERAL_PROCESSES = (
    "layout",
    "data_parallel",
    "bucket_size_mb",
    "reshard_after_forward",
    "pipeline_schedule",
    "microbatches",
)


def cell_key(spec: StepSpec) -> str:
    """Sixteen hexadecimal digits of the SHA-256 over the spec's canonical JSON (fields sorted by name)."""
    fields = msgspec.to_builtins(spec)
    if spec.layout.world_size == 1:  # as it was before there were several processes, so that keys in stores stay true
        for name in _OF_SEVERAL_PROCESSES:
            del fields[name]
    return _short_hash(msgspec.json.encode(fields, order="sorted"))


def study_fingerprint(study: StudySpec) -> str:
    """The same over the study's cells; neither their order nor the study's name matters."""
    return _short_hash("\n".join(sorted(cell_key(cell) for cell in study.cells)).encode())


def _short_hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]
