import json
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cli.program import REPOSITORY
from torch import Tensor

from steplab.records.run import Run
from steplab.records.validation import check
from steplab.store.database import Store


def only_run(folder: Path) -> Run:
    with Store.open(folder / "store.db", write=False) as store:
        [run] = [record for record in store.iterate(kind="run") if isinstance(record, Run)]
    check(run)
    return run


def test_a_loop_with_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="accelerate is missing: pip install accelerate")
    monkeypatch.setenv("STEPLAB_STORE", str(tmp_path / "store.db"))
    runpy.run_path(str(REPOSITORY / "examples" / "accelerate_loop.py"))
    run = only_run(tmp_path)
    assert (run.name, run.failure) == ("accelerate loop", None)
    assert run.timing is not None
    assert {samples.phase: len(samples.best_s) for samples in run.timing.back_to_back} == dict.fromkeys(
        ("forward", "backward", "optimizer", "step"), 20
    )


class CpuModule(SimpleNamespace):
    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


def test_a_training_with_torchtitan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan's trainer on a CPU, for which it lacks a device and attention, and with an older torch."""
    pytest.importorskip("torchtitan", reason="torchtitan is missing: pip install torchtitan")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from torchtitan.tools import utils

    device = CpuModule(
        get_device_name=lambda index: "cpu",
        get_device_properties=lambda index: SimpleNamespace(total_memory=1),
        reset_peak_memory_stats=lambda *index: None,
        empty_cache=lambda: None,
        memory_stats=lambda *index: {},
        current_device=lambda: 0,
        synchronize=lambda *index: None,
    )
    monkeypatch.setattr(utils, "device_type", "cpu")
    monkeypatch.setattr(utils, "device_module", device)
    monkeypatch.setattr(dist, "set_timeout", lambda *group: None, raising=False)
    from torchtitan.models.common import attention

    def attend(self: object, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, **options: object) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        attended: Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2)

    monkeypatch.setattr(attention.FlexAttention, "forward", attend)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "data").mkdir()
    text = json.dumps({"text": "a b " * 400})
    (tmp_path / "data" / "text.json").write_text("\n".join([text] * 20), encoding="utf-8")
    options = {
        "--module": "llama3",
        "--config": "llama3_debugmodel",
        "--training.steps": "8",
        "--training.seq_len": "64",
        "--training.local_batch_size": "2",
        "--hf_assets_path": str(tmp_path),
        "--dataloader.dataset_path": str(tmp_path / "data"),
        "--validator.freq": "100",
        "--dump_folder": str(tmp_path / "out"),
    }
    monkeypatch.setattr(sys, "argv", ["torchtitan_steps.py", *(word for pair in options.items() for word in pair)])
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in {**place, "STEPLAB_STORE": str(tmp_path / "store.db")}.items():
        monkeypatch.setitem(os.environ, name, value)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # it waits for other ranks at its end
    try:
        runpy.run_path(str(REPOSITORY / "examples" / "torchtitan_steps.py"), run_name="__main__")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    run = only_run(tmp_path)
    assert (run.name, run.failure) == ("torchtitan", None)
    assert run.timing is not None
    by_name = {samples.phase: samples.best_s for samples in run.timing.back_to_back}
    assert {name: len(samples) for name, samples in by_name.items()} == dict.fromkeys(
        ("forward and backward", "optimizer", "step"), 3
    )
    parts = zip(by_name["forward and backward"], by_name["optimizer"], strict=True)
    assert all(0 < sum(parts_s) <= step_s for parts_s, step_s in zip(parts, by_name["step"], strict=True))
