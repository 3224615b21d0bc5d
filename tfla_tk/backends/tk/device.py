"""What can run on this machine and why not: the GPU, its driver, the compiler, and the kernels.

Families say by a function and plain numbers which kernels a call takes (`KernelsOf`): torch.compile, which
may have sizes as symbols, sees the answers as constants.
"""

import ctypes
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from tfla_tk import build, env
from tfla_tk.build import Instance, Launcher, prebuilt
from tfla_tk.core import memo
from tfla_tk.core.support import SUPPORTED, Support

# who launches the kernels that a call takes, and these
Kernels: TypeAlias = tuple[Launcher, tuple[Instance, ...]]
# both from numbers and names that tell them; a function of a module
KernelsOf: TypeAlias = Callable[..., Kernels]

# after so long what could not be had is looked for again
RETRY_S = 60.0
HOPPER = (9, 0)
_log = logging.getLogger("tfla_tk")


def known_sizes(device: torch.device, *sizes: Any) -> tuple[int, ...] | None:
    """Sizes and the number of the device, to tell kernels by; None where torch.compile has symbols."""
    symbolic = torch.compiler.is_compiling() or not all(isinstance(size, int) for size in sizes)
    return None if symbolic or device.index is None else (*sizes, device.index)


def supports(device: torch.device, kernels_of: KernelsOf, *key: Any) -> Support:
    """Whether instances, kernels_of(*key), can be had and run on a GPU of this machine; nothing is loaded."""
    reason, remedy = device_fault(device.index)
    if reason:
        return Support(False, reason, remedy, failed=reason in _told)
    reason, remedy = kernel_fault(kernels_of, *key)
    return Support(False, reason, remedy, failed=True) if reason else SUPPORTED


def load(kernels_of: KernelsOf, *key: Any) -> Support:
    """Load instances that are supported, kernels_of(*key), and compile what the cache lacks; whether they are
    loaded. What cannot be loaded is logged, once, and not supported until it is tried again (RETRY_S).
    CaptureError: something would have to be compiled while a CUDA graph is being captured."""
    reason, remedy = load_fault(kernels_of, *key)
    return Support(False, reason, remedy, failed=True) if reason else SUPPORTED


_failed: dict[Kernels, tuple[str, str]] = {}  # what could not be loaded, why, and the remedy
_waiting = threading.Lock()  # held while a timer runs that has failures be forgotten
_told: set[str] = set()  # reasons that are in the log, all of what may change while the process runs


@functools.lru_cache(maxsize=1)
def _kernels(kernels_of: KernelsOf, *key: Any) -> Kernels:
    """Of a call, which asks twice: whether they can be had, and to have them."""
    return kernels_of(*key)


def load_fault(kernels_of: KernelsOf, *key: Any) -> tuple[str, str]:
    """Why the instances of a call cannot be loaded, and the remedy; empty when they are loaded."""
    wanted = launcher, instances = _kernels(kernels_of, *key)
    if wanted in _failed:
        return _failed[wanted]
    try:
        build.load(launcher, *instances)
    except build.CaptureError:
        raise
    except build.BuildError as error:
        _failed[wanted] = error.reason, error.remedy
        _tell_and_try_again(error)
        return _failed[wanted]
    return "", ""


def kernel_fault(kernels_of: KernelsOf, *key: Any) -> tuple[str, str]:
    """Why they cannot be had, as far as that is known without loading them: `device_fault` is empty."""
    wanted = launcher, instances = _kernels(kernels_of, *key)
    if wanted in _failed:
        return _failed[wanted]
    if not _can_add_kernels():
        parts: list[Launcher | Instance] = [launcher, *instances]
        for part in parts:
            if not _is_cached(part):
                reason = f"{part.name} is not compiled, and the cache directory cannot be written"
                _try_again()
                return reason, f"set {env.CACHE_DIR.name} to a directory that you own and can write"
    return "", ""


def _tell_and_try_again(error: build.BuildError) -> None:
    """Logs, once, why "auto" goes on to the next backend."""
    if error.reason not in _told:
        _told.add(error.reason)
        _log.warning("the tk kernels cannot be used: %s", error)
    _try_again()


def _try_again() -> None:
    """Has what failed be forgotten after a while, so that the next call finds that its cause is gone."""
    if _waiting.acquire(blocking=False):
        timer = threading.Timer(RETRY_S, _forget)
        timer.daemon = True
        timer.start()


def _forget() -> None:
    _waiting.release()
    forget_failures()


def forget_failures() -> None:
    """Look anew for what could not be had, and plan calls anew that other backends have served meanwhile."""
    _failed.clear()
    for looked_up in (_can_add_kernels, _is_cached, _probe_device):
        looked_up.cache_clear()
    memo.forget_calls()


@functools.cache
def _can_add_kernels() -> bool:
    try:
        return build.check_cache()
    except build.BuildError:
        return False


@functools.cache
def _is_cached(artifact: Launcher | Instance) -> bool:
    try:
        return build.is_cached(artifact)
    except build.BuildError:
        return False


def device_fault(index: int | None) -> tuple[str, str]:
    """Why no kernel can run on this GPU of this machine, and the remedy; empty when it can."""
    return _probe_device(index)


# what torch.compiler.assume_constant_result sets; calling that here would import torch._dynamo and triton
_CONSTANT: tuple[Any, ...] = (device_fault, kernel_fault, load_fault)
for _function in _CONSTANT:
    _function._dynamo_marked_constant = True


@functools.cache
def _probe_device(index: int | None) -> tuple[str, str]:
    try:
        name = torch.cuda.get_device_name(index)
        capability = torch.cuda.get_device_capability(index)
    except (AssertionError, RuntimeError) as error:
        # fake tensors may be on a GPU that this machine does not have
        reason = str(error).partition("\n")[0]
        return f"torch cannot use GPU {index or 0}: {reason}", "run on a machine that has it"
    if torch.version.hip is not None:
        return f"{name} is an AMD GPU, the kernels are CUDA", "use an H100, H200 or GH200"
    if capability != HOPPER:
        found = ".".join(map(str, capability))
        return f"{name} has compute capability {found}, the kernels need 9.0", "use an H100, H200 or GH200"
    try:
        brought = prebuilt.index()
        if brought is not None:
            return _driver_fault(brought.cuda)
        toolchain = build.find_toolchain()
        build.check_cache()
        build.find_thunderkittens(clone=False)
    except build.BuildError as error:
        _tell_and_try_again(error)
        return error.reason, error.remedy
    return _driver_fault(toolchain.version)


def _driver_fault(toolkit: tuple[int, int]) -> tuple[str, str]:
    """Why the driver is too old: machine code of CUDA X.Y needs a driver of X.0 or later."""
    driver = _driver_version()
    if driver is None or driver[0] >= toolkit[0]:
        return "", ""
    return (
        f"the driver runs CUDA {driver[0]}.{driver[1]}, the kernels are compiled by CUDA "
        f"{toolkit[0]}.{toolkit[1]}",
        f"update the driver, or name an nvcc of CUDA 12.8 or 12.9 in {env.NVCC.name}; then start Python anew",
    )


def _driver_version() -> tuple[int, int] | None:
    """The newest CUDA that the driver runs, as (major, minor); None where it cannot be asked."""
    version = ctypes.c_int(0)
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return divmod(version.value // 10, 100) if status == 0 else None
