"""Where each backend has its functions for a kernel: the one place that knows every family.

A family's module in a backend has, for each kernel of the family,

    supports_<kernel>(call, variant) -> Support     whether it serves a call; loads and compiles nothing
    <kernel>(call, variant, *tensors) -> results    serves it; tensors in the order of the family's calls

and may have

    load(kernel, call, variant) -> Support          loads what a supported call needs, before it is computed
    prepare_<kernel>(call, variant, tensors)        what serves plain eager calls like this one, a function of
                                                    their tensors; or None where <kernel> serves them as well

Modules are imported on the first call that considers them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

BACKENDS = ("tk", "triton", "reference")  # in the order that "auto" tries them


def _mlstm(backend: str) -> ModuleType:
    if backend == "tk":
        from tfla_tk.backends.tk import mlstm as tk

        return tk
    if backend == "triton":
        from tfla_tk.backends.triton import mlstm_kernels

        return mlstm_kernels
    from tfla_tk.backends.reference import mlstm as reference

    return reference


def _linear(backend: str) -> ModuleType:
    if backend == "tk":
        from tfla_tk.backends.tk import linear as tk

        return tk
    if backend == "triton":
        from tfla_tk.backends.triton import fla

        return fla
    from tfla_tk.backends.reference import linear as reference

    return reference


def _delta_rule(backend: str) -> ModuleType:
    if backend == "tk":
        from tfla_tk.backends.tk import delta as tk

        return tk
    if backend == "triton":
        from tfla_tk.backends.triton import fla_delta

        return fla_delta
    from tfla_tk.backends.reference import delta as reference

    return reference


def _gla(backend: str) -> ModuleType:
    if backend == "tk":
        from tfla_tk.backends.tk import gla as tk

        return tk
    if backend == "triton":
        from tfla_tk.backends.triton import fla_gla

        return fla_gla
    from tfla_tk.backends.reference import gla as reference

    return reference


FAMILIES: dict[str, Callable[[str], ModuleType]] = {
    "mlstm": _mlstm,
    "mlstm_step": _mlstm,
    "mlstm_sequence": _mlstm,
    "simple_gla": _linear,
    "delta_rule": _delta_rule,
    "gla": _gla,
}


def family_module(backend: str, kernel: str) -> ModuleType:
    """The module of a backend that serves a kernel.

    Args:
        backend: one of BACKENDS. kernel: one of FAMILIES.
    """
    return FAMILIES[kernel](backend)
