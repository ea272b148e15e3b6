import ast
import importlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steplab.errors import UserError
from steplab.specs.changes import CHANGES, resolve_with_recipe
from steplab.specs.own_loop import own_loop, own_model
from steplab.specs.resolve import resolve_step
from steplab.specs.step import FIELDS, StepSpec

CHOICES = {
    "precision": ("fp32", "bf16", "bf16_master", "fp16", "tf32", "bf16_pure"),
    "optimizer": ("adamw_fused", "adamw_loop", "adamw_triton", "sgd"),
    "update": ("after", "overlapped"),
    "cuda_graph": ("off", "step"),
    "compile": ("off", "block", "default", "reduce-overhead"),
    "accumulation": (1, 3),
    "layout": ("dp=1", "dp=2", "fsdp=2", "dp=2,fsdp=2", "tp=2"),
    "pass": ("train", "forward_backward", "forward"),
}
PARTS = {
    "model.projections": ("separate", "merged"),
    "block_ops": ("plain", "triton"),
    "attention": ("plain", "sdpa", "auto"),
    "loss": ("plain", "chunked"),
    "checkpointing": ("none", "full", "selective", "every_2", "first_1"),
}
GIVEN = {"model", "batches", "device", "lr", "next", "iter", "range", "sum", "zip"}
OF_THE_MODEL = {
    *("x", "branch", "normed", "q", "k", "v", "out", "table", "num_heads", "eps", "d_model", "d_kv", "d_ff", "hidden"),
    *("targets", "head", "output", "down", "attention_norm", "feed_forward_norm"),
}


def steps(choices: dict[str, tuple[Any, ...]], **fixed: object) -> Iterator[StepSpec]:
    for values in itertools.product(*choices.values()):
        try:
            yield resolve_step({"model": "tiny", **fixed, **dict(zip(choices, values, strict=True))})
        except UserError:
            continue


def undefined(body: list[ast.stmt], known: set[str]) -> set[str]:
    found: set[str] = set()
    for statement in body:
        inner: list[ast.stmt] = getattr(statement, "body", [])
        if isinstance(statement, ast.Import | ast.ImportFrom):
            known |= {each.name for each in statement.names}
            continue
        if isinstance(statement, ast.FunctionDef):
            found |= undefined(inner, known | {each.arg for each in statement.args.args})
            known.add(statement.name)
            continue
        within = {id(node) for each in inner for node in ast.walk(each)}
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and id(node) not in within]
        own = {each.arg for node in ast.walk(statement) if isinstance(node, ast.Lambda) for each in node.args.args}
        found |= {node.id for node in names if isinstance(node.ctx, ast.Load)} - known - own
        known |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
        found |= undefined(inner, known)
    return found


def check_program(lines: tuple[str, ...], given: set[str]) -> None:
    tree = ast.parse("\n".join(lines))
    imports = [each for each in tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
    assert tree.body[: len(imports)] == imports
    names = [name.name for each in imports for name in each.names]
    assert len(names) == len(set(names))
    for each in imports:
        if isinstance(each, ast.ImportFrom):
            module = importlib.import_module(str(each.module))
            assert all(hasattr(module, name.name) for name in each.names)
    assert not undefined(tree.body, set(given)), lines


def test_every_loop_is_a_program_that_imports_once_and_defines_before_use() -> None:
    shown = {own_loop(spec) for spec in steps(CHOICES)}
    shown |= {own_loop(spec) for spec in steps(PARTS, precision="bf16_master", optimizer="adamw_triton")}
    assert len(shown) > 200
    for lines in shown:
        check_program(lines, GIVEN)


def test_every_excerpt_of_a_model_takes_its_names_from_the_model() -> None:
    shown = {own_model(spec) for spec in steps(PARTS)}
    assert () in shown
    for lines in shown:
        check_program(lines, GIVEN | OF_THE_MODEL)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.words)
def test_every_change_is_in_the_lines(change: Any) -> None:
    before: dict[str, object] = {"checkpointing": "full"} if change.value in ("none", "selective") else {}
    before |= {"optimizer": "adamw_loop"} if change.field == "optimizer" else {}
    before |= {"layout": "dp=2", "data_parallel": "flat"} if change.field == "data_parallel" else {}
    before |= {"layout": "fsdp=2"} if change.field == "reshard_after_forward" else {}
    without = resolve_step({"model": "small", **before})
    made = change.made(without)
    assert str(FIELDS[change.field].read(made)) == change.value
    assert (own_model(made), own_loop(made)) != (own_model(without), own_loop(without))


@pytest.mark.filterwarnings("ignore:recipe fast")
def test_the_recipe_builds_its_optimizer_once_and_records_the_update_in_the_graph() -> None:
    lines = own_loop(resolve_with_recipe({"model": "small", "recipe": "fast"}, lambda _: "cuda"))
    text = "\n".join(lines)
    assert text.count("OneKernelAdamW(") == text.count("for batch in batches:") == 1
    order = [
        "masters = ",
        "torch.compile",
        "optimizer = ",
        "update = ",
        "def step",
        "torch.autocast",
        "update.finish()",
    ]
    places = [text.index(part) for part in (*order, "torch.cuda.Stream(priority=-1)", "torch.cuda.graph(")]
    assert places == sorted(places)
    assert "optimizer.step()" not in text


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return self.head(batch).float().square().mean()


def rate(*, sgd: bool) -> float:
    return 0.5 if sgd else 0.02


def trained_plainly(batches: list[Tensor], *, autocast: bool, sgd: bool) -> Small:
    model, device = Small().to(batches[0].device), batches[0].device
    optimizer = (torch.optim.SGD if sgd else torch.optim.AdamW)(model.parameters(), lr=rate(sgd=sgd))
    for batch in batches:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def check_loop(spec: StepSpec, batches: list[Tensor], *, first_again: int = 0) -> None:
    device, autocast, sgd = batches[0].device, spec.precision != "fp32", spec.optimizer == "sgd"
    model = Small().to(device)
    names = {"model": model, "batches": batches, "device": device, "lr": rate(sgd=sgd)}
    exec("\n".join(own_loop(spec, device.type)), names)
    taken = batches[:1] * first_again + batches
    expected, short = (trained_plainly(some, autocast=autocast, sgd=sgd) for some in (taken, taken[:-1]))
    rtol, atol = (1e-2, 5e-3) if autocast else (1e-5, 1e-6)
    for value, right in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(value.float(), right, rtol=rtol, atol=atol)
    assert not torch.allclose(expected.head.weight, short.head.weight, rtol=rtol, atol=atol)


def some_batches(device: str) -> list[Tensor]:
    return list(torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1)).to(device))


CPU = {
    "precision": ("fp32", "bf16", "bf16_master"),
    "optimizer": ("adamw_fused", "adamw_foreach", "adamw_loop", "adamw_triton", "sgd"),
    "update": ("after", "overlapped"),
    "accumulation": (1, 3),
    "checkpointing": ("none", "full", "every_2", "first_1", "selective"),
}


@pytest.mark.release
def test_loops_for_a_cpu_train_as_the_plain_loop_does() -> None:
    for spec in steps(CPU):
        check_loop(spec, some_batches("cpu"))


NAMES = "inputs", "targets"


class WithTargets(Small):
    returned: Any = staticmethod(lambda output, loss: loss)

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:  # type: ignore[override]
        for block in self.blocks:
            inputs = block(inputs)
        output = self.head(inputs).float()
        return self.returned(output, (output - targets).square().mean())


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("form", ["tuple", "list", "dict"])
@pytest.mark.parametrize(
    "returned",
    [lambda _, loss: loss, lambda output, loss: (output, loss), lambda _, loss: SimpleNamespace(loss=loss)],
    ids=["loss", "output and loss", "object"],
)
def test_the_loop_calls_a_model_as_its_batches_ask_and_finds_its_loss(
    accumulation: int, form: str, returned: Any
) -> None:
    spec = resolve_step({"model": "tiny", "optimizer": "sgd", "accumulation": accumulation})
    pairs = [(inputs, inputs[:, :4] + 1.0) for inputs in some_batches("cpu")]
    forms: dict[str, Any] = {"tuple": tuple, "list": list, "dict": lambda pair: dict(zip(NAMES, pair, strict=True))}
    model, expected = WithTargets(), WithTargets()
    model.returned = returned
    names = {"model": model, "batches": [forms[form](pair) for pair in pairs], "device": torch.device("cpu"), "lr": 0.5}
    exec("\n".join(own_loop(spec, "cpu")), names)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    for inputs, targets in pairs:
        optimizer.zero_grad()
        expected(inputs, targets).backward()
        optimizer.step()
    torch.testing.assert_close(list(model.parameters()), list(expected.parameters()))
    assert not torch.allclose(expected.head.weight, Small().head.weight)
