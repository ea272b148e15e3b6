"""Defaults of options from the nearest steplab.toml."""

import difflib
import os
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cyclopts import App, ArgumentCollection
from cyclopts.config import Dict

from steplab.errors import Remark, UserError, warn_caller
from steplab.unpacking import small_file

FILE = "steplab.toml"
_ROOT = 0
_STORE = "store"
"""The only option allowed above the tables; its path is relative to the file."""
_OF_ONE_CALL = ("output", "force")
"""Options that a file cannot set: one output would replace another command's."""


def defaults_from_file(app: App, command: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Fill options that the command line left out from the nearest file.

    A command's options are in the table of its name ([run], [plan.memory]). Raises UserError for invalid TOML or an
    unknown table, CycloptsError for an unknown option.
    """
    here = Path.cwd()
    files = (folder / FILE for folder in (here, *here.parents))
    path = next((file for file in files if _is_for_us(file)), None)
    if path is None or not command:
        return
    content = _read(path)
    options, above_the_tables = content, True
    for name, above in zip(command, app.app_stack.current_frame, strict=False):
        _check(path, options, above, above_the_tables)
        options, above_the_tables = options.get(name, {}), False
    for name in _OF_ONE_CALL:
        if name in options:
            raise UserError(f"{path}: '{name}' cannot be set in a file; pass --{name}")
    if _STORE in content and any(f"--{_STORE}" in argument.names for argument in arguments):
        options = {_STORE: content[_STORE]} | options
    if _STORE in options:
        options = options | {_STORE: str(path.parent / os.path.expanduser(str(options[_STORE])))}
    for name in reversed(command):
        options = {name: options}
    Dict(options, source=str(path))(app, command, arguments)


def _check(path: Path, content: Mapping[str, Any], app: App, above_the_tables: bool) -> None:
    """Raise UserError for an unknown table, and for any option but the store above the tables."""
    for name, value in content.items():
        if isinstance(value, Mapping) and name not in app:
            near = difflib.get_close_matches(name, list(app), n=1)
            hint = f"did you mean [{near[0]}]?" if near else "`steplab --help` lists the commands"
            raise UserError(f"{path}: [{name}] is not a command; {hint}")
        if not isinstance(value, Mapping) and not (above_the_tables and name == _STORE):
            raise UserError(
                f"{path}: '{name}' is in no command's table; move it into one, such as [run] (only {_STORE} may be "
                "above the tables)"
            )


def _is_for_us(file: Path) -> bool:
    """True for a file that may be trusted: it can name a function to run. In a folder that all users may write to, such
    as /tmp, another user's file is refused.
    """
    try:
        found = file.lstat()
    except OSError:
        return False
    if not file.parent.stat().st_mode & stat.S_IWOTH or found.st_uid in (_ROOT, os.getuid()):
        return file.is_file()
    warn_caller(Remark(f"{file} is ignored: another user owns it, in a world-writable folder"))
    return False


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(small_file(path).decode())
    except (OSError, UnicodeDecodeError, RecursionError, tomllib.TOMLDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"cannot read {path}: {why}") from error
