"""FLA's own functions as the baseline of the operators in [B, T, H, D], called as its users call them."""

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from tfla_tk import env
from tfla_tk.backends.triton.fla import FLA_OPS, GUARDED, gated_backward_is_guarded, guard_module
from tfla_tk.core.errors import UnsupportedError
from tfla_tk.core.installed import find_package

VARIANT = "triton:fla"
# functions of these take more heads of v than of q and k
WITH_VALUE_HEADS = "gated_delta_rule", "kda"
NOTE = "FLA's guard of its gated backward on Hopper lifted, gradients checked first"
_NO_DISPATCH = "FLA_DISABLE_BACKEND_DISPATCH"
# of the packages that FLA dispatches to wherever they are installed; read by FLA at every call
SWITCHES = ("FLA_FLASH_QLA", "FLA_TILELANG", "FLA_FLASH_KDA")


def call(function: str, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, **options: Any) -> Any:
    """FLA's function, one of FLA_OPS, of q, k [B, T, H, K], v [B, T, HV, V], gates [B, T, HV]; q and k are
    repeated where HV > H, unless FLA takes that."""
    if not (q.is_cuda or env.TRITON_INTERPRET.get() == "1"):
        raise UnsupportedError(VARIANT, "Triton kernels need a GPU", "run on a GPU")
    run = getattr(_load(FLA_OPS[function]), function)
    group = v.shape[2] // q.shape[2]
    if group > 1 and not function.endswith(WITH_VALUE_HEADS):
        q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    return run(q, k, v, *gates, **options)


def _load(module: str) -> Any:
    """A module of FLA whose functions run kernels of its own."""
    if find_package("fla") is None or find_package("triton") is None:
        raise UnsupportedError(VARIANT, "fla-core is not installed", "pip install 'tfla_tk[baselines]'")
    # read by FLA on import
    os.environ.setdefault(_NO_DISPATCH, "1")
    backends = importlib.import_module("fla.backends")
    loaded = importlib.import_module(module)  # with the backends of its functions
    if not backends._DISPATCH_DISABLED and any(map(_serves, backends.BaseBackend.__subclasses__())):
        reason = "FLA dispatches to the kernels of other packages"
        remedy = f"set {_NO_DISPATCH}=1 before fla is imported, or {'=0, '.join(SWITCHES)}=0"
        raise UnsupportedError(VARIANT, reason, remedy)
    return loaded


def _serves(backend: Any) -> bool:
    """Whether FLA's dispatch offers calls to a class of backends now, or to one derived from it."""
    return (backend.is_available() and backend().is_enabled()) or any(map(_serves, backend.__subclasses__()))


@contextlib.contextmanager
def lifted_guard(function: str) -> Iterator[bool]:
    """FLA's guard off within the block, on again after it; gives whether there was one. The guard stands
    for kernels that some versions of Triton miscompile: what is computed within the block is to be
    compared with the truth before anything else is done with it."""
    guard = None
    with contextlib.suppress(Exception):  # a call tells what is wrong
        if function in GUARDED and _load(FLA_OPS[function]) and gated_backward_is_guarded():
            guard = guard_module()
    if guard is None:
        yield False
        return
    guard.TRITON_ABOVE_3_7_1 = True
    try:
        yield True
    finally:
        guard.TRITON_ABOVE_3_7_1 = False
