import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from tests.cli.program import REPOSITORY, tiny

import steplab

SOURCE = REPOSITORY / "src"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=REPOSITORY, check=True, capture_output=True
    )
    return folder


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def metadata(built: Path) -> Message:
    with zipfile.ZipFile(only(built, "*.whl")) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_string(wheel.read(name).decode())


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(only(built, "*.whl")) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    kept = {
        str(path.relative_to(SOURCE))
        for path in (SOURCE / "steplab").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert found == kept
    assert {"steplab/py.typed", "steplab/specs/hardware.toml", "steplab/report/kit/page.css"} <= found


def test_the_sdist_can_be_built_and_tested(built: Path) -> None:
    with tarfile.open(only(built, "*.tar.gz")) as sdist:
        found = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "src/steplab/__init__.py"} <= found
    assert {"tests/runs.py", "docs/python.md", "examples/my_model.py"} <= found


def test_the_metadata_says_what_is_needed(built: Path) -> None:
    said = metadata(built)
    assert (said["Name"], said["Version"]) == ("steplab", steplab.__version__)
    assert said["Requires-Python"] == ">=3.11"
    assert said["License-Expression"] == "Apache-2.0"
    required = said.get_all("Requires-Dist") or []
    assert any(re.match(r"torch>=2\.7$", line) for line in required)
    assert not [line for line in required if "@" in line or "==" in line.partition(";")[0]]
    assert {"hf", "nvidia", "triton"} <= set(said.get_all("Provides-Extra") or [])


def test_the_newest_section_of_the_changelog_is_of_this_version() -> None:
    headings = re.findall(r"^## (.+)$", (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.fullmatch(rf"{re.escape(steplab.__version__)} \((unreleased|\d{{4}}-\d\d-\d\d)\)", headings[0])


@pytest.mark.release
@pytest.mark.parametrize("pattern", ["*.whl", "*.tar.gz"])
def test_a_clean_environment_runs_it(built: Path, tmp_path: Path, pattern: str) -> None:
    """Without the checkout, but with this environment's dependencies: torch is gigabytes."""
    home = tmp_path / "env"
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    install = [sys.executable, "-m", "pip", f"--python={python}", "install", "--no-deps", "--no-build-isolation"]
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    site.joinpath("dependencies.pth").write_text("".join(f"{p}\n" for p in sys.path if p.endswith("site-packages")))
    subprocess.run([*install, "--no-index", str(only(built, pattern))], check=True, timeout=300)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "STEPLAB_STORE")}
    environment |= {"STEPLAB_STORE": str(tmp_path / "store.db"), "OMP_NUM_THREADS": "1"}

    def said(*words: str) -> str:
        return subprocess.run(
            words, cwd=tmp_path, env=environment, check=True, timeout=300, capture_output=True, text=True
        ).stdout

    assert said(str(python), "-c", "import steplab; print(steplab.__file__)").startswith(str(home))
    program = str(home / "bin" / "steplab")
    assert said(program, "--version").strip() == steplab.__version__
    assert "H100" in said(program, "plan", "memory", "--model", "small", "--context", "64")
    said(program, "run", *tiny())
    assert "<svg" in said(program, "report", "--format", "html")
    assert said(program, "study", "quick", "--dry-run")
