"""Property tests draw the same examples everywhere, so that a run says something of the change it is for.

To look for new ones: pytest --hypothesis-profile=search
"""

import gc
import os
import sys
import tempfile
from pathlib import Path

os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="steplab-cache-")  # traces of models, by commands and tests
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch comes: the parallel test processes share few cores

import pytest
import torch
from hypothesis import settings
from tests.interpreted import cast_to_fp8_as_a_gpu_does, prepare_the_language_once_a_launch

gc.disable()  # until the tests are collected: modules make much that stays
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton comes, which reads it once

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=40)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--approve", action="store_true", help="write what the commands print to tests/approved")


def pytest_configure(config: pytest.Config) -> None:
    """Have the second of the parallel test processes import the test files in reverse order.

    Each process imports all of them, so each finds half of them compiled by the other.
    """
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw1" and config.args == config.getini("testpaths"):
        config.args = sorted(map(str, Path(__file__).parent.rglob("test_*.py")), reverse=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They agree on the order of what they collected."""
    items.sort(key=lambda item: item.path)


def pytest_collection_finish() -> None:
    """What is there by now stays: no search for garbage during a test has to look at it again."""
    if interpreter := sys.modules.get("triton.runtime.interpreter"):
        prepare_the_language_once_a_launch(interpreter)
        cast_to_fp8_as_a_gpu_does(interpreter)
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # a dry run makes many objects, and hardly any garbage
    gc.enable()
