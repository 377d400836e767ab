"""environment.yml, for conda, asks for what pyproject.toml asks for, within the same versions."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

# Where conda-forge's name for a package is not the (normalised) PyPI name.
CONDA_NAMES = {"matplotlib": "matplotlib-base", "ml-dtypes": "ml_dtypes"}
EXTRAS_IN_CONDA = ("notebooks", "test")


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.fixture(scope="module")
def environment(root: Path) -> dict[str, Any]:
    return yaml.safe_load((root / "environment.yml").read_text("utf-8"))


def conda_packages(environment: dict[str, Any]) -> dict[str, SpecifierSet]:
    """Return conda name -> versions, for the packages conda itself installs."""
    listed = [Requirement(line) for line in environment["dependencies"] if isinstance(line, str)]
    packages = {requirement.name: requirement.specifier for requirement in listed}
    assert len(packages) == len(listed), "a package is listed twice"
    return packages


def wanted(project: dict[str, Any]) -> dict[str, SpecifierSet]:
    """Return conda name -> versions, for the dependencies and extras that environment.yml repeats."""
    lines = list(project["dependencies"])
    for extra in EXTRAS_IN_CONDA:
        lines += project["optional-dependencies"][extra]
    packages: dict[str, SpecifierSet] = {}
    for requirement in map(Requirement, lines):
        name = canonicalize_name(requirement.name)
        name = CONDA_NAMES.get(name, name)
        assert packages.setdefault(name, requirement.specifier) == requirement.specifier, (
            f"{name}: two bounds"
        )
    return packages


def test_conda_asks_for_the_same_packages(project: dict[str, Any], environment: dict[str, Any]) -> None:
    listed = conda_packages(environment)
    assert {name: versions for name, versions in listed.items() if name not in ("python", "pip")} == wanted(
        project
    )


def test_conda_asks_for_the_same_python(project: dict[str, Any], environment: dict[str, Any]) -> None:
    assert conda_packages(environment)["python"] == SpecifierSet(project["requires-python"])


def test_conda_takes_the_package_itself_through_pip(environment: dict[str, Any]) -> None:
    assert [line for line in environment["dependencies"] if not isinstance(line, str)] == [{"pip": ["-e ."]}]
    assert "pip" in conda_packages(environment)


def test_conda_takes_all_else_from_conda_forge(environment: dict[str, Any]) -> None:
    assert environment["channels"] == ["conda-forge"]


@pytest.mark.parametrize(
    ("old", "new"),
    [("numpy>=2.1,<2.5", "numpy>=2.1"), ("  - tqdm>=4.66\n", ""), ("  - pip\n", "  - pip\n  - scipy\n")],
    ids=["bound", "missing", "extra"],
)
def test_a_difference_is_found(root: Path, project: dict[str, Any], old: str, new: str) -> None:
    text = (root / "environment.yml").read_text("utf-8")
    assert text.count(old) == 1
    with pytest.raises(AssertionError):
        test_conda_asks_for_the_same_packages(project, yaml.safe_load(text.replace(old, new)))
