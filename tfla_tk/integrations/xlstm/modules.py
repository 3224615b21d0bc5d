"""Models that are built already: their backend modules, which functions those call, and by which backend.

A backend module looks its functions up when it is built and keeps them in the attributes ATTRIBUTES. There
are two classes of them: mlstm_kernels' mLSTMBackend, which xlstm and transformers build, and xLSTMBackend, of
which transformers has its own where xlstm is not installed.
"""

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tfla_tk.core import dispatch
from tfla_tk.core.checks import FLOAT_DTYPES, autocast_dtype
from tfla_tk.core.support import Choice
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


def function_of(of_sequences: bool, sigmoid_gate: bool, backend: str) -> partial[Any]:
    """The chunkwise or the step function for a registry. Variants are the chunkwise kernels': the step has
    the name alone."""
    name = ("chunkwise" if of_sequences else "step") + ("_siging" if sigmoid_gate else "")
    named = backend if of_sequences else dispatch.split_backend(backend)[0]
    return partial(getattr(kernels, name), backend=named)


def bind(module: nn.Module, backend: str, step: Any = None) -> None:
    """Have a backend module call these kernels, in every mode and at every length. module: a backend
    module; its configuration tells gate, normaliser, eps, chunk size and dtypes. backend: of tfla_tk.
    step: the step function to keep for the exponential gate; None for this package's."""
    config: Any = module.config
    sigmoid_gate = "siging" in getattr(config, "chunkwise_kernel", "")
    chosen = {"normalize": getattr(config, "normalize_siging", True)} if sigmoid_gate else {}
    if step is None or sigmoid_gate:
        # no other package has a step with sigmoid gate
        step = partial(function_of(False, sigmoid_gate, backend), **chosen)
    function = function_of(True, sigmoid_gate, backend)
    dtype = getattr(torch, config.autocast_kernel_dtype)
    of_config = {"eps": config.eps, "chunk_size": config.chunk_size, "autocast_kernel_dtype": dtype}
    sequence = partial(function, **chosen, **of_config)
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
    for name, function in zip(ATTRIBUTES, found, strict=True):
        setattr(module, name, function)


def rebuilt(module: nn.Module) -> tuple[Any, ...]:
    """What a backend module of the same configuration would call if it were built now."""
    cls = next(cls for cls in backend_classes() if isinstance(module, cls))
    fresh = cls.__new__(cls)
    cls.__init__(fresh, module.config)
    return functions(fresh)


def which(model: nn.Module, batch: int = 1, seq: int = 2048) -> Choice:
    """Say which backend of tfla_tk a model's mLSTM layers would use, and why not the others.

    Head dims, gate, dtype and device are those of the first layer, the modes are the caller's:
    torch.no_grad(), torch.autocast. Where its projections are quantised (int8, uint8, fp8), the dtype is that
    of the weights beside them, since such projections return the dtype that they are given. Nothing is
    computed. The layer need not be switched yet; one that is switched is asked with its own backend=.

    Args:
        model: xLSTMLarge, transformers' xLSTM, or another module with such layers.
        batch: sequences in a batch.
        seq: tokens in a sequence; 1 asks about the step, more about a prompt without a state. Up to 16 that
            go on from one are `mlstm_sequence` where tk serves it, which is not told here.

    Returns:
        The choice with a verdict per backend; `print` it to read it.

    Raises:
        TypeError, ValueError: no mLSTM layer in the model.
        UnsupportedError: the backend that the layer was switched to by name cannot serve it.
    """
    name, module = next(iter(backends_of(model).items()))
    layer: Any = model.get_submodule(name.rpartition(".")[0])
    if not hasattr(layer, "qk_dim"):
        raise ValueError(
            f"model: expected an mLSTM layer around {name or 'the module'} with qk_dim and v_dim"
        )
    config: Any = module.config
    backend: Any = module.chunkwise_kernel_fn
    sigmoid_gate = "siging" in getattr(config, "chunkwise_kernel", "")
    heads = layer.config.num_heads
    dim_qk, dim_v = layer.qk_dim // heads, layer.v_dim // heads
    dtype, device = _computes_in(model, layer)
    options: dict[str, Any] = {"eps": config.eps}
    if is_ours(backend):
        options["backend"] = backend.keywords["backend"]
    if sigmoid_gate:
        options["normalize"] = getattr(config, "normalize_siging", True)
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in layer.parameters())
    with FakeTensorMode():

        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(batch, heads, *shape, dtype=dtype, device=device, requires_grad=grad)

        if seq == 1:
            # the step itself casts nothing: it gets what the projections return
            cast = autocast_dtype(empty(), None) or dtype
            tokens = [empty(*shape, dtype=cast) for shape in ((dim_qk,), (dim_qk,), (dim_v,), (1,), (1,))]
            state = (empty(dim_qk, dim_v), empty(dim_qk), *(() if sigmoid_gate else (empty(1).detach(),)))
            if "backend" in options:
                options["backend"] = options["backend"].partition(":")[0]
            op = "mlstm_siging_step" if sigmoid_gate else "mlstm_step"
            return dispatch.which(op, *tokens, *state, **options)
        operands = (empty(seq, dim_qk), empty(seq, dim_qk), empty(seq, dim_v), empty(seq), empty(seq))
        options["return_last_states"] = config.mode == "inference" or config.return_last_states
        options["autocast_kernel_dtype"] = getattr(torch, config.autocast_kernel_dtype)
        op = "mlstm_siging_chunkwise" if sigmoid_gate else "mlstm_chunkwise"
        return dispatch.which(op, *operands, **options)


def _computes_in(model: nn.Module, layer: nn.Module) -> tuple[torch.dtype, torch.device]:
    """dtype and device of what a layer's projections return."""
    own: Any = getattr(getattr(layer, "out_proj", None), "weight", None)
    tensors = [("out_proj.weight", own)] if isinstance(own, Tensor) else []  # some packages make it a method
    for module in (layer, model):
        tensors += [*module.named_parameters(), *module.named_buffers()]
    device = tensors[0][1].device if tensors else torch.device("cpu")
    # weights and biases alone: the scales of quantised weights have dtypes of their own
    weights = [x for name, x in tensors if name.rpartition(".")[2] in ("weight", "bias")]
    dtypes = (x.dtype for x in weights if x.dtype in FLOAT_DTYPES)
    return next(dtypes, torch.get_default_dtype()), device
