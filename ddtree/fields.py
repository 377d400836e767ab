"""Typed reading of one JSON object: every wrong field is a ConfigError that names it. It knows no model."""

from __future__ import annotations

from typing import Any

from ddtree.errors import ConfigError

REQUIRED = object()
MOST = 2**40  # of an integer
SMALLEST, LARGEST = 1e-30, 1e30  # no setting lies outside, and what is computed from them stays finite


class FieldReader:
    """Reads typed fields out of one JSON object and says which one is wrong."""

    def __init__(self, values: dict[str, Any], where: str):
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: expected a JSON object, found {type(values).__name__}")
        self.values, self.where = values, where

    def get(self, name: str, default: Any = REQUIRED) -> Any:
        if self.values.get(name) is not None:
            return self.values[name]
        if default is REQUIRED:
            raise ConfigError(f"{self.where}: field {name} is missing")
        return default

    def _fail(self, name: str, wanted: str, value: Any) -> ConfigError:
        return ConfigError(f"{self.where}: {name}: expected {wanted}, found {value!r}")

    def integer(self, name: str, default: Any = REQUIRED, minimum: int = 1) -> Any:
        value = self.get(name, default)
        if value is not default and (type(value) is not int or not minimum <= value <= MOST):
            raise self._fail(name, f"an integer >= {minimum}", value)
        return value

    def number(self, name: str, default: Any = REQUIRED, positive: bool = True) -> Any:
        value = self.get(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
            raise self._fail(name, f"a number of at most {LARGEST:g}", value)
        if positive and not value >= SMALLEST:
            raise self._fail(name, f"a number of at least {SMALLEST:g}", value)
        return float(value)

    def flag(self, name: str, default: Any = REQUIRED) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self._fail(name, "true or false", value)
        return value

    def choice(self, name: str, allowed: tuple[str, ...], default: Any = REQUIRED) -> str:
        value = self.get(name, default)
        if value not in allowed:
            raise self._fail(name, "one of " + ", ".join(allowed), value)
        return value

    def integers(self, name: str, default: Any = REQUIRED) -> tuple[int, ...]:
        value = self.get(name, default)
        value = [value] if type(value) is int else value
        if not isinstance(value, list | tuple) or any(type(item) is not int or item < 0 for item in value):
            raise self._fail(name, "a list of integers >= 0", value)
        return tuple(value)

    def names(self, name: str, default: Any = REQUIRED) -> tuple[str, ...]:
        value = self.get(name, default)
        if not isinstance(value, list | tuple) or any(not isinstance(item, str) for item in value):
            raise self._fail(name, "a list of names", value)
        return tuple(value)
