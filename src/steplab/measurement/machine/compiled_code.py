"""Where torch.compile keeps the code that it makes, and later runs."""

import os
from collections.abc import MutableMapping
from pathlib import Path

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_compiled_code_private(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have torch.compile keep its code in the user's cache folder, unless its variable names another one.

    Its default is /tmp/torchinductor_USER: anyone on the machine may make that folder first, and torch then runs what
    they put there. Without a home folder the default stays.
    """
    cache = Path(environment.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        try:
            cache = Path.home() / ".cache"
        except RuntimeError:
            return
    environment.setdefault(_VARIABLE, str(cache / "steplab" / "torchinductor"))
