"""SASS of a cubin, by the toolkit's nvdisasm or the pip-installed one."""

import contextlib
import shutil
import subprocess
from pathlib import Path

from tfla_tk.build.errors import BuildError
from tfla_tk.build.toolchain import find_toolchain, pip_toolkits

_TIMEOUT_S = 300


def find_tool(name: str) -> Path | None:
    """A CUDA binary utility (nvdisasm) beside nvcc, from pip or on PATH; None without one."""
    places = [root / "bin" for root in pip_toolkits()]
    with contextlib.suppress(BuildError):
        places.insert(0, find_toolchain().nvcc.parent)
    for place in places:
        if (place / name).is_file():
            return place / name
    on_path = shutil.which(name)
    return Path(on_path) if on_path else None


def disassemble(cubin: Path) -> str:
    """The SASS of a cubin; BuildError without nvdisasm, or where it refuses the file."""
    tool = find_tool("nvdisasm")
    if tool is None:
        raise BuildError("no nvdisasm", "pip install nvidia-cuda-nvdisasm")
    done = subprocess.run([str(tool), "-c", str(cubin)], capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        raise BuildError(f"{tool} refuses {cubin}: {done.stderr.strip()}")
    return done.stdout
