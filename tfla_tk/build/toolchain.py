"""The look-up of nvcc: TFLA_TK_NVCC, CUDA_HOME, the pip-installed toolkit, PATH."""

import contextlib
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tfla_tk import env
from tfla_tk.build.errors import BuildError
from tfla_tk.core.installed import find_package

# ThunderKittens needs CUDA 12.8
MINIMUM_CUDA = (12, 8)
# nv/target belongs to CCCL, below include/cccl since CUDA 13
_HEADERS = ("cuda.h", "cuda_runtime.h", "crt/host_config.h", "nv/target")
REMEDY = (
    "install CUDA 12.8 or newer and set CUDA_HOME, or `pip install 'tfla_tk[cuda]'`, "
    "or name an nvcc in TFLA_TK_NVCC"
)
HOST_REMEDY = (
    "install g++ (Debian and Ubuntu: `apt install g++`), or name a host compiler in NVCC_CCBIN; CUDA is there"
)


@dataclass(frozen=True)
class Toolchain:
    """An nvcc whose headers exist."""

    nvcc: Path
    include: Path  # the toolkit's headers
    lib: Path  # and libraries
    version: tuple[int, int]  # CUDA release, for instance (13, 0)
    identity: str  # full compiler version, nvcc's and the host compiler's: part of the cache key
    origin: str  # which look-up found it


def find_toolchain() -> Toolchain:
    """The first usable nvcc of TFLA_TK_NVCC, CUDA_HOME, the pip-installed toolkit and PATH. Usable is one
    that finds a host compiler. BuildError: None is usable, or the one that TFLA_TK_NVCC names is not. The
    message lists each place and its fault; the remedy is a host compiler where nothing else is missing."""
    chosen = env.NVCC.get()
    if chosen:
        try:
            return _probe(Path(chosen), env.NVCC.name)
        except BuildError as error:
            if error.remedy == HOST_REMEDY:
                raise
            remedy = f"name another nvcc in {env.NVCC.name}, or unset it to look elsewhere"
            raise BuildError(error.reason, remedy) from None
    faults: list[BuildError] = []
    for origin, nvcc in _candidates():
        try:
            return _probe(nvcc, origin)
        except BuildError as error:
            faults.append(error)
    places = f"{env.NVCC.name} (unset), {env.CUDA_HOME.name}, the pip-installed toolkit and PATH"
    listed = "".join(f"\n  {fault.reason}" for fault in faults)
    lacks_host = any(fault.remedy == HOST_REMEDY for fault in faults)
    remedy = HOST_REMEDY if lacks_host else REMEDY
    raise BuildError(f"no usable nvcc: looked at {places}{listed}", remedy)


def pip_toolkits() -> list[Path]:
    """Toolkit roots installed by pip (``nvidia/cu13`` of site-packages), the newest first."""
    spec = find_package("nvidia")
    if spec is None or spec.submodule_search_locations is None:
        return []
    roots = [root for place in spec.submodule_search_locations for root in Path(place).glob("cu[0-9]*")]
    return sorted(roots, key=lambda root: int(re.sub(r"\D", "", root.name)), reverse=True)


def _candidates() -> Iterator[tuple[str, Path]]:
    home = env.CUDA_HOME.get()
    if home:
        yield env.CUDA_HOME.name, Path(home) / "bin" / "nvcc"
    for root in pip_toolkits():
        if os.path.exists(root / "bin" / "nvcc"):
            yield "pip-installed toolkit", root / "bin" / "nvcc"
    on_path = shutil.which("nvcc")
    if on_path:
        yield "PATH", Path(on_path)


def _probe(nvcc: Path, origin: str) -> Toolchain:
    """Check that nvcc runs, is new enough, has its headers and finds a host compiler; BuildError with the
    origin in its reason where it does not."""
    try:
        return _examined(nvcc, origin)
    except OSError as error:
        raise BuildError(f"{origin}: the toolkit of {nvcc} cannot be read: {error}", REMEDY) from error


def _examined(nvcc: Path, origin: str) -> Toolchain:
    if not nvcc.is_file():
        raise BuildError(f"{origin}: {nvcc} does not exist", REMEDY)
    text = _output(nvcc, "--version", origin)
    match = re.search(r"release (\d+)\.(\d+), V([\d.]+)", text)
    if not match:
        raise BuildError(f"{origin}: {nvcc} --version does not name a CUDA release", REMEDY)
    version = (int(match[1]), int(match[2]))
    if version < MINIMUM_CUDA:
        needed = ".".join(map(str, MINIMUM_CUDA))
        raise BuildError(
            f"{origin}: {nvcc} is CUDA {match[1]}.{match[2]}, ThunderKittens needs {needed}", REMEDY
        )
    root = _toolkit_root(nvcc, origin)
    include = _first_with(root, ("include",), _HEADERS)
    if include is None:
        raise BuildError(f"{origin}: {nvcc} has no headers ({', '.join(_HEADERS)}) below {root}", REMEDY)
    lib = _first_with(root, ("lib64", "lib"), ("libcudart_static.a",))
    if lib is None:
        raise BuildError(f"{origin}: {nvcc} has no libcudart_static.a below {root}", REMEDY)
    name = env.NVCC_CCBIN.get() or "g++"
    host = shutil.which(name)
    identity = f"nvcc {match[3]}; {_version_of(host) if host else f'no host compiler {name}'}"
    return Toolchain(nvcc, include, lib, version, identity, origin)


def _toolkit_root(nvcc: Path, origin: str) -> Path:
    """The toolkit that nvcc itself uses: a wrapper script on PATH tells nothing by its own place."""
    steps = _output(nvcc, "--dryrun -x cu -c /dev/null", origin)
    # nvcc compiles with gcc and links with g++, unless it is told otherwise
    if re.search(r"^#\$ gcc ", steps, re.MULTILINE) and shutil.which("g++") is None:
        raise BuildError(f"{origin}: {nvcc} links with g++, which is not on PATH", HOST_REMEDY)
    match = re.search(r"^#\$ TOP=(.+)$", steps, re.MULTILINE)
    return Path(match[1].strip()).resolve() if match else nvcc.resolve().parent.parent


def _first_with(root: Path, folders: tuple[str, ...], files: tuple[str, ...]) -> Path | None:
    """The first of the toolkit's folders of these names that holds every file."""
    for folder in folders:
        for place in (root / folder, *sorted(root.glob(f"targets/*-linux/{folder}"))):
            if all((place / file).is_file() or (place / "cccl" / file).is_file() for file in files):
                return place
    return None


def _output(nvcc: Path, arguments: str, origin: str) -> str:
    host = env.NVCC_CCBIN.get() or shutil.which("gcc")
    return _cached_output(nvcc, nvcc.stat().st_mtime_ns, arguments, origin, host)


@functools.lru_cache(maxsize=32)
def _cached_output(nvcc: Path, mtime_ns: int, arguments: str, origin: str, host: str | None) -> str:
    try:
        done = subprocess.run([str(nvcc), *arguments.split()], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{origin}: {nvcc} does not run: {error}", REMEDY) from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        said = lines[-1] if lines else "no output"
        if "host compiler" in said:
            raise BuildError(f"{origin}: {nvcc} finds no host compiler: {said}", HOST_REMEDY)
        raise BuildError(f"{origin}: {nvcc} {arguments} fails: {said}", REMEDY)
    return done.stdout + done.stderr


@functools.lru_cache(maxsize=8)
def _version_of(path: str) -> str:
    """The first line of a host compiler's version."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the host compiler {path} does not run: {error}", HOST_REMEDY) from error
    return done.stdout.splitlines()[0] if done.stdout else path


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
    done = subprocess.run([str(tool), "-c", str(cubin)], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise BuildError(f"{tool} refuses {cubin}: {done.stderr.strip()}")
    return done.stdout
