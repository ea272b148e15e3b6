"""steplab: a laboratory for the training step of Transformer language models in PyTorch.

A spec goes in, a record comes out, everything else reads records. Importing this package imports neither
torch nor anything heavy; each name below is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from steplab.errors import SteplabError, Unsupported, UserError
    from steplab.lab.keeping import load
    from steplab.lab.measuring import measure
    from steplab.lab.memory import memory
    from steplab.lab.profiling import profile
    from steplab.lab.recording import recorder
    from steplab.lab.sweeping import sweep
    from steplab.records.run import Run
    from steplab.specs.model import ModelSpec
    from steplab.specs.step import StepSpec
    from steplab.specs.study import StudySpec, load_study, study_from_grids
    from steplab.store.database import Store

_HOMES = {
    "load": "steplab.lab.keeping",
    "measure": "steplab.lab.measuring",
    "memory": "steplab.lab.memory",
    "profile": "steplab.lab.profiling",
    "sweep": "steplab.lab.sweeping",
    "recorder": "steplab.lab.recording",
    "Run": "steplab.records.run",
    "StepSpec": "steplab.specs.step",
    "ModelSpec": "steplab.specs.model",
    "StudySpec": "steplab.specs.study",
    "load_study": "steplab.specs.study",
    "study_from_grids": "steplab.specs.study",
    "Store": "steplab.store.database",
    "SteplabError": "steplab.errors",
    "UserError": "steplab.errors",
    "Unsupported": "steplab.errors",
}

__all__ = [
    "ModelSpec",
    "Run",
    "StepSpec",
    "SteplabError",
    "Store",
    "StudySpec",
    "Unsupported",
    "UserError",
    "__version__",
    "load",
    "load_study",
    "measure",
    "memory",
    "profile",
    "recorder",
    "study_from_grids",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'steplab' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
