"""Tune flash_triton's tiles for the GPU at hand: measure candidates, choose, and write the table that kernels read."""

import dataclasses
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from steplab.errors import UserError
from steplab.measurement.launch import tuning_in_child
from steplab.measurement.progress import OnProgress
from steplab.records.attention_tuning import AttentionTuning, ChosenTiles
from steplab.specs.attention_tuning import KERNELS, TunedKernel, TuningStudy

SHORT_UP_TO = 2048
"""Tokens for which what was fastest at the shorter of both lengths holds, where it differs: up to about their geometric
mean."""
TOLERATED = 1.02
"""A candidate this close to the fastest at both lengths saves a second row."""
_FIELDS = ("kernel", "gpu", "bits", "box", "tokens", "variant", "queries", "keys", "stages", "warps")
_USUAL = {"tokens": None, "warps": 4}
"""Values that a row does not spell out."""
_Row = Mapping[str, object]


def tune_attention(study: TuningStudy, *, on_progress: OnProgress = lambda progress: None) -> AttentionTuning:
    """Measure the candidates and choose. Raises UserError where there is no GPU for it."""
    return with_choice(tuning_in_child(study, on_progress))


def with_choice(tuning: AttentionTuning) -> AttentionTuning:
    """The same with the rows for its GPU: for each kernel and box one, or two where short sequences want another."""
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
    """The table that the kernels read."""
    return Path(str(files("steplab") / "ops" / "attention" / "triton_tiles.toml"))


def table_before(path: Path) -> str:
    """The table to be changed: the one at `path`, or where nothing is, the package's.

    Raises UserError if what is there is none.
    """
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else packaged_table().read_text(encoding="utf-8")
        rows = tomllib.loads(text).get("tiles")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} is no table of tiles: {error}; name a file that does not exist yet") from error
    named = {"kernel", "gpu", "box"}
    if not isinstance(rows, list) or not all(isinstance(row, dict) and named <= set(row) for row in rows):
        raise UserError(f"{path} is no table of tiles: it lacks [[tiles]] with kernel, gpu and box")
    return text


def table_with(tuning: AttentionTuning, before: str) -> str:
    """The table with the tuning's rows in place of those it had for this GPU, kernel, type and box."""
    new = rows_of(tuning)
    tuned = {_of_what(row) for row in new}
    kept = [row for row in tomllib.loads(before).get("tiles", []) if _of_what(row) not in tuned]
    head = [line for line in before.partition("[[tiles]]")[0].splitlines() if line.startswith("#")]
    return "\n".join([*head, "", rows_text([*kept, *new])])


def rows_of(tuning: AttentionTuning) -> list[_Row]:
    """The chosen tiles as rows of the table."""
    return [{**chosen.candidate.row(), "gpu": tuning.gpu, "tokens": chosen.tokens} for chosen in tuning.chosen]


def rows_text(rows: Sequence[_Row]) -> str:
    """Rows in TOML, in the order of the table's fields; what is as usual is left out."""
    return "\n".join(
        "\n".join(["[[tiles]]", *(f"{name} = {_toml(row[name])}" for name in _FIELDS if _is_told(row, name)), ""])
        for row in rows
    )


def _is_told(row: _Row, name: str) -> bool:
    return name in row and not (name in _USUAL and row[name] == _USUAL[name])


def _toml(value: object) -> str:
    """JSON's texts, numbers and truth values are TOML's too."""
    return json.dumps(value, ensure_ascii=False)


def _of_what(row: _Row) -> tuple[object, ...]:
    return row["gpu"], row["kernel"], row.get("bits"), row["box"]
