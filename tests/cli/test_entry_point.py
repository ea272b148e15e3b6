import pkgutil
import tomllib

from tests.cli.program import REPOSITORY

from steplab import __main__


def test_the_installed_program_is_that_of_python_m() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert pkgutil.resolve_name(project["scripts"]["steplab"]) is __main__.console
