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

from types import ModuleType

BACKENDS = ("tk", "triton", "reference")  # in the order that "auto" tries them


def family_module(backend: str, kernel: str) -> ModuleType:
    """The module of one of BACKENDS that serves a kernel: "mlstm", "mlstm_step", "mlstm_sequence",
    "simple_gla", "delta_rule", "gla" or "kda"."""
    of_mlstm = kernel.startswith("mlstm")
    if backend == "tk":
        from tfla_tk.backends.tk import linear, mlstm

        return mlstm if of_mlstm else linear
    if backend == "triton":
        from tfla_tk.backends.triton import fla, mlstm_kernels

        return mlstm_kernels if of_mlstm else fla
    from tfla_tk.backends.reference import forms

    return forms
