import math
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steplab.errors import UserError
from steplab.lab.keeping import import_files, load
from steplab.lab.recording import recorder
from steplab.records.codec import encode
from steplab.records.run import Run
from steplab.store.database import Store


class Mute:
    def __str__(self) -> str:
        raise RuntimeError("no text")


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


NOT_UTF_8 = os.fsdecode(b"caf\xe9.bin")
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=())),
    st.sampled_from(["", "step", "p" * 10**6, "a\nb", "x\x1b]0;t\x07", "\u202ea", NOT_UTF_8, "\ud800", "\0"]),
)
NAMES = st.one_of(TEXTS, st.none(), st.integers(), st.binary(), st.just(Mute()), st.just(("t",)), st.just(10**5000))
PLAIN_NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([0, 1, 2048.0, 2.5, 1e18, 10**30, 10**400]))


def as_others(number: float) -> Any:
    number = number if isinstance(number, float) or abs(number) < 2**62 else float("nan")
    kinds: list[Callable[[Any], Any]] = [np.float64, np.float32, torch.tensor, str, lambda value: np.array(value)]
    return st.sampled_from(kinds).map(lambda kind: kind(number))


NUMBERS = st.one_of(st.none(), PLAIN_NUMBERS, PLAIN_NUMBERS.flatmap(as_others), st.just(np.int64(3)), st.just(Mute()))


def comes_back(run: Run, folder: Path) -> None:
    store = folder / "store.db"
    assert load(run.id, store=store) == run
    with Store.open(store) as opened:
        assert run.id in [row["id"] for row in opened.rows()]
    exported = folder / f"{run.id}.jsonl"
    exported.write_bytes(encode(run) + b"\n")
    assert import_files(exported, folder / "other.db") == (1, 0)
    assert load(run.id, store=folder / "other.db") == run


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=TEXTS,
    numbers=st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("tokens_per_step", "flops_per_step", "warmup", "steps"), NUMBERS)
    ),
    phases=st.lists(NAMES, max_size=3),
    raised=st.one_of(st.none(), TEXTS.map(ValueError), st.just(MuteError())),
    precision=st.sampled_from(["fp32", "bf16", None, "bf17"]),
)
def test_what_is_accepted_comes_back(
    tmp_path: Path,
    name: str,
    numbers: dict[str, Any],
    phases: list[Any],
    raised: Exception | None,
    precision: str | None,
) -> None:
    caught: BaseException | None = None
    rec = None
    options: Any = {"precision": precision, **numbers}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with recorder(name, device="cpu", store=tmp_path / "store.db", **options) as rec:
                for _ in range(3):
                    with rec.step():
                        for phase in phases:
                            with rec.phase(phase):
                                pass
                if raised is not None:
                    raise raised
    except BaseException as error:
        caught = error
    if rec is None:  # refused before the loop
        assert isinstance(caught, UserError)
        assert str(caught).isprintable()
        return
    assert caught is raised
    assert not getattr(caught, "__notes__", None)
    with Store.open(tmp_path / "store.db") as opened:
        (newest,) = opened.iterate(newest=1)
    assert isinstance(newest, Run)
    assert newest.name == name
    comes_back(newest, tmp_path)


@pytest.mark.parametrize(
    ("options", "tokens", "flops"),
    [
        ({"tokens_per_step": np.int64(4096)}, 4096, None),
        ({"tokens_per_step": torch.tensor(4096)}, 4096, None),
        ({"tokens_per_step": 4096 / 2, "warmup": np.int64(1), "steps": torch.tensor(3.0)}, 2048, None),
        ({"flops_per_step": np.float32(1e9), "precision": "fp32"}, None, 1e9),
        ({"flops_per_step": torch.tensor(1e9), "precision": "fp32"}, None, 1e9),
    ],
)
def test_numbers_of_other_libraries_are_taken(
    tmp_path: Path, options: Any, tokens: int | None, flops: float | None
) -> None:
    with recorder("mine", device="cpu", store=tmp_path / "store.db", **({"warmup": 0} | options)) as rec:
        for _ in range(5):
            with rec.step():
                sum(range(1000))
    assert rec.run is not None
    assert rec.run.tokens_per_step == tokens
    assert [used.flops for used in rec.run.utilizations] == ([flops] if flops else [])
    comes_back(rec.run, tmp_path)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tokens_per_step": 4095 / 2}, "tokens_per_step must be a whole number from 1 to below 1e+18, not 2047.5"),
        ({"warmup": 2.5}, "warmup must be a whole number from 0 to below 1e+18, not 2.5"),
        ({"warmup": 10**30}, "warmup must be a whole number from 0 to below 1e+18, not 1000"),
        ({"steps": 10**5000}, "steps must be a whole number from 1 to below 1e+18, not int"),
        ({"steps": "many\x1b"}, r"steps must be a whole number from 1 to below 1e+18, not many\x1b"),
        (
            {"flops_per_step": math.inf, "precision": "fp32"},
            "flops_per_step must be a number from 1 to below 1e+30, not inf",
        ),
        ({"profile": [2, 3]}, "consecutive steps after the first"),
        ({"profile": range(2, 10**30)}, "consecutive steps after the first"),
    ],
)
def test_numbers_that_no_record_has_are_refused_before_the_loop(tmp_path: Path, options: Any, told: str) -> None:
    with (
        pytest.raises(UserError, match=re.escape(told)),
        recorder("mine", device="cpu", store=tmp_path / "store.db", **options),
    ):
        pytest.fail("the loop began")


@pytest.mark.parametrize("error", [ValueError(f"cannot read {NOT_UTF_8}"), MuteError(), KeyboardInterrupt("\ud800")])
def test_the_exception_of_the_loop_arrives_and_the_loop_is_kept(tmp_path: Path, error: BaseException) -> None:
    def loop() -> None:
        with recorder("mine", device="cpu", warmup=0, store=tmp_path / "store.db") as rec:
            for _ in range(20):
                with rec.step():
                    pass
            raise error

    with pytest.raises(type(error)) as caught:
        loop()
    assert caught.value is error
    run = load(store=tmp_path / "store.db")
    assert isinstance(run, Run)
    assert run.failure
    comes_back(run, tmp_path)


def test_the_exception_of_the_loop_arrives_though_nothing_can_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ValueError("mine")

    def refuse(*given: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("steplab.lab.recording.keep", refuse)
    with (
        warnings.catch_warnings(action="error"),
        pytest.raises(ValueError, match="mine") as caught,
        recorder("mine", device="cpu", store=tmp_path / "store.db"),
    ):
        raise error
    assert caught.value is error
    assert error.__notes__ == ["steplab: broken"]


def test_variables_that_are_no_text_are_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.fsdecode(b"\xff\x1b[2J"))
    with recorder("mine", device="cpu", warmup=0, store=tmp_path / "store.db") as rec, rec.step():
        pass
    assert rec.run is not None
    comes_back(rec.run, tmp_path)
