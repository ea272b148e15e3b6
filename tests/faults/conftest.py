import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", folder], capture_output=True, check=False)
    if mount.returncode != 0:
        pytest.skip("only root mounts a small disk")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
