"""Finding tasks, encodings and architectures: every module of a folder is imported, nothing is registered by hand."""

import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from prism.errors import UserError, unknown

T = TypeVar("T")


def discover(package: ModuleType, base: type[T]) -> dict[str, type[T]]:
    """Name -> class for each concrete subclass of `base` defined in a module of `package`.

    A class is offered under its `name` attribute; two classes under one name are refused at once, since a run
    folder that says "copy" must mean one thing.
    """
    found: dict[str, type[T]] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for candidate in defined_in(module, base):
            name: str = candidate.name  # type: ignore[attr-defined]
            if name in found:
                raise ImportError(f"two classes are called '{name}': {found[name].__qualname__} in "
                                  f"{found[name].__module__} and {candidate.__qualname__} in {module.__name__}")
            found[name] = candidate
    return dict(sorted(found.items()))


def defined_in(module: ModuleType, base: type[T]) -> list[type[T]]:
    """The subclasses of `base` that a module defines itself and that have a name."""
    return [
        candidate for _, candidate in inspect.getmembers(module, inspect.isclass)
        if candidate.__module__ == module.__name__ and issubclass(candidate, base)
        and isinstance(getattr(candidate, "name", None), str)
    ]


def load_file(path: Path, kind: str, base: type[T]) -> type[T]:
    """The one class of this kind that a user's file defines. Importing runs the file: it is the user who names it."""
    if not path.is_file():
        raise UserError(f"there is no file {path} to take the {kind} from")
    alias = hashlib.blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()
    spec = importlib.util.spec_from_file_location(f"prism_own_{path.stem}_{alias}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        line = next((f"line {frame.lineno}" for frame in reversed(traceback.extract_tb(error.__traceback__))
                     if Path(frame.filename).resolve() == path.resolve()), f"line {getattr(error, 'lineno', '?')}")
        raise UserError(f"{path} does not import: {type(error).__name__} at {line}: {error}") from error
    found = defined_in(module, base)
    if len(found) != 1:
        names = ", ".join(one.__name__ for one in found) or "none"
        raise UserError(f"{path} must define one {kind}, a subclass of {base.__name__} with a `name`; found {names}")
    return found[0]


def choose(kind: str, name: str, found: dict[str, type[T]]) -> type[T]:
    """The class called `name`, or an error that offers the nearest name."""
    if name not in found:
        raise unknown(kind, name, found)
    return found[name]
