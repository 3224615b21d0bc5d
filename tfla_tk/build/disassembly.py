"""SASS of a cubin, by the toolkit's nvdisasm or the pip-installed one."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

from tfla_tk.build.errors import BuildError
from tfla_tk.build.toolchain import find_toolchain, pip_toolkits

_TIMEOUT_S = 300


def find_tool(name: str) -> Path | None:
    """A CUDA binary utility (nvdisasm, cuobjdump) beside nvcc, from pip or on PATH; None without one."""
    places = [root / "bin" for root in pip_toolkits()]
    with contextlib.suppress(BuildError):
        places.insert(0, find_toolchain().nvcc.parent)
    for place in places:
        if (place / name).is_file():
            return place / name
    on_path = shutil.which(name)
    return Path(on_path) if on_path else None


def disassemble(cubin: Path) -> str:
    """The SASS of a cubin.

    Raises:
        BuildError: There is no nvdisasm, or it refuses the file.
    """
    tool = find_tool("nvdisasm")
    if tool is None:
        raise BuildError("no nvdisasm", "pip install nvidia-cuda-nvdisasm")
    done = subprocess.run([str(tool), "-c", str(cubin)], capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        raise BuildError(f"{tool} refuses {cubin}: {done.stderr.strip()}")
    return done.stdout


def cubin_of_module(module: Path, folder: Path) -> Path:
    """The cubin that a compiled module holds, written to a folder.

    Raises:
        BuildError: There is no cuobjdump, or it finds no cubin of this GPU, or several.
    """
    tool = find_tool("cuobjdump")
    if tool is None:
        raise BuildError("no cuobjdump", "pip install nvidia-cuda-cuobjdump")
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(tool), "-xelf", "all", str(module.absolute())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, cwd=folder)
    # that of the CUDA runtime is for another GPU
    found = list(folder.glob("*.sm_90a.cubin"))
    if done.returncode or len(found) != 1:
        raise BuildError(f"{tool} finds {len(found)} cubins in {module}: {done.stderr.strip()}")
    return found[0]
