"""Every environment variable that tfla_tk reads, in one place.

The package reads the environment through this module only. An empty value counts as unset.
``python -m tfla_tk doctor`` prints the values in force.
"""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name and what it changes."""

    name: str
    meaning: str

    def get(self) -> str | None:
        """The value, or None when it is unset or empty."""
        return os.environ.get(self.name) or None


NVCC = Variable("TFLA_TK_NVCC", "the nvcc to compile kernels with; nothing else is tried when it is set")
CUDA_HOME = Variable("CUDA_HOME", "a CUDA toolkit, used when it holds bin/nvcc and the CUDA headers")
THUNDERKITTENS_ROOT = Variable(
    "THUNDERKITTENS_ROOT", "a ThunderKittens checkout to compile against, in place of the pinned commit"
)
THUNDERKITTENS_URL = Variable(
    "TFLA_TK_THUNDERKITTENS_URL", "git URL that the pinned ThunderKittens commit is fetched from (a mirror)"
)
CACHE_DIR = Variable(
    "TFLA_TK_CACHE_DIR", "where compiled kernels and ThunderKittens are kept (default ~/.cache/tfla_tk)"
)
JOBS = Variable("TFLA_TK_JOBS", "compiler processes at a time (default: the CPU cores this process may use)")
XDG_CACHE_HOME = Variable("XDG_CACHE_HOME", "replaces ~/.cache in the default cache directory")
NVCC_CCBIN = Variable("NVCC_CCBIN", "the host compiler, read by nvcc itself (default g++)")
NVCC_PREPEND_FLAGS = Variable("NVCC_PREPEND_FLAGS", "read by nvcc itself; part of the cache key")
NVCC_APPEND_FLAGS = Variable("NVCC_APPEND_FLAGS", "read by nvcc itself; part of the cache key")
PTXAS_GATE = Variable(
    "TFLA_TK_PTXAS_GATE",
    "off: a kernel whose matrix products ptxas serialises is taken, slow as it is; part of the cache key",
)
TRITON_INTERPRET = Variable("TRITON_INTERPRET", "1: Triton kernels run on the CPU, read by Triton itself")
OMP_NUM_THREADS = Variable(
    "OMP_NUM_THREADS", "threads of PyTorch on a CPU, read by PyTorch itself; without it the commands take one"
)

VARIABLES = tuple(found for found in list(globals().values()) if isinstance(found, Variable))


def cache_dir() -> Path:
    """The cache directory: TFLA_TK_CACHE_DIR, or tfla_tk below XDG_CACHE_HOME or ~/.cache. It is not
    created here. RuntimeError: it lies below the home directory, and there is none."""
    chosen, base = CACHE_DIR.get(), XDG_CACHE_HOME.get()
    try:
        if chosen:
            return Path(chosen).expanduser().absolute()
        return Path(base or "~/.cache").expanduser().absolute() / "tfla_tk"
    except RuntimeError as error:
        raise RuntimeError(
            "there is no home directory for the cache: HOME is not set and the user has no passwd entry"
        ) from error


def refuses_slow_kernels() -> bool:
    """Whether a kernel whose matrix products ptxas serialises is an error (TFLA_TK_PTXAS_GATE).
    ValueError: TFLA_TK_PTXAS_GATE is neither on nor off."""
    value = PTXAS_GATE.get() or "on"
    if value not in ("on", "off"):
        raise ValueError(f"{PTXAS_GATE.name}: expected on or off, got {value!r}")
    return value == "on"


def build_jobs() -> int:
    """How many compiler processes may run at a time (TFLA_TK_JOBS, or the usable CPU cores). ValueError:
    TFLA_TK_JOBS is no positive integer."""
    value = JOBS.get()
    if value is None:
        # Linux alone tells which cores a process may use
        affinity = getattr(os, "sched_getaffinity", None)
        return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{JOBS.name}: expected a positive integer, got {value!r}")
    return int(value)
