"""Finding tasks and encodings: every module of a folder is imported, nothing is registered by hand."""

import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import TypeVar

from prism.errors import unknown

T = TypeVar("T")


def discover(package: ModuleType, base: type[T]) -> dict[str, type[T]]:
    """Name -> class for each concrete subclass of `base` defined in a module of `package`.

    A class is offered under its `name` attribute; two classes under one name are refused at once, since a run
    folder that says "copy" must mean one thing.
    """
    found: dict[str, type[T]] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for _, candidate in inspect.getmembers(module, inspect.isclass):
            defined_here = candidate.__module__ == module.__name__
            name = getattr(candidate, "name", None)
            if not (defined_here and issubclass(candidate, base) and isinstance(name, str)):
                continue
            if name in found:
                raise ImportError(f"two classes are called '{name}': {found[name].__qualname__} in "
                                  f"{found[name].__module__} and {candidate.__qualname__} in {module.__name__}")
            found[name] = candidate
    return dict(sorted(found.items()))


def choose(kind: str, name: str, found: dict[str, type[T]]) -> type[T]:
    """The class called `name`, or an error that offers the nearest name."""
    if name not in found:
        raise unknown(kind, name, found)
    return found[name]
