"""Settings that check themselves: the one validator behind every configuration dataclass."""

import dataclasses
import math
import types
import typing
from typing import Any

from prism.errors import UserError

LARGEST = 10**15  # of any setting: what is beyond is a slip, and would overflow somewhere less polite


def setting(default: Any, *, low: float | None = None, high: float | None = None, above: float | None = None) -> Any:
    """A dataclass field with a default and the range its value must lie in.

    `low` and `high` are inclusive, `above` is exclusive; for a tuple they hold for every element.
    """
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "above": above})


class Settings:
    """Base of the configuration dataclasses: types and ranges are checked wherever a value is made."""

    def __post_init__(self) -> None:
        types = field_types(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            check_type(field.name, value, types[field.name])
            for element in _numbers(value):
                _check_range(field.name, element, field.metadata)


@dataclasses.dataclass(frozen=True)
class SizeConfig(Settings):
    """What every model has a size in."""

    width: int = setting(192, low=2, high=65_536)  # of the token embedding
    layers: int = setting(5, low=1, high=1_024)
    vocabulary: int = setting(64, low=2, high=1_048_576)


def field_types(kind: Any) -> dict[str, Any]:
    """Name -> type of a dataclass's fields; also where `from __future__ import annotations` has made them texts."""
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    return typing.get_type_hints(kind) if any(isinstance(one, str) for one in types.values()) else types


def check_type(name: str, value: Any, annotation: Any) -> None:
    """Raises `UserError` unless `value` is of the annotated type (int passes for float; bool never for int)."""
    if not _matches(value, annotation):
        raise UserError(f"{name} must be {describe(annotation)}, got {value!r}")


def describe(annotation: Any) -> str:
    """A type in words a user can act on."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(choice) for choice in args)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(describe(arg) for arg in args)
    if origin is tuple:
        inner = describe(args[0]) if args[-1] is Ellipsis else ", ".join(describe(arg) for arg in args)
        return f"a list of ({inner})"
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "nothing"}
    return words.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _matches(value: Any, annotation: Any) -> bool:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return value in args
    if origin in (types.UnionType, typing.Union):
        return any(_matches(value, arg) for arg in args)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if args[-1] is Ellipsis:
            return all(_matches(element, args[0]) for element in value)
        return len(value) == len(args) and all(map(_matches, value, args))
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation)


def _numbers(value: Any) -> list[float]:
    if isinstance(value, tuple):
        return [number for element in value for number in _numbers(element)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def _check_range(name: str, value: float, metadata: Any) -> None:
    low, high, above = (metadata.get(key) for key in ("low", "high", "above"))
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{name} must be a finite number, got {value!r}")
    if above is not None and value <= above:
        raise UserError(f"{name} must be greater than {above:g}, got {value!r}")
    if low is not None and value < low:
        raise UserError(f"{name} must be at least {low:g}, got {value!r}")
    if high is not None and value > high:
        raise UserError(f"{name} must be at most {high:,}, got {value!r}")
    if abs(value) > LARGEST:
        raise UserError(f"{name} must be at most {LARGEST:.0e}, got {value!r}")
