"""A git revision of the user's code as surroundings of a measuring process."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from steplab.errors import UserError
from steplab.measurement.processes.conversation import Surroundings
from steplab.measurement.processes.scratch import scratch_folder


@contextmanager
def checked_out(revision: str) -> Iterator[Surroundings]:
    """A worktree of a revision of the repository around the working folder, which is removed at the end.

    Its processes work in the same folder of the repository as this one, and import what this one imports from the
    repository from the worktree instead: a user's model, and steplab itself where it is the repository's. Files that
    git does not track are not there. Raises UserError outside of a repository, and for an unknown revision.
    """
    here = Path.cwd().resolve()
    root = Path(_git("rev-parse", "--show-toplevel", otherwise="--against needs a git repository")).resolve()
    commit = _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", otherwise=f"no revision '{revision}'")
    with scratch_folder() as scratch:
        tree = scratch.path.resolve() / "tree"
        try:
            _git("-c", f"core.hooksPath={os.devnull}", "worktree", "add", "--quiet", "--detach", str(tree), commit)
            folder = tree / here.relative_to(root)
            if not folder.is_dir():
                raise UserError(f"revision {revision} has no folder {here.relative_to(root)}; run from one that it has")
            yield Surroundings(folder=folder, environment=os.environ | {"PYTHONPATH": _import_path(root, tree)})
        finally:
            with suppress(UserError):  # git has not added it, or will forget it once its folder is gone
                _git("worktree", "remove", "--force", str(tree))


def _import_path(root: Path, tree: Path) -> str:
    """PYTHONPATH with the repository's entries in the worktree, and those of `sys.path` that are in the repository.

    An editable installation adds such an entry, which would otherwise be found in the repository.
    """
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    found = []
    for entry in dict.fromkeys([*given, *sys.path]):
        path = Path(entry).resolve()
        if path.is_relative_to(root) and not _is_installed(path):
            found.append(str(tree / path.relative_to(root)))
        elif entry in given:
            found.append(entry)
    return os.pathsep.join(dict.fromkeys(found))


def _is_installed(path: Path) -> bool:
    """Whether it belongs to Python or to a virtual environment, which a repository may contain."""
    return any(path.is_relative_to(Path(prefix).resolve()) for prefix in {sys.prefix, sys.base_prefix})


def _git(*arguments: str, otherwise: str = "") -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, encoding="utf-8", errors="replace", check=False)
    except FileNotFoundError:
        raise UserError("--against needs git, which is not installed") from None
    if done.returncode:
        raise UserError(otherwise or f"git {arguments[0]} failed: {' '.join(done.stderr.split())}")
    return done.stdout.strip()
