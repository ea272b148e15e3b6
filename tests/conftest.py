"""Property tests draw the same examples everywhere, so a failure belongs to the change. Search new ones by: pytest
--hypothesis-profile=search
"""

import gc
import os
import sys
import tempfile
from pathlib import Path

if "PYTEST_XDIST_WORKER" not in os.environ:  # traces of models, by commands and all test processes
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="steplab-cache-")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch comes: the parallel test processes share few cores

import pytest
import torch
from hypothesis import settings
from tests.interpreted import cast_to_fp8_as_a_gpu_does, prepare_the_language_once_a_launch

sys.dont_write_bytecode = False  # else each test process compiles all tests
gc.disable()  # until the tests are collected: modules make much that stays
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton comes, which reads it once

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=40)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--approve", action="store_true", help="write what the commands print to tests/approved")


def pytest_configure(config: pytest.Config) -> None:
    """Each of three test processes begins at other files, and compiles these for the others."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker in ("gw1", "gw2") and config.args == config.getini("testpaths"):
        files = sorted(map(str, Path(__file__).parent.rglob("test_*.py")))
        third = len(files) // 3
        config.args = files[::-1] if worker == "gw1" else files[third:] + files[:third]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path)


def pytest_collection_finish() -> None:
    """Freezes present objects, so later garbage searches skip them."""
    if interpreter := sys.modules.get("triton.runtime.interpreter"):
        prepare_the_language_once_a_launch(interpreter)
        cast_to_fp8_as_a_gpu_does(interpreter)
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # a dry run makes many objects, and hardly any garbage
    gc.enable()
