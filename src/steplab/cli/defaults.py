"""Defaults of options from a file of the user's: steplab.toml, or [tool.steplab] of pyproject.toml."""

import difflib
import os
import stat
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from cyclopts import App, ArgumentCollection
from cyclopts.config import Dict

from steplab.errors import Remark, UserError, warn_caller
from steplab.unpacking import small_file

FILE = "steplab.toml"
_ROOT = 0
_OF_ONE_CALL = ("output", "force")
"""Options that a file cannot give: one output would replace that of another command."""


def defaults_from_file(app: App, command: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Give the options of a command, where the command line has not, the values of the nearest file.

    A table has the options of the command of its name ([run], [plan.memory]); above the tables stand options of the
    store and the output, for all commands. A path of a store is relative to the file. Raises UserError for a file that
    is not TOML and for a table that is no command's, and CycloptsError for an option that the command does not have.
    """
    found = _nearest(Path.cwd())
    if found is None or not command:
        return
    path, content = found
    own = content
    for name, above in zip(command, app.app_stack.current_frame, strict=False):
        _check(path, own, above, _shared() if own is content else ())
        own = own.get(name, {})
    for name in _OF_ONE_CALL:
        if name in own:
            raise UserError(f"{path}: '{name}' is of one call; leave it out, and give --{name} on the command line")
    common = {name: content[name] for name in _shared() if name in content}
    for options, of_all in ((own, False), (common, True)):
        nested: dict[str, Any] = {**options}
        if "store" in nested:
            nested["store"] = str(path.parent / os.path.expanduser(str(nested["store"])))
        for name in reversed(command):
            nested = {name: nested}
        Dict(nested, source=str(path), allow_unknown=of_all)(app, command, arguments)


def _check(path: Path, content: Mapping[str, Any], app: App, options: Collection[str]) -> None:
    """Raise UserError if something beside these options is not a table of a command of this app."""
    for name, value in content.items():
        if isinstance(value, Mapping) and name not in app:
            near = difflib.get_close_matches(name, list(app), n=1)
            hint = f"did you mean [{near[0]}]?" if near else "`steplab --help` lists the commands"
            raise UserError(f"{path} has a table [{name}], and there is no such command; {hint}")
        if not isinstance(value, Mapping) and name not in options:
            may = f"only {', '.join(_shared())} may stand above the tables; " if options else ""
            raise UserError(f"{path}: '{name}' is in no command's table; {may}put it into one, such as [run]")


def _shared() -> tuple[str, ...]:
    """The options that may stand above the tables."""
    from steplab.cli.options import OutputOptions

    return tuple(field.name for field in fields(OutputOptions) if field.name not in _OF_ONE_CALL)


def _nearest(folder: Path) -> tuple[Path, Mapping[str, Any]] | None:
    """The file in this folder or the nearest one above it, with what it says; None: there is none.

    One that may be anyone's, as in /tmp, is passed over with a Remark: a file can name a function to run.
    """
    for place in (folder, *folder.parents):
        own, project = place / FILE, place / "pyproject.toml"
        if own.is_file() and not _is_anyones(own):
            return own, _read(own)
        if project.is_file():
            content = _read(project).get("tool", {}).get("steplab")
            if isinstance(content, Mapping) and not _is_anyones(project):
                return project, content
    return None


def _is_anyones(file: Path) -> bool:
    """Whether another user put the file into a folder in which all users may make files."""
    if not file.parent.stat().st_mode & stat.S_IWOTH or file.stat().st_uid in (_ROOT, os.getuid()):
        return False
    warn_caller(Remark(f"{file} is not read: it is another user's, in a folder that all may write to"))
    return True


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(small_file(path).decode())
    except (OSError, UnicodeDecodeError, RecursionError, tomllib.TOMLDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"cannot read {path}: {why}") from error
