import gc
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import msgspec
import pytest

from steplab.costs.rates import HostRates


@pytest.fixture
def torch_settings_put_back() -> Iterator[None]:
    import torch

    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = cudnn


@pytest.fixture(scope="module")
def earlier_tests_left_no_garbage() -> None:
    """Collect and freeze: searches took half a second after leaky tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def _predictions() -> dict[str, Callable[..., Any]]:
    from steplab.lab import outlook

    return {name: _kept(getattr(outlook, name)) for name in ("predict_memory", "predict_step_time")}


_PACES = HostRates.paces


def _without_triton(rates: HostRates, launcher: str) -> tuple[float, float]:
    return _PACES(rates, "compiled" if launcher == "triton" else launcher)


@pytest.fixture(scope="module")
def paces_of_triton_are_unknown() -> Iterator[None]:
    """Hides Triton's launch times, so the search must measure that Triton's operators wait for Python."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostRates, "paces", _without_triton)
        yield


def _kept(function: Callable[..., Any]) -> Callable[..., Any]:
    found: dict[str, Any] = {}

    @wraps(function)
    def asked(*args: Any, **kwargs: Any) -> Any:
        key = repr((HostRates.paces, args, kwargs))
        if key not in found:
            found[key] = function(*args, **kwargs)
        return found[key]

    return asked


@pytest.fixture(scope="module")
def predicted_once(_predictions: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Shares predictions between searches; each takes a tenth of a second."""
    from steplab.lab import outlook

    with pytest.MonkeyPatch.context() as patch:
        for name, predict in _predictions.items():
            patch.setattr(outlook, name, predict)
        yield


@pytest.fixture
def read_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads traces and snapshots in the test's process; test_reading_bounded tests the separate one."""
    from steplab.reading import child

    def read(what: str, result: type, paths: Sequence[Path], options: Any = None, *further: object) -> Any:
        found = child._WORK[what](lambda done, size: None, *paths, **(options or {}))
        return msgspec.json.decode(msgspec.json.encode(found), type=result)

    for caller in ("memory", "profiling"):
        monkeypatch.setattr(f"steplab.lab.{caller}.read_bounded", read)
