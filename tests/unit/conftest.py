"""What the tests that measure in their own process need."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def torch_settings_put_back() -> Iterator[None]:
    """Measuring sets torch's process-wide options, for a process of its own: here they are put back."""
    import torch

    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = cudnn


@pytest.fixture(scope="module")
def earlier_tests_left_no_garbage() -> None:
    """Collect it, and have what is there now stay: where earlier tests left much, each search took half a second."""
    gc.collect()
    gc.freeze()
