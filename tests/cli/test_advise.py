import json

from tests.cli.program import Program, tiny

NO_COMPILER = {"TORCHDYNAMO_DISABLE": "1"}
"""torch.compile returns its argument, which shortens the search."""


def test_a_walk_tries_what_applies_stores_each_run_and_ends_with_what_to_type(steplab: Program) -> None:
    step = tiny(model="tiny", steps="8", compile="default")
    options = ("--keep-precision", "--budget", "none", "--format", "json")
    result = steplab("advise", *step, "--model.num-layers", "1", *options, variables=NO_COMPILER)
    assert result.code == 0, result.stderr
    tried = {f"{row['field']} {row['value']}": row for row in result.rows()}
    assert set(tried) == {"attention sdpa", "loss chunked", "model.projections merged"}
    for name, row in tried.items():
        assert row["after_s"] > 0, name
        assert row["kept"] == (row["result"] == "kept"), name
    said = dict(line.split(": ", 1) for line in result.stderr.splitlines() if line.endswith(("; kept", "; dropped")))
    assert {name: said[row["change"]].endswith("; kept") for name, row in tried.items()} == {
        name: row["kept"] for name, row in tried.items()
    }
    stored = {row["id"]: row for row in steplab("list", "--format", "json").rows()}
    assert {row["run_id"] for row in tried.values()} <= set(stored)
    [walk] = [row for row in stored.values() if row["kind"] == "advise"]
    shown = json.loads(steplab("show", walk["id"], "--format", "json").stdout)
    assert shown["best"] is not None
    assert [entry["kept"] for entry in shown["tried"]] == [row["kept"] for row in tried.values()]
