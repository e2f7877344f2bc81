"""What a run ran on: enough to judge a number by, nothing that says whose machine or folder it was."""

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def describe_environment() -> dict[str, Any]:
    """Versions, processors, threads, commit and date; no host name, user or path."""
    import torch

    import prism

    package = Path(__file__).parent
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": importlib.metadata.version("numpy"),
        "prism": prism.__version__,
        "cuda": torch.version.cuda,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        **_commit(package),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit(package: Path) -> dict[str, Any]:
    """The commit of this very code. Where it has no repository around it, what PRISM_COMMIT says, or null.

    An installed package has none, even inside somebody else's repository; a copy sent to another machine may not.
    """
    if _git(package, "ls-files", "--error-unmatch", "--", Path(__file__).name) is None:
        return {"commit": os.environ.get("PRISM_COMMIT"), "dirty": None}
    changes = _git(package, "status", "--porcelain", "--", ".")
    return {"commit": _git(package, "rev-parse", "HEAD"), "dirty": None if changes is None else changes != ""}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
