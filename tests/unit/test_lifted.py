import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.first import first

import steplab

BEGIN = """
import sys
from importlib import import_module
from pkgutil import walk_packages

sys.modules["steplab"] = None  # whoever imports it fails
sys.path.insert(0, sys.argv[1])
package = import_module(sys.argv[2])
names = [module.name for module in walk_packages(package.__path__, f"{package.__name__}.")]
assert names and package.__file__.startswith(sys.argv[1])
for name in names:
    import_module(name)

import torch
"""
OPS = """
from ops.attention import attention
from ops.cross_entropy import linear_cross_entropy
from ops.errors import Unsupported
from ops.rms_norm import add_rms_norm

hidden, weight, targets = torch.randn(8, 16), torch.randn(32, 16), torch.arange(8)
losses = [linear_cross_entropy(hidden, weight, targets, implementation=name) for name in ("plain", "chunked")]
torch.testing.assert_close(*losses)
q, k, v = torch.randn(3, 1, 2, 64, 16)
outputs = [attention(q, k, v, causal=True, implementation=name) for name in ("plain", "flash_reference")]
torch.testing.assert_close(*outputs)
try:
    add_rms_norm(hidden.double(), hidden.double(), torch.ones(16).double(), 1e-5)
except Unsupported as error:
    assert str(error).startswith("add_rms_norm in float64 is not supported: "), error
else:
    raise AssertionError("float64 was not refused")
"""
PARALLEL = """
import torch.distributed as dist
from parallel import DataParallel, ShardedOptimizer
from parallel.errors import UserError

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
torch.manual_seed(0)
plain, module = (torch.nn.Linear(4, 3) for _ in range(2))
module.load_state_dict(plain.state_dict())
model = DataParallel(module)
optimizers = torch.optim.SGD(plain.parameters(), lr=0.1), ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
batch = torch.randn(5, 4)
for each in (plain, model):
    each(batch).mean().backward()
model.finish_gradient_synchronization()
for optimizer in optimizers:
    optimizer.step()
torch.testing.assert_close(module.weight, plain.weight, rtol=0, atol=0)
try:
    DataParallel(plain, strategy="fast")
except UserError as error:
    assert str(error) == "there is no strategy 'fast': choose naive, flat, overlap, bucketed", error
else:
    raise AssertionError("the strategy was not refused")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("folder", first(1, ["parallel", "ops"]))
def test_a_copy_of_the_folder_needs_no_steplab(tmp_path: Path, folder: str) -> None:
    pytest.importorskip("triton")
    source = Path(steplab.__file__).parent / folder
    shutil.copytree(source, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-c", BEGIN + {"ops": OPS, "parallel": PARALLEL}[folder], str(tmp_path), folder]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
