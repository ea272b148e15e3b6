import json
from pathlib import Path

from tests.cli.program import Program, tiny

MODEL = """
def build(context):
    def step():
        if context == 2:
            raise RuntimeError("CUDA error: GPU is lost\\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1")
    return step
"""


def test_a_gpu_that_is_lost_costs_the_cell_which_is_then_measured_again(tmp_path: Path) -> None:
    steplab = Program(tmp_path)
    steplab.write("lost.py", MODEL)
    words = ("sweep", *tiny(context="1,2,3"), "--model", "lost:build", "--format", "json")
    rows = json.loads(steplab(*words).stdout)
    assert [row["status"] for row in rows] == ["ok", "crashed", "ok"]
    assert "the GPU no longer answers" in rows[1]["failure"]
    again = steplab(*words, "--resume")
    assert again.stderr.count("[1/1]") == 1
