"""mlstm_kernels' registries, and the places that check kernel names.

A registry is a dict of functions. A backend module reads it once, when it is built.
"""

import gc
import importlib
import sys
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, NamedTuple, get_args

from tfla_tk.integrations.xlstm import modules

ORIGINAL = "_original"
OURS = ("tfla_tk", "tfla_tk_siging")

# registry's module and name there, Literal with the names of its kernels, field of configurations
_CHUNKWISE = ("mlstm_kernels.torch.chunkwise", "registry", "ChunkwiseKernelType", "chunkwise_kernel")
_STEP = ("mlstm_kernels.torch.recurrent", "registry_step", "StepKernelType", "step_kernel")

_BACKEND_MODULE = "mlstm_kernels.torch.backend_module"
_TYPES_MODULES = (_BACKEND_MODULE, "xlstm.xlstm_large.model")
_HF_CONFIG = "transformers.models.xlstm.configuration_xlstm"


class Kind(NamedTuple):
    """Chunkwise or step kernels."""

    prefix: str
    registry: dict[str, Callable[..., Any]]
    literal: str
    field: str

    def ours(self, key: str, backend: str) -> Any:
        """This package's function for a name: the sigmoid gate where the name says so."""
        return modules.function_of(bool(self.prefix), "siging" in key, backend)

    def original(self, key: str) -> Callable[..., Any]:
        return self.registry[key + ORIGINAL]


def kinds() -> tuple[Kind, Kind]:
    """The registries of chunkwise and of step kernels. ImportError: mlstm_kernels is not installed."""
    try:
        found = [getattr(importlib.import_module(module), name) for module, name, *_ in (_CHUNKWISE, _STEP)]
        importlib.import_module(_BACKEND_MODULE)
    except ImportError as error:
        python = "" if sys.version_info >= (3, 11) else " (it needs Python 3.11 or newer)"
        raise ImportError(
            f"mlstm_kernels cannot be imported: {error}. "
            f"Install it with pip install 'tfla_tk[xlstm]' or pip install mlstm-kernels==2.0.6{python}"
        ) from error
    return (Kind("chunkwise--", found[0], *_CHUNKWISE[2:]), Kind("", found[1], *_STEP[2:]))


def add_names() -> None:
    """Add this package's kernels, and the present ones a second time under "<name>_original"."""
    for kind in kinds():
        for key, function in list(kind.registry.items()):
            if not key.endswith(ORIGINAL) and key not in OURS:
                kind.registry.setdefault(key + ORIGINAL, function)
        for key in OURS:
            kind.registry.setdefault(key, kind.ours(key, "auto"))
        _widen(kind)
    _hook()


def remove_names() -> None:
    """Undo `add_names`; the originals return to their names."""
    for kind in kinds():
        _narrow(kind)
        for key in [key for key in kind.registry if key.endswith(ORIGINAL)]:
            kind.registry[key.removesuffix(ORIGINAL)] = kind.registry.pop(key)
        for key in OURS:
            kind.registry.pop(key, None)
    cls = _backend_class()
    cls.__init__ = getattr(cls.__init__, "tfla_tk_original", cls.__init__)


def replaceable() -> dict[str, tuple[Kind, str]]:
    """Kernel names as configurations have them, with their kind and their key in its registry."""
    return {
        kind.prefix + key.removesuffix(ORIGINAL): (kind, key.removesuffix(ORIGINAL))
        for kind in kinds()
        for key in kind.registry
        if key.endswith(ORIGINAL)
    }


# Kernel names in types: dataclasses do not check them, Hugging Face's configuration does


def _names(kind: Kind) -> tuple[str, ...]:
    return tuple(kind.prefix + key for key in kind.registry if key in OURS or key.endswith(ORIGINAL))


def _widen(kind: Kind) -> None:
    """Let the new names pass: in the types that configurations will be made from, and in one made already."""
    names = _names(kind)
    _change_types(kind, lambda known: known + names)
    validators = _hf_validators()
    if kind.field in validators and _original_validators(validators[kind.field]) is None:
        validators[kind.field] = [_accepting(kind, validators[kind.field])]


def _accepting(kind: Kind, validators: list[Callable[[Any], None]]) -> Callable[[Any], None]:
    def validate(value: Any) -> None:
        if value in _names(kind):
            return
        for validator in validators:
            validator(value)

    validate.tfla_tk_original = validators  # type: ignore[attr-defined]
    return validate


def _original_validators(validators: list[Callable[[Any], None]]) -> list[Callable[[Any], None]] | None:
    """Those that `_accepting` stands for; kept there, as what it is installed in outlives this module."""
    return getattr(validators[0], "tfla_tk_original", None) if validators else None


def _narrow(kind: Kind) -> None:
    names = _names(kind)
    _change_types(kind, lambda known: tuple(name for name in known if name not in names))
    validators = _hf_validators()
    original = _original_validators(validators.get(kind.field, []))
    if original is not None:
        validators[kind.field] = original


def _change_types(kind: Kind, change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> None:
    for name in _TYPES_MODULES:
        module = sys.modules.get(name)
        if module is not None:
            setattr(module, kind.literal, Literal[change(get_args(getattr(module, kind.literal)))])


def _hf_validators() -> dict[str, list[Callable[[Any], None]]]:
    """The validators of transformers' xLSTMConfig by field, which can be changed; empty where it is not
    imported."""
    return getattr(getattr(sys.modules.get(_HF_CONFIG), "xLSTMConfig", None), "__validators__", {})


# Backend modules being built


def built() -> list[Any]:
    """The mLSTMBackends that are alive, while the hook is in."""
    return list(getattr(_backend_class().__init__, "tfla_tk_built", ()))


def _backend_class() -> Any:
    return importlib.import_module(_BACKEND_MODULE).mLSTMBackend


def _hook() -> None:
    """Have backend modules that resolve to this package's kernels call them without mlstm_kernels' wrapper.

    The wrapper pads q, k, v, copying them, and knows neither normalize_siging nor a step with sigmoid gate.
    """
    cls = _backend_class()
    original = cls.__init__
    if hasattr(original, "tfla_tk_original"):
        return
    # those built so far are known to the garbage collector alone, which takes its time to tell
    alive = weakref.WeakSet(x for x in gc.get_objects() if issubclass(type(x), cls))

    @wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        alive.add(self)
        if modules.is_ours(self.chunkwise_kernel_fn):
            backend = self.chunkwise_kernel_fn.keywords["backend"]
            modules.bind(self, backend, step=self.step_kernel_fn)

    # kept here: the hook outlives this module where that is loaded again
    build.tfla_tk_original = original  # type: ignore[attr-defined]
    build.tfla_tk_built = alive  # type: ignore[attr-defined]
    cls.__init__ = build
