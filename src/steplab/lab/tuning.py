"""Tune flash_triton's tiles for this machine's GPU: measure candidates, choose, and write the table of tiles."""

import dataclasses
import json
import os.path
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from steplab.errors import UserError
from steplab.measurement.processes.launch import tuning_in_child
from steplab.measurement.progress import OnProgress
from steplab.records.attention_tuning import AttentionTuning, ChosenTiles
from steplab.specs.attention_tuning import KERNELS, TunedKernel, TuningStudy
from steplab.unpacking import small_file

SHORT_UP_TO = 2048
"""Longest sequence in tokens that uses the choice for short sequences, where the two choices differ: about the
geometric mean of the two timed lengths."""
TOLERATED = 1.02
"""Largest slowdown, at both lengths, of a candidate that is chosen for all lengths in place of two rows."""
_FIELDS = ("kernel", "gpu", "bits", "box", "tokens", "variant", "queries", "keys", "stages", "warps")
_USUAL = {"tokens": None, "warps": 4}
"""Default values, which a row of the table leaves out."""
_Row = Mapping[str, object]


def tune_attention(study: TuningStudy, *, on_progress: OnProgress = lambda progress: None) -> AttentionTuning:
    """Measure the candidates and choose. Raises UserError without a suitable GPU."""
    return with_choice(tuning_in_child(study, on_progress))


def with_choice(tuning: AttentionTuning) -> AttentionTuning:
    """The tuning with the rows for its GPU: for each kernel and tile width one row, or two if short sequences need
    other tiles."""
    rows = [row for box in tuning.boxes for kernel in KERNELS for row in _choice(tuning, kernel, box)]
    return dataclasses.replace(tuning, chosen=tuple(rows))


def _choice(tuning: AttentionTuning, kernel: TunedKernel, box: int) -> Iterator[ChosenTiles]:
    short, long = (tuning.slowdowns(kernel, box, tokens) for tokens in tuning.study.lengths)
    if not short or not long:
        return  # nothing ran: the table's rows for other GPUs hold
    fastest = [min(found, key=lambda candidate: found[candidate]) for found in (short, long)]
    limits = [TOLERATED * found[best] for found, best in zip((short, long), fastest, strict=True)]
    good = [c for c in long if short[c] <= limits[0] and long[c] <= limits[1]]
    if good:
        yield ChosenTiles(candidate=min(good, key=lambda candidate: short[candidate] * long[candidate]))
    else:
        yield ChosenTiles(candidate=fastest[0], tokens=SHORT_UP_TO)
        yield ChosenTiles(candidate=fastest[1])


def packaged_table() -> Path:
    """Path of the table that the kernels read."""
    return Path(str(files("steplab") / "ops" / "attention" / "triton_tiles.toml"))


def table_before(path: Path) -> str:
    """Text of the table to change: the one at `path`, or the package's if there is no file.

    Raises UserError if the file is not a table of tiles.
    """
    try:
        text = small_file(path if os.path.exists(path) else packaged_table()).decode()
        rows = tomllib.loads(text).get("tiles")
    except (OSError, UnicodeDecodeError, RecursionError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} is not a table of tiles: {error}; name a file that does not exist yet") from error
    named = {"kernel", "gpu", "box"}
    if not isinstance(rows, list) or not all(isinstance(row, dict) and named <= set(row) for row in rows):
        raise UserError(
            f"{path} is not a table of tiles: it lacks [[tiles]] with kernel, gpu and box; "
            "name a file that does not exist yet"
        )
    return text


def table_with(tuning: AttentionTuning, before: str) -> str:
    """The table with the tuning's rows in place of the rows for the same GPU, kernel, number size and tile width."""
    new = rows_of(tuning)
    tuned = {_of_what(row) for row in new}
    kept = [row for row in tomllib.loads(before).get("tiles", []) if _of_what(row) not in tuned]
    head = [line for line in before.partition("[[tiles]]")[0].splitlines() if line.startswith("#")]
    return "\n".join([*head, "", rows_text([*kept, *new])])


def rows_of(tuning: AttentionTuning) -> list[_Row]:
    """The chosen tiles as rows of the table."""
    return [{**chosen.candidate.row(), "gpu": tuning.gpu, "tokens": chosen.tokens} for chosen in tuning.chosen]


def rows_text(rows: Sequence[_Row]) -> str:
    """Rows in TOML, with fields in the table's order; default values are left out."""
    return "\n".join(
        "\n".join(["[[tiles]]", *(f"{name} = {_toml(row[name])}" for name in _FIELDS if _is_told(row, name)), ""])
        for row in rows
    )


def _is_told(row: _Row, name: str) -> bool:
    return name in row and not (name in _USUAL and row[name] == _USUAL[name])


def _toml(value: object) -> str:
    """The value in TOML, whose texts, numbers and truth values are written as in JSON."""
    return json.dumps(value, ensure_ascii=False)


def _of_what(row: _Row) -> tuple[object, ...]:
    return row["gpu"], row["kernel"], row.get("bits"), row["box"]
