"""Without a CUDA GPU these modules are not imported, which takes each test process seconds."""

from pathlib import Path
from typing import NoReturn

import pytest
import torch


class Skipped(pytest.File):
    def collect(self) -> NoReturn:
        pytest.skip("no CUDA GPU")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.File | None:
    return None if torch.cuda.is_available() else Skipped.from_parent(parent, path=module_path)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker("gpu")
