"""What a terminal can show: its width, colour, and rich's drawing turned into a string."""

import os
import re
import shutil
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

_PIPED_WIDTH = 120
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def terminal_width() -> int:
    """Columns to fill: COLUMNS if it is set, else the terminal's own width, else 120 (a pipe has none)."""
    return shutil.get_terminal_size((_PIPED_WIDTH, 24)).columns


def plain(text: str) -> str:
    """Text from a record without what would steer the terminal: escape sequences and control characters."""
    return _CONTROL.sub("", text)


def wants_color(stream: IO[str]) -> bool:
    """Whether to colour what goes to `stream`: a terminal, not a dumb one, and no NO_COLOR."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def draw(*parts: "RenderableType", width: int, color: bool) -> str:
    """The parts one under the other, as text without trailing blanks; with ANSI colour only if asked.

    The console is given everything it would otherwise look up in the process's environment, so that the
    same record always gives the same text.
    """
    import io

    from rich.console import Console

    target = io.StringIO()
    console = Console(
        file=target,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        highlight=False,
        emoji=False,
        markup=False,
        legacy_windows=False,
        _environ={},
    )
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines())
