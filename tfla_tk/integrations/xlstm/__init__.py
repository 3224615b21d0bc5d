"""These kernels in xLSTM models: mlstm_kernels' mLSTMBackend, xlstm's xLSTMLarge, transformers' xLSTM.

    replace(model)     one model, built already: its mLSTM layers call these kernels from now on
    replace()          models built from now on: the kernel names they are configured with resolve to these
    register()         only adds names: "chunkwise--tfla_tk", "chunkwise--tfla_tk_siging", step kernels
                       "tfla_tk" and "tfla_tk_siging", for configurations that ask for them

`restore` is the way back; `replaced` and `restored` are context managers of the same arguments, for running
one model on both sides. What was replaced stays reachable: `original(name)`, and the kernel name with
"_original" behind it.

Importing this module imports none of those packages, and their order of import does not matter. The functions
need mlstm_kernels (pip install 'tfla_tk[xlstm]'), except for `replace(model)` of a transformers model on
transformers' own native kernels. docs/xlstm.md lists what resolves to what.
"""

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from tfla_tk.core.checks import fail, shown_name
from tfla_tk.core.dispatch import split_backend
from tfla_tk.integrations.xlstm import modules, registry
from tfla_tk.integrations.xlstm.modules import which

__all__ = ["original", "register", "replace", "replaced", "restore", "restored", "unregister", "which"]

_lock = threading.RLock()


def register() -> None:
    """Add this package's kernels to mlstm_kernels' registries; nothing that exists changes.

    New names: "chunkwise--tfla_tk", "chunkwise--tfla_tk_siging" and the step kernels "tfla_tk",
    "tfla_tk_siging", each with backend="auto"; and every present name again, with "_original" behind it.
    mLSTMBackendConfig, xLSTMLargeConfig and transformers' xLSTMConfig accept them. Calling it again does no
    harm.

    Raises:
        ImportError: mlstm_kernels is not installed; the message says how to install it.
    """
    with _lock:
        registry.add_names()


def unregister() -> None:
    """Undo `register` and every process-wide `replace`. Models that are built keep what they call."""
    with _lock:
        registry.remove_names()


def original(name: str) -> Callable[..., Any]:
    """The kernel that a name resolves to without `replace`, for comparison.

    Args:
        name: as in a configuration: "chunkwise--triton_xl_chunk", or a step kernel, "triton".

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    with _lock:
        registry.add_names()
        kind, key = _find(name)
        return kind.original(key)


def replace(
    model: nn.Module | None = None, *, backend: str = "auto", kernels: Iterable[str] | None = None
) -> list[str]:
    """Switch to these kernels: one model that is built already, or every model built from now on.

    Args:
        model: a model with mLSTM layers, whichever kernels it is configured with; configuration, weights and
            state_dict stay as they are. None: the kernel names in mlstm_kernels' registries, process-wide.
        backend: of tfla_tk: "auto", "tk", "triton", "reference" or name:variant. The comparison with
            mlstm_kernels as it is, padding and all, is `restore`, not "triton".
        kernels: without a model, the names to take over; None for all chunkwise kernels and step kernels of
            mlstm_kernels ("parallel--..." are left alone). A name with "siging" is the sigmoid gate.

    Returns:
        What was switched: names of submodules, or of kernels.

    Raises:
        ImportError: without a model: mlstm_kernels is not installed; the message says how to install it.
        TypeError, ValueError: no mLSTM layer in the model, an unknown backend or kernel name (the message
            lists the known ones), kernels together with a model.

    Warns:
        UserWarning: without a model, where models are alive that keep what they call.
    """
    split_backend(backend)
    with _lock:
        if model is not None:
            if kernels is not None:
                fail("kernels", "None together with a model: all of its layers are switched", repr(kernels))
            found = modules.backends_of(model)
            for module in found.values():
                modules.bind(module, backend)
            return list(found)
        if isinstance(kernels, str):
            fail("kernels", "a list of names", repr(kernels), TypeError)
        registry.add_names()
        chosen = [_find(name) for name in (_own_names() if kernels is None else kernels)]
        for kind, key in chosen:
            kind.registry[key] = kind.ours(key, backend)
        _warn_of_built_models("replace")
        return [kind.prefix + key for kind, key in chosen]


def restore(model: nn.Module | None = None) -> list[str]:
    """Switch back: one model to the kernels of its configuration, or all kernel names to mlstm_kernels' own.

    Args:
        model: as in `replace`. A model configured with "chunkwise--tfla_tk" has nothing to go back to.

    Returns:
        What was switched: names of submodules, or of kernels. Errors and warnings as in `replace`.
    """
    with _lock:
        if model is not None:
            found = modules.backends_of(model)
            with _original_registries():
                for module in found.values():
                    modules.set_functions(module, modules.rebuilt(module))
            return list(found)
        registry.add_names()
        switched = [name for name, (kind, key) in registry.replaceable().items() if _put_original(kind, key)]
        _warn_of_built_models("restore")
        return switched


@contextmanager
def replaced(
    model: nn.Module | None = None, *, backend: str = "auto", kernels: Iterable[str] | None = None
) -> Iterator[None]:
    """`replace` for a while: on leaving, everything resolves to what it did on entering. Contexts nest.

    Arguments and errors as in `replace`. Process-wide contexts of several threads must not overlap.
    """
    with _kept(model):
        replace(model, backend=backend, kernels=kernels)
        yield


@contextmanager
def restored(model: nn.Module | None = None) -> Iterator[None]:
    """`restore` for a while: on leaving, everything resolves to what it did on entering. Contexts nest.

    Arguments and errors as in `restore`. Process-wide contexts of several threads must not overlap.
    """
    with _kept(model):
        restore(model)
        yield


@contextmanager
def _kept(model: nn.Module | None) -> Iterator[None]:
    with _lock:
        if model is None:
            registry.add_names()
            names = [(kind.registry, dict(kind.registry)) for kind in registry.kinds()]
        else:
            called = [(module, modules.functions(module)) for module in modules.backends_of(model).values()]
    try:
        yield
    finally:
        with _lock:
            if model is None:
                for present, before in names:
                    present.update(before)
                    for key in present.keys() - before.keys():
                        del present[key]
            else:
                for module, found in called:
                    modules.set_functions(module, found)


def _find(name: str) -> tuple[registry.Kind, str]:
    known = registry.replaceable()
    if name not in known:
        fail("kernel", f"one of {', '.join(sorted(known))}", shown_name(name, known))
    return known[name]


def _own_names() -> list[str]:
    """What `replace` takes over: mlstm_kernels' own kernels, not those that others registered."""
    return [
        name
        for name, (kind, key) in registry.replaceable().items()
        if getattr(kind.original(key), "__module__", "").startswith("mlstm_kernels.")
    ]


def _put_original(kind: registry.Kind, key: str) -> bool:
    """Whether the name resolved to something else before."""
    before = kind.registry[key]
    kind.registry[key] = kind.original(key)
    return before is not kind.registry[key]


@contextmanager
def _original_registries() -> Iterator[None]:
    """Within it models are built on mlstm_kernels' own kernels, where it is used."""
    if "mlstm_kernels.torch.backend_module" not in sys.modules:
        yield
        return
    with _kept(None):
        for kind, key in registry.replaceable().values():
            _put_original(kind, key)
        yield


def _warn_of_built_models(verb: str) -> None:
    """Tell of models that were built before and do not follow."""
    ours = verb == "replace"
    behind = sum(modules.is_ours(module.chunkwise_kernel_fn) != ours for module in registry.built())
    if behind:
        warnings.warn(
            f"{behind} mLSTM layers were built before {verb}() and keep their kernels: "
            f"{verb}(model) switches a model that is built",
            stacklevel=3,
        )
