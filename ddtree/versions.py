"""Versions of packages, for results that say what they were made with."""

import importlib.metadata
import platform

from ddtree import __version__


def package_version(name: str) -> str | None:
    """The version of an installed package, of python, or of this one even where it is not installed; None if absent."""
    if name in ("ddtree", "python"):
        return __version__ if name == "ddtree" else platform.python_version()
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
