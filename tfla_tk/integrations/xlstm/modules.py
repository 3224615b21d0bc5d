"""Models that are built already: their backend modules, and which functions those call.

A backend module looks its functions up when it is built and keeps them in the attributes ATTRIBUTES. There
are two classes of them: mlstm_kernels' mLSTMBackend, which xlstm and transformers build, and xLSTMBackend, of
which transformers has its own where xlstm is not installed.
"""

import sys
from functools import partial
from typing import Any

import torch
from torch import nn

from tfla_tk.core.dispatch import split_backend
from tfla_tk.integrations.xlstm import kernels

ATTRIBUTES = ("chunkwise_kernel_fn", "sequence_kernel_fn", "step_kernel_fn", "_train_fn", "_inference_fn")

_CLASSES = (
    ("mlstm_kernels.torch.backend_module", "mLSTMBackend"),
    ("transformers.models.xlstm.modeling_xlstm", "xLSTMBackend"),
)


def backend_classes() -> tuple[type[nn.Module], ...]:
    """The backend modules' classes, as far as their packages are imported."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in _CLASSES)
    return tuple(cls for cls in found if cls is not None)


def backends_of(model: nn.Module) -> dict[str, nn.Module]:
    """The backend modules of a model by name. TypeError: not a module. ValueError: a module without any."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    classes = backend_classes()
    found = {name: module for name, module in model.named_modules() if isinstance(module, classes)}
    if not found:
        raise ValueError(
            "model: expected mLSTM backend modules inside (xLSTMLarge, transformers' xLSTM or an "
            f"mLSTMBackend), found none in {type(model).__name__}"
        )
    return found


def is_ours(function: Any) -> bool:
    """Whether a registry's or module's function is one of `kernels`."""
    return isinstance(function, partial) and getattr(function.func, "__module__", "") == kernels.__name__


def sequence_function(sigmoid_gate: bool, backend: str) -> partial[Any]:
    """The chunkwise function for a registry."""
    return partial(kernels.chunkwise_siging if sigmoid_gate else kernels.chunkwise, backend=backend)


def step_function(sigmoid_gate: bool, backend: str) -> partial[Any]:
    """The step function for a registry. Variants are the chunkwise kernels': the step has the name alone."""
    return partial(kernels.step_siging if sigmoid_gate else kernels.step, backend=split_backend(backend)[0])


def bind(module: nn.Module, backend: str, step: Any = None) -> None:
    """Have a backend module call these kernels, in every mode and at every length. module: a backend
    module; its configuration tells gate, normaliser, eps, chunk size and dtypes. backend: of tfla_tk.
    step: the step function to keep for the exponential gate; None for this package's."""
    config: Any = module.config
    sigmoid_gate = "siging" in getattr(config, "chunkwise_kernel", "")
    chosen = {"normalize": getattr(config, "normalize_siging", True)} if sigmoid_gate else {}
    if step is None or sigmoid_gate:
        # no other package has a step with sigmoid gate
        step = partial(step_function(sigmoid_gate, backend), **chosen)
    function = sequence_function(sigmoid_gate, backend)
    sequence = partial(
        function,
        **chosen,
        eps=config.eps,
        chunk_size=config.chunk_size,
        autocast_kernel_dtype=getattr(torch, config.autocast_kernel_dtype),
    )
    inference = partial(
        kernels.inference,
        sequence=sequence,
        one_token=partial(step, eps=config.eps),
        dtype_state=getattr(torch, config.inference_state_dtype),
    )
    train = sequence
    if type(module).__name__ == "xLSTMBackend":
        train, inference = partial(kernels.renamed, train), partial(kernels.renamed, inference)
    set_functions(module, (function, getattr(module, "sequence_kernel_fn", None), step, train, inference))


def functions(module: nn.Module) -> tuple[Any, ...]:
    """What a backend module calls, in the order of ATTRIBUTES."""
    return tuple(getattr(module, name) for name in ATTRIBUTES)


def set_functions(module: nn.Module, found: tuple[Any, ...]) -> None:
    """Have a backend module call these, in the order of ATTRIBUTES."""
    for name, function in zip(ATTRIBUTES, found, strict=True):
        setattr(module, name, function)


def rebuilt(module: nn.Module) -> tuple[Any, ...]:
    """What a backend module of the same configuration would call if it were built now."""
    cls = next(cls for cls in backend_classes() if isinstance(module, cls))
    fresh = cls.__new__(cls)
    cls.__init__(fresh, module.config)
    return functions(fresh)
