"""Registers the commands and runs them; any error becomes one line on stderr and an exit code."""

import codecs
import difflib
import errno
import functools
import io
import math
import operator
import os
import shutil
import sys
import tokenize
import traceback
import warnings
from ast import literal_eval
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import cleandoc
from pathlib import Path
from typing import Any, get_args

import cyclopts
from cyclopts import App

from steplab import __version__
from steplab.cli import commands
from steplab.cli.ending import Ending
from steplab.errors import LeftOut, Remark, SteplabError, UserError
from steplab.printing import approximated, say
from steplab.units import listed

_MOST = 2**63 - 1
"""Largest whole number that the store, torch and random generators all accept."""


def as_meant(app: App, command: tuple[str, ...], arguments: cyclopts.ArgumentCollection) -> None:
    """Correct option values that cyclopts and shells would misread.

    cyclopts takes "none" and "null" for a missing option, and rounds fractions for whole numbers. No shell expands the
    ~ of `--store=~/runs.db`.

    Raises UserError for a fraction, an infinite number, NaN, or a whole number above 64 bits.
    """
    for argument in arguments:
        argument.hint = _without_none(argument.hint)
        if argument.hint is Path:
            argument.tokens = [token.evolve(value=os.path.expanduser(token.value)) for token in argument.tokens]
        for token in argument.tokens:
            if asked := _asked_instead(argument.hint, token.value):
                raise UserError(f"{token.keyword or argument.name} must be {asked}, not '{token.value}'")


def _without_none(hint: Any) -> Any:
    members = get_args(hint)
    if type(None) not in members:
        return hint
    return functools.reduce(operator.or_, (member for member in members if member is not type(None)))


def _asked_instead(hint: Any, text: str) -> str | None:
    """Requirement that a number violates; None if it violates none. cyclopts itself reports text that is no number."""
    try:
        if hint is int:
            return "a whole number" if "." in text else None if abs(int(text)) <= _MOST else "below 2^63"
        if hint is float:
            return None if math.isfinite(float(text)) else "a finite number"
    except ValueError:
        pass
    return None


_FREE_SPACE = "free some space, or set TMPDIR to a folder on another disk, and try again"
_NARROWEST = 20
"""Smallest width in columns to draw help in: rich never finishes `--help` in one or two."""
_MISSPELT = 0.8
"""Least similarity, from 0 to 1, at which this command's option is suggested for another's: --gpu for --gpus."""
_OF_THE_MACHINE = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EFBIG: _FREE_SPACE,
    errno.EROFS: "set TMPDIR to a folder that can be written",
    errno.EIO: "the disk fails",
    errno.EMFILE: "raise the limit of open files by `ulimit -n`",
    errno.ENFILE: "the machine has too many files open",
    errno.ENOMEM: "the memory is full",
    errno.EAGAIN: "the limit of processes is reached (`ulimit -u`)",
}


def docstring_of(file: Path) -> str:
    with tokenize.open(file) as lines:
        text: str = literal_eval(next(tokenize.generate_tokens(lines.readline)).string)
    return text


def unwrapped(docstring: str) -> str:
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in cleandoc(docstring).split("\n\n"))


app = App(
    name="steplab",
    help="A laboratory for the training step of Transformer language models: measure steps, store the records and "
    "report them.\n\nStart with: steplab run",
    version=__version__,
    config=as_meant,
    default_parameter=cyclopts.Parameter(negative=""),
    help_format="plaintext",  # the Markdown renderer alone would cost a fifth of the time `--help` takes
    result_action="return_value",
    suppress_keyboard_interrupt=False,  # main() reports it
)
for _file in sorted(Path(commands.__file__).parent.glob("[!_]*.py")):
    app.command(
        f"{commands.__name__}.{_file.stem}:{_file.stem}",  # imported when it is called
        name=_file.stem.strip("_").replace("_", "-"),
        help=unwrapped(docstring_of(_file)),
    )


def main(arguments: Sequence[str] | None = None, ending: Ending | None = None) -> int:
    """Run a command and return the exit code; every error is one line on stderr.

    `ending` knows the signal behind a KeyboardInterrupt.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    _open_what_is_closed()
    if shutil.get_terminal_size().columns < _NARROWEST:
        os.environ["COLUMNS"] = str(_NARROWEST)
    codecs.register_error("approximated", approximated)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="approximated")  # a terminal may not have every character
    try:
        for argument in given:
            if not argument.isprintable() and any(char == "\0" or "\ud800" <= char <= "\udfff" for char in argument):
                raise UserError(f"the argument {argument!r} is not valid text; use UTF-8")
        with _remarks_on_stderr(given):
            code = app(given, exit_on_error=False, print_error=False)
        sys.stdout.flush()
        return code or 0
    except cyclopts.CycloptsError as error:
        return _fail(_usage(error, given), UserError.exit_code, given)
    except SteplabError as error:
        if _is_told_elsewhere():
            return error.exit_code
        return _fail(str(error), error.exit_code, given)
    except KeyboardInterrupt as error:
        ending = ending or Ending()
        if not _is_told_elsewhere():
            say(_in_one_line(ending.words + (f"; {error}" if str(error) else "")))
        return ending.exit_code
    except BrokenPipeError:
        # Python would report an error again at exit for a pipe that its reader (`| head`) closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MemoryError:
        return _fail("not enough memory; choose a smaller step, or close other programs", 1, given)
    except Exception as error:
        if fault := _fault_of_the_machine(error):
            return _fail(fault, 1, given)
        # a defect in steplab
        return _fail(
            f"internal error: {type(error).__name__}: {error}; repeat with --debug for the traceback", 1, given
        )


def _open_what_is_closed() -> None:
    """Open /dev/null for each standard stream that the caller closed (`>&-`); otherwise the next opened file becomes
    it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))


def _fault_of_the_machine(error: Exception) -> str | None:
    if not isinstance(error, OSError):
        return None
    if "No usable temporary directory" in str(error):
        return f"no writable folder for temporary files; {_FREE_SPACE}"
    if error.errno not in _OF_THE_MACHINE:
        return None
    where = f": {error.filename}" if error.filename else ""
    return f"{error.strerror}{where}; {_OF_THE_MACHINE[error.errno]}"


@contextmanager
def _remarks_on_stderr(arguments: list[str]) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("always", Remark)
        usual, told = warnings.showwarning, set[str]()

        def show(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
            if isinstance(message, Remark):
                if str(message) in told:  # some reports read a store more than once
                    return
                told.add(str(message))
                if isinstance(message, LeftOut) and "--debug" in arguments:
                    traceback.print_exception(message.error)
                say(_in_one_line(str(message)))
            else:
                usual(message, category, *where, **more)  # type: ignore[arg-type]

        warnings.showwarning = show
        yield


def _is_told_elsewhere() -> bool:
    from steplab.lab.machine import is_first_rank

    try:
        return not is_first_rank()
    except UserError:
        return False


def _usage(error: cyclopts.CycloptsError, arguments: list[str]) -> str:
    if "-" in arguments:
        return "`-` is not a file here: only `steplab import -` reads stdin; omit --output to write to stdout"
    if isinstance(error, cyclopts.UnusedCliTokensError):
        unexpected = " ".join(error.unused_tokens or ())
        return f"unexpected argument '{unexpected}'; name the option, as in --model tiny; `--help` lists options"
    if isinstance(error, cyclopts.UnknownCommandError):
        return f"{error} `steplab --help` lists the commands; start with `steplab run`"
    if isinstance(error, cyclopts.UnknownOptionError):
        return _unknown_option(error)
    if not isinstance(error, cyclopts.MissingArgumentError):
        return str(error)
    # cyclopts reports a missing value as a missing option
    if error.argument is None or error.argument.tokens or error.keyword or error.unused_tokens:
        return str(error)
    command = " ".join(error.command_chain or ())
    return f"{command} needs {error.argument.name}; `steplab {command} --help` describes it"


def _unknown_option(error: cyclopts.UnknownOptionError) -> str:
    option = (error.token.keyword or error.token.value).partition("=")[0]
    others = [words for words, options in _commands(app) if option in options]
    if not others:
        return str(error)
    own = [name for argument in error.argument_collection for name in argument.names]
    near = difflib.get_close_matches(option, own, n=1, cutoff=_MISSPELT)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"Unknown option: {option}.{hint} {option} is an option of {listed(others)}."


def _commands(above: App, words: tuple[str, ...] = ()) -> Iterator[tuple[str, set[str]]]:
    for name in above:
        one, path = above[name], (*words, name)
        if one.default_command is None:
            yield from _commands(one, path)
        elif not name.startswith("-"):
            arguments = one.assemble_argument_collection(default_parameter=app.default_parameter)
            yield " ".join(path), {name for argument in arguments for name in argument.names}


def _fail(message: str, code: int, arguments: list[str]) -> int:
    if "--debug" in arguments:
        traceback.print_exc()
    say(_in_one_line(message))
    return code


def _in_one_line(message: str) -> str:
    return f"steplab: {' '.join(message.split())}"
