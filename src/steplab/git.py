"""Runs git in the working folder without running programs that its repository names.

An untrusted repository can name file monitors, hooks, content filters and fetchers. Filters that the user or the system
configured still run; monitors, hooks and fetchers never do.
"""

import os
import subprocess
from collections.abc import Sequence

_SAFE = ("core.fsmonitor=false", f"core.hooksPath={os.devnull}", "safe.bareRepository=explicit")
_VARIABLES = {"GIT_ALLOW_PROTOCOL": "", "GIT_NO_LAZY_FETCH": "1", "GIT_OPTIONAL_LOCKS": "0"}
"""Environment that keeps git from fetching, even a version without GIT_NO_LAZY_FETCH, and from writing."""
_NO_SUCH_SETTING = 1
"""Exit code of `git config` if no setting matches."""


def git(*arguments: str, timeout_s: float | None = 5.0) -> str:
    """Run git and return its stdout, stripped. Raises OSError if git cannot start, subprocess.SubprocessError if it
    fails.
    """
    filters = _run(["config", "--show-scope", "--includes", "--name-only", "--get-regexp", r"^filter\."], timeout_s)
    if filters.returncode != _NO_SUCH_SETTING:
        filters.check_returncode()
    scoped = (line.partition("\t") for line in filters.stdout.splitlines())
    emptied = [f"{name}=" for scope, _, name in scoped if scope in ("local", "worktree")]
    if any(name.index("=") < len(name) - 1 for name in emptied):  # git would cut such a name
        raise subprocess.CalledProcessError(1, "git", stderr="a filter of the repository has a name with '='")
    done = _run(arguments, timeout_s, emptied)
    done.check_returncode()
    return done.stdout.strip()


def _run(
    arguments: Sequence[str], timeout_s: float | None, settings: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    given = [word for setting in (*_SAFE, *settings) for word in ("-c", setting)]
    return subprocess.run(
        ["git", *given, *arguments],
        env=os.environ | _VARIABLES,
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
        timeout=timeout_s,
        check=False,
    )
