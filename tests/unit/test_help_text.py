import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from steplab.cli import commands
from steplab.cli.app import app, docstring_of, unwrapped
from steplab.cli.commands.history import ChosenSteps
from steplab.specs.step import FIELDS

FILES = sorted(Path(commands.__file__).parent.glob("[!_]*.py"))


def test_a_paragraph_is_one_line() -> None:
    assert unwrapped("Summary.\n\n    A line\n    and its end.\n\n    For example: one\n") == (
        "Summary.\n\nA line and its end.\n\nFor example: one"
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_file_is_a_command_with_its_docstring_for_help(file: Path) -> None:
    module = import_module(f"steplab.cli.commands.{file.stem}")
    assert docstring_of(file) == module.__doc__
    command = app[file.stem.strip("_").replace("_", "-")]
    assert command.help == unwrapped(module.__doc__)
    function = getattr(module, file.stem)
    assert command is function or command.default_command is function


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_command_has_an_example_of_options_that_it_takes(file: Path) -> None:
    examples = re.findall(r": steplab ([^\n]+)$", unwrapped(docstring_of(file)), flags=re.MULTILINE)
    assert examples, "write `For example: steplab …` into the docstring"
    for example in map(shlex.split, examples):
        assert example[0] == file.stem.strip("_").replace("_", "-")
        app.parse_args(example, exit_on_error=False, print_error=False)


def test_options_that_choose_records_name_no_default() -> None:
    """Otherwise only runs with the default value are chosen."""
    chosen = [option.__metadata__[0].help for option in ChosenSteps.__annotations__.values()]
    assert len(chosen) == len(FIELDS)
    assert not [text for text in chosen if "[default" in text]
    assert FIELDS["model"].help == f"{FIELDS['model'].meaning} [default: tiny]"
