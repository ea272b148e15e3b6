"""Files of TOML that come with steplab, each a preset by its name, or of the user's own."""

import tomllib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from steplab.errors import UserError
from steplab.unpacking import small_file

GRIDS, STUDIES = "attention_grids", "studies"
"""The folders of presets."""


def preset_names(folder: str) -> tuple[str, ...]:
    """Names of the presets in a folder of this package."""
    found = (files("steplab.specs") / folder).iterdir()
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in found if entry.name.endswith(".toml")))


def content_of(what: str, source: str, folder: str, hint: Callable[[str], str] = lambda text: "") -> dict[str, Any]:
    """The content of `source`, a preset in the folder or a file; `what` it is of, such as a study.

    Raises UserError for an unknown preset, and for a file that cannot be read or is not TOML, with the `hint` on its
    text.
    """
    names = preset_names(folder)
    if source in names:
        text = (files("steplab.specs") / folder / f"{source}.toml").read_text(encoding="utf-8")
    else:
        try:
            text = small_file(Path(source)).decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{what} {source} is not valid TOML: it is not text in UTF-8") from error
        except OSError as error:
            choice = f"choose one of {', '.join(names)}, or give the path of a TOML file"
            found = f"{source} cannot be read ({error.strerror})" if Path(source).exists() else f"no {what} '{source}'"
            raise UserError(f"{found}: {choice}") from error
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{what} {source} is not valid TOML: {error}{hint(text)}") from error
