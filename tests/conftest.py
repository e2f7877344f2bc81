"""Every annotation of the package is checked while its tests run, and memory nobody wrote holds NaN."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintException
from jaxtyping import install_import_hook

_NUMBERS = BeartypeConf(is_pep484_tower=True)  # an int passes for a float, as it does for mypy


def checked(function: Any) -> Any:
    """`function` with its annotations enforced; as it is where beartype knows no way (a bare method's `Self`)."""
    try:
        return beartype(conf=_NUMBERS)(function)
    except BeartypeDecorHintException:
        return function


if not torch.cuda.is_available():  # read when Triton is imported: its kernels then run by an interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Before anything imports the package: only modules imported from here on are checked.
install_import_hook("prism", f"sys.modules[{__name__!r}].checked")
assert "prism" not in sys.modules, "the package was imported before its annotations could be checked"

torch.set_num_threads(1)  # the tensors are small: threads would only wait for one another


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """`torch.empty` and its kin give NaN, so a kernel that reads what it has not written cannot pass by luck."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
