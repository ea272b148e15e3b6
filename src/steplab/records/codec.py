"""Encode and decode records as JSON, including other versions' records.

Unknown fields are ignored, so an older steplab reads newer records of its major format. A newer major format is
refused: its fields may have other meanings.
"""

import secrets
from datetime import UTC, datetime
from typing import TypedDict

import msgspec

from steplab import __version__
from steplab.errors import SteplabError
from steplab.records.record import Record
from steplab.records.registry import KINDS, summary_row

_TYPES = {kind.schema: kind.type for kind in KINDS.values()}


def new_id() -> str:
    return secrets.token_hex(6)


def now_utc() -> str:
    """Current time in records' format: 2026-11-21T07:30:00Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Head(TypedDict):
    id: str
    created_utc: str
    steplab_version: str


def new_head() -> Head:
    return {"id": new_id(), "created_utc": now_utc(), "steplab_version": __version__}


def encode(record: object) -> bytes:
    return msgspec.json.encode(record)


def encode_with_summary(record: Record) -> bytes:
    """JSON of a record, with its row of figures (registry.summary_row) under `summary` for jq and others; readers
    ignore it.
    """
    return encode(record)[:-1] + b',"summary":' + encode(summary_row(record)) + b"}"


class UnknownFormat(SteplabError):
    pass


class _Head(msgspec.Struct):
    schema: str


def decode(text: bytes | str) -> Record:
    """Decode a line of JSON. Raises UnknownFormat for a newer major format, SteplabError for anything else."""
    try:
        schema = msgspec.json.decode(text, type=_Head).schema
        record_type = _TYPES.get(schema)
        if record_type is None:
            kind_of_error = UnknownFormat if schema.startswith("steplab.") else SteplabError
            raise kind_of_error(_refusal(schema))
        return msgspec.json.decode(text, type=record_type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise SteplabError(f"not a steplab record: {error}") from error


def _refusal(schema: str) -> str:
    kind, _, major = schema.partition("/")
    is_number = major.isascii() and major.isdecimal() and len(major) < 10
    for known in _TYPES:
        known_kind, _, known_major = known.partition("/")
        if kind == known_kind and is_number and int(major) > int(known_major):
            return f"the record has format {schema}, newer than the {known} this version reads; upgrade steplab"
    return f"{schema[:64]!a} is not a record format of steplab's"
