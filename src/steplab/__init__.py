"""steplab: a laboratory for the training step of Transformer language models in PyTorch.

A spec goes in, a record comes out, everything else reads records:

    run = steplab.measure("tiny", context=64)  # measures, stores and returns a record
    run.median_s, run.interval_s, run.mfu
    steplab.show(run)  # its report at a prompt, its page in a notebook

Every command is a function of the same name; `steplab run` is measure. docs/python.md has examples, and
`steplab run --help` lists the fields of a step. Names load on first use, so importing steplab is light and does not
import torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # `as` marks names as public for type checkers
    from steplab.errors import SteplabError as SteplabError
    from steplab.errors import Unsupported as Unsupported
    from steplab.errors import UserError as UserError
    from steplab.lab.advising import advise as advise
    from steplab.lab.attention import attention as attention
    from steplab.lab.comm import comm as comm
    from steplab.lab.comparing import compare as compare
    from steplab.lab.comparing import history as history
    from steplab.lab.ddp import ddp as ddp
    from steplab.lab.explaining import explain as explain
    from steplab.lab.keeping import import_files as import_files
    from steplab.lab.keeping import load as load
    from steplab.lab.keeping import note as note
    from steplab.lab.keeping import tag as tag
    from steplab.lab.layout_planning import plan_layout as plan_layout
    from steplab.lab.listing import list_records as list_records
    from steplab.lab.machine import doctor as doctor
    from steplab.lab.measuring import measure as measure
    from steplab.lab.memory import import_snapshot as import_snapshot
    from steplab.lab.memory import memory as memory
    from steplab.lab.planning import plan as plan
    from steplab.lab.planning import plan_accounting as plan_accounting
    from steplab.lab.planning import plan_memory as plan_memory
    from steplab.lab.planning import plan_steps as plan_steps
    from steplab.lab.planning import plan_time as plan_time
    from steplab.lab.precision import precision as precision
    from steplab.lab.profiling import import_trace as import_trace
    from steplab.lab.profiling import profile as profile
    from steplab.lab.recording import recorder as recorder
    from steplab.lab.sweeping import study as study
    from steplab.lab.sweeping import sweep as sweep
    from steplab.lab.turns import ab as ab
    from steplab.records.record import Record as Record
    from steplab.records.run import Run as Run
    from steplab.specs.model import ModelSpec as ModelSpec
    from steplab.specs.step import StepSpec as StepSpec
    from steplab.specs.study import StudySpec as StudySpec
    from steplab.specs.study import load_study as load_study
    from steplab.specs.study import study_from_grids as study_from_grids
    from steplab.store.database import Store as Store
    from steplab.views.reporting import report as report
    from steplab.views.view import View as View
    from steplab.views.view import show as show

_HOMES = {
    name: f"steplab.{module}"
    for module, names in (
        ("lab.turns", "ab"),
        ("lab.advising", "advise"),
        ("lab.attention", "attention"),
        ("lab.comm", "comm"),
        ("lab.comparing", "compare history"),
        ("lab.ddp", "ddp"),
        ("lab.machine", "doctor"),
        ("lab.explaining", "explain"),
        ("lab.keeping", "import_files load note tag"),
        ("lab.memory", "import_snapshot memory"),
        ("lab.profiling", "import_trace profile"),
        ("lab.listing", "list_records"),
        ("lab.measuring", "measure"),
        ("lab.planning", "plan plan_accounting plan_memory plan_steps plan_time"),
        ("lab.layout_planning", "plan_layout"),
        ("lab.precision", "precision"),
        ("lab.recording", "recorder"),
        ("views.reporting", "report"),
        ("lab.sweeping", "study sweep"),
        ("records.record", "Record"),
        ("records.run", "Run"),
        ("specs.step", "StepSpec"),
        ("specs.model", "ModelSpec"),
        ("specs.study", "StudySpec load_study study_from_grids"),
        ("store.database", "Store"),
        ("views.view", "View show"),
        ("errors", "SteplabError UserError Unsupported"),
    )
    for name in names.split()
}

__all__ = [*_HOMES, "__version__"]


class _Package(ModuleType):
    """Class of this module: it keeps a function, such as steplab.explain, when the folder of its name is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'steplab' has no attribute '{name}'")
    value = getattr(import_module(_HOMES[name]), name)
    if record := sys.modules.get("steplab.records.record"):
        record.Record._repr_html_ = _html_of
    return value


def _html_of(record: "Record") -> str:
    from steplab.views.view import in_short

    return in_short(record)


def __dir__() -> list[str]:
    return sorted(__all__)
