import dataclasses
import json
import shutil

import pytest
from tests.cli.program import REPOSITORY, Program, finish, tiny
from tests.cli.test_bad_input import TINY_LLAMA

from steplab.lab.predicting import facts_of, sizes_for_accounting
from steplab.plan.model_sizes import sizes_of
from steplab.specs.model import MODEL_SIZES
from steplab.specs.resolve import resolve_step


def test_a_loop_of_ones_own_is_recorded_beside_the_other_runs(steplab: Program) -> None:
    shutil.copytree(REPOSITORY / "examples", steplab.cwd / "examples")
    finished = finish(steplab.start("examples/own_loop.py", module="python"))
    assert (finished.code, finished.stderr) == (0, "")
    [row] = steplab.rows()
    assert (row["name"], row["status"], row["model"]) == ("own loop", "ok", None)
    assert 0 < row["forward_s"] < row["step_time_s"]
    assert (row["mfu_convention"], row["tokens_per_s"]) == ("given", 4 * 64 / row["step_time_s"])
    shown = steplab("show", row["id"])
    assert shown.code == 0
    assert "own loop" in shown.stdout


def test_a_transformers_configuration_is_measured_with_its_own_sizes(steplab: Program) -> None:
    pytest.importorskip("transformers")
    steplab.write("config.json", json.dumps(TINY_LLAMA))
    result = steplab("run", *tiny(context="32"), "--model", "hf:config.json", "--format", "json")
    assert result.code == 0, result.stderr
    [row] = result.rows()
    assert (row["status"], row["model"], row["context"]) == ("ok", "hf:llama", 32)
    record = json.loads(steplab("show", row["id"], "--format", "json").stdout)
    assert record["spec"]["model"]["hf_config"] == TINY_LLAMA
    embedding, attention, feed_forward, norms = 64 * 16, 4 * 16 * 16, 3 * 16 * 32, 3 * 16
    sizes = {
        "num_parameters": 2 * embedding + attention + feed_forward + norms,
        "num_embedding_parameters": embedding,
        "num_layers": 1,
        "attention_width": 16,
    }
    assert {key: record["model"][key] for key in sizes} == sizes


@pytest.mark.parametrize(
    ("name", "parameters"),
    # As the model cards and reports have them: 6.74e9, 8.03e9 and 70.6e9.
    [
        ("llama2-7b", 6_738_415_616),
        ("llama3-70b", 70_553_706_496),
        pytest.param("llama3-8b", 8_030_261_248, marks=pytest.mark.release),
    ],
)
def test_configurations_of_published_models_have_their_parameters(name: str, parameters: int) -> None:
    facts = facts_of(resolve_step({"model": f"hf:{REPOSITORY}/examples/hf/{name}.json"}))
    assert facts is not None
    assert facts.num_parameters == parameters


@pytest.mark.parametrize("size", ["small", "2.7b"])
def test_the_configurations_that_come_along_have_the_sizes_of_the_built_in_models(size: str) -> None:
    spec = resolve_step({"model": f"hf:{REPOSITORY}/examples/hf/llama-{size}.json"})
    model = spec.model
    assert model.label == f"hf:llama-{size}"
    own, built = sizes_of(MODEL_SIZES[size]), sizes_for_accounting(spec)
    assert dataclasses.replace(built, kinds=own.kinds) == own
    config = dict(model.hf_config or {})
    read = pytest.importorskip("transformers").AutoConfig.for_model(config.pop("model_type"), **config)
    assert (read.num_hidden_layers, read.head_dim) == (MODEL_SIZES[size].num_layers, MODEL_SIZES[size].head_dim)
