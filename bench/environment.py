"""Where figures come from: the machine, versions, commit and run id."""

import contextlib
import re
import secrets
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from tfla_tk import build, doctor
from tfla_tk.backends.tk.device import HOPPER
from tfla_tk.build import prebuilt
from tfla_tk.core.checks import counted

ROOT = Path(__file__).resolve().parent.parent


def current_device() -> torch.device:
    """What commands measure on: the current GPU, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def heading(facts: Mapping[str, Any]) -> str:
    """The first line that a command prints, of `provenance`."""
    place = facts["gpu"] or f"CPU, {counted(torch.get_num_threads(), 'thread')}"
    return f"{place}; torch {facts['torch']}; triton {facts['triton']}"


def provenance(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """What all rows of one run share: run, gpu, torch, triton, nvcc, commit (given where this is no git
    checkout), date."""
    now = datetime.now(timezone.utc)
    return {
        "run": f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}",
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "torch": torch.__version__,
        "triton": doctor.version("triton"),
        "nvcc": _nvcc_version(),  # that has compiled the kernels
        "commit": commit or git_commit(ROOT),
        "date": f"{now:%Y-%m-%dT%H:%M:%SZ}",
    }


def _nvcc_version() -> str | None:
    try:
        brought = prebuilt.index()
        if brought is not None:
            return ".".join(map(str, brought.cuda))
        identity = build.find_toolchain().identity
    except build.BuildError:
        return None
    match = re.search(r"nvcc ([\d.]+)", identity)
    return match[1] if match else identity


def git_commit(root: Path) -> str | None:
    """The checked-out commit, "-dirty" where files differ from it; None where `root` is no git checkout."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def fetch_thunderkittens() -> None:
    """Bring ThunderKittens to a machine that can run the kernels: no call of the package fetches it. Where
    it cannot be had, the tk backend refuses its calls with the reason and the remedy."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER:
        with contextlib.suppress(build.BuildError):
            if prebuilt.index() is None:
                build.find_thunderkittens()
