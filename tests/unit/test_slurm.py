"""A study as one job of Slurm: by submitit's own executor for this machine, and what it is told for a cluster."""

from pathlib import Path

import pytest

from steplab.cli.app import main
from steplab.errors import SteplabError, UserError
from steplab.lab import slurm
from steplab.lab.slurm import StudyJob, slurm_options, submit
from steplab.records.run import Run
from steplab.specs.study import study_from_grids
from steplab.store.database import Store

STUDY = study_from_grids(
    "contexts",
    "",
    [{"model": ["tiny"], "context": [8], "batch": [1], "warmup": [0], "steps": [1], "device": ["cpu"]}],
)


def test_options_are_those_of_sbatch() -> None:
    given = slurm_options("partition=gpu, gpus-per-node=2,time=4h,mem_gb=64,qos=high")
    assert given == {"partition": "gpu", "gpus_per_node": "2", "time": "4h", "mem_gb": "64", "qos": "high"}
    assert slurm._parameters(given) == {
        "slurm_partition": "gpu",
        "gpus_per_node": 2,
        "timeout_min": 240,
        "mem_gb": 64.0,
        "slurm_qos": "high",
    }
    with pytest.raises(UserError, match="partition=gpu"):
        slurm_options("gpu")


def test_a_job_on_this_machine_measures_the_study_into_the_store(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    store = tmp_path / "store.db"
    submitted = submit(STUDY, {"cluster": "local"}, store=store, timeout_s=120)
    result = submitted.job.result()
    assert result.num_failed == 0
    with Store.open(store) as opened:
        runs = [record for record in opened.iterate() if isinstance(record, Run)]
    assert [run.spec for run in runs] == list(STUDY.cells)
    assert submitted.log.parent == tmp_path / "slurm"


def test_a_job_that_is_ended_early_is_queued_again_to_continue() -> None:
    submitit = pytest.importorskip("submitit")
    job = StudyJob(study=STUDY, store="store.db", resume=False, timeout_s=1)
    again = job.checkpoint()
    assert isinstance(again, submitit.helpers.DelayedSubmission)
    assert again.function == StudyJob(study=STUDY, store="store.db", resume=True, timeout_s=1)


def test_without_slurm_or_with_an_unknown_option_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))  # without sbatch
    command = ["study", "quick", "--store", str(tmp_path / "store.db"), "--slurm"]
    assert main([*command, "partition=gpu"]) == 1
    assert main([*command, "cluster=local", "--output", "page.html"]) == 2
    with pytest.raises(UserError):
        submit(STUDY, {"cluster": "moon"}, store=tmp_path / "store.db", timeout_s=1)
    assert all(line.startswith("steplab: ") for line in capsys.readouterr().err.splitlines())


def test_without_submitit_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "submitit", None)
    with pytest.raises(SteplabError, match=r"steplab\[slurm\]"):
        submit(STUDY, {}, store="store.db", timeout_s=1)
