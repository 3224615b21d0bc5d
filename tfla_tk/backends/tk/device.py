"""What can run on this machine and why not: the GPU, its driver, the compiler, and the modules of kernels.

Families say by a function and plain numbers which modules a call takes (`InstancesOf`): torch.compile, which
may have sizes as symbols, sees the answers as constants.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch

from tfla_tk import build, env
from tfla_tk.build import Instance
from tfla_tk.core.support import SUPPORTED, Support

# the modules that a call takes, from numbers and names that tell them; a function of a module
InstancesOf: TypeAlias = Callable[..., Iterable[Instance]]

HOPPER = (9, 0)
_log = logging.getLogger("tfla_tk")


def not_on_a_gpu(device: torch.device) -> Support:
    """The refusal of tensors that are elsewhere."""
    return Support(False, f"the kernels run on a GPU, the tensors are on {device}", "move them to a GPU")


def supports(device: torch.device, instances_of: InstancesOf, *key: Any) -> Support:
    """Whether modules can be had and run on a GPU of this machine; nothing is loaded.

    Args:
        key: the arguments of instances_of.
    """
    reason, remedy = device_fault(device.index)
    if reason:
        return Support(False, reason, remedy)
    reason, remedy = kernel_fault(instances_of, *key)
    return Support(False, reason, remedy, failed=True) if reason else SUPPORTED


def load(instances_of: InstancesOf, *key: Any) -> Support:
    """Load modules that are supported, and compile what the cache lacks.

    What cannot be loaded is logged, once, and not tried again in this process: it is not supported any more.

    Args:
        key: the arguments of instances_of.

    Returns:
        Whether they are loaded.

    Raises:
        CaptureError: something would have to be compiled while a CUDA graph is being captured.
    """
    reason, remedy = load_fault(instances_of, *key)
    return Support(False, reason, remedy, failed=True) if reason else SUPPORTED


_failed: dict[Instance, tuple[str, str]] = {}  # what could not be loaded, why, and the remedy


def load_fault(instances_of: InstancesOf, *key: Any) -> tuple[str, str]:
    """Why the modules instances_of(*key) cannot be loaded, and the remedy; empty when they are loaded."""
    for instance in instances_of(*key):
        if instance in _failed:
            return _failed[instance]
        try:
            build.load(instance)
        except build.CaptureError:
            raise
        except build.BuildError as error:
            # "auto" goes on without a word
            _log.warning("%s cannot be used: %s", instance.name, error)
            _failed[instance] = error.reason, _anew(error)
            return _failed[instance]
    return "", ""


def kernel_fault(instances_of: InstancesOf, *key: Any) -> tuple[str, str]:
    """Why they cannot be had, as far as that is known without loading them: `device_fault` is empty."""
    for instance in instances_of(*key):
        if instance in _failed:
            return _failed[instance]
        if not (_can_add_kernels() or _is_cached(instance)):
            reason = f"{instance.name} is not compiled, and the cache directory cannot be written"
            return reason, f"set {env.CACHE_DIR.name} to a directory that you own and can write"
    return "", ""


@functools.cache
def _can_add_kernels() -> bool:
    try:
        return build.check_cache()
    except build.BuildError:
        return False


@functools.cache
def _is_cached(instance: Instance) -> bool:
    try:
        return build.is_cached(instance)
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
        toolchain = build.find_toolchain()
        build.check_cache()
        build.find_thunderkittens(clone=False)
    except build.BuildError as error:
        # "auto" goes on without a word, and this is looked up once in a process
        _log.warning("the tk kernels cannot be used: %s", error)
        return error.reason, _anew(error)
    return _driver_fault(toolchain.version)


def _anew(error: build.BuildError) -> str:
    """The remedy of what is looked up once in a process."""
    return f"{error.remedy}; then start Python anew" if error.remedy else "start Python anew to try again"


def _driver_fault(toolkit: tuple[int, int]) -> tuple[str, str]:
    """Why the driver is too old: a module of CUDA X.Y, machine code alone, needs a driver of X.0 or later."""
    driver = _driver_version()
    if driver is None or driver[0] >= toolkit[0]:
        return "", ""
    return (
        f"the driver runs CUDA {driver[0]}.{driver[1]}, the nvcc that was found is CUDA "
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
