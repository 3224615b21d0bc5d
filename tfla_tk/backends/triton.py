"""Adapters onto the existing Triton kernels: mlstm_kernels (mLSTM) and fla (the [B, T, H, D] operators).

They are the baseline of every comparison, used as installed packages and called as their users call them.
What they get wrong is refused here with the reason, or marked "by name only" where the result is usable but
not exact; docs/triton-baselines.md lists each defect with the test that shows it.

A variant is a kernel family with a chunk size, "triton:xl_chunk_128"; without the size, "triton:xl_chunk",
it takes the call's chunk_size. Plain "triton" is `default_variant`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tfla_tk import env, step_ops
from tfla_tk.backends.fla_own import on_its_own, original
from tfla_tk.calls.linear import LinearCall
from tfla_tk.calls.mlstm import MLSTMCall
from tfla_tk.core.checks import fail
from tfla_tk.core.errors import UnsupportedError
from tfla_tk.core.installed import find_package
from tfla_tk.core.support import SUPPORTED, Support

_log = logging.getLogger("tfla_tk")
INT32_LIMIT = 2**31  # elements that an int32 offset reaches
GRID_LIMIT = 65535  # blocks along the second and the third dimension of a CUDA grid
INTERPRETED = env.TRITON_INTERPRET.get() == "1"

_INSTALL = "pip install 'tfla_tk[baselines]'"
if sys.version_info < (3, 11):
    _INSTALL += ", on Python 3.11 or newer"
_TRANSFORMED = Support(
    False, "mlstm_kernels has no rules for torch.func transforms", "use backend 'tk' or 'reference'"
)
_MIN_TILE = 16
_MAX_TILE = 64
# Chunk sizes in the order in which `default_variant` tries them: the fastest, the smaller ones for lengths
# that it does not divide, the larger ones for more chunks than a grid or an int32 offset reaches. With chunks
# of 4096 every tensor that int32 offsets reach fits the grid: 2^31 elements are 2^27 tokens of 16, which are
# 32,768 chunks. limit_chunk has no larger ones: a block holds a whole chunk.
_CHUNK_SIZES = {
    "xl_chunk": (128, 64, 32, 16, 256, 512, 1024, 2048, 4096),
    "siging_xl": (128, 64, 32, 16, 256, 512, 1024, 2048, 4096),
    "limit_chunk": (64, 32, 16),
}


@dataclass(frozen=True)
class Family:
    """One mLSTM kernel family of mlstm_kernels and the chunk sizes worth timing."""

    module: str
    function: str
    sigmoid_gate: bool
    chunk_sizes: tuple[int, ...]


FAMILIES = {
    "limit_chunk": Family("triton_limit_chunk", "mlstm_chunkwise__limit_chunk", False, (64,)),
    "xl_chunk": Family("triton_xl_chunk", "mlstm_chunkwise__xl_chunk", False, (64, 128, 256)),
    "siging_xl": Family("triton_xl_chunk_siging", "mlstm_siging_chunkwise__xl_chunk", True, (64, 128, 256)),
}

_STEP_MODULE = "mlstm_kernels.torch.recurrent.triton_step"

# public name -> module of fla
FLA_OPS = {
    "chunk_gla": "fla.ops.gla",
    "chunk_simple_gla": "fla.ops.simple_gla",
    "chunk_retention": "fla.ops.retention",
    "chunk_lightning_attn": "fla.ops.lightning_attn",
    "chunk_delta_rule": "fla.ops.delta_rule",
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
}


def triton_version() -> str | None:
    """The version of Triton, or None where it is not installed. It is imported only where metadata fails."""
    if find_package("triton") is None:
        return None
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # pytorch-triton and others bring the module too
        try:
            version: str | None = getattr(importlib.import_module("triton"), "__version__", None)
        except Exception:  # whatever a package of others does on import
            return None
        return version


def _missing(package: str, distribution: str) -> Support | None:
    """Why a package cannot be used here; it is not imported."""
    version = triton_version()
    if version is None:
        return Support(False, "triton is not installed", _INSTALL)
    if find_package(package) is None:
        return Support(False, f"{distribution} is not installed", _INSTALL)
    if tuple(int(x) for x in re.findall(r"\d+", version)[:2]) >= (3, 9):
        return Support(False, f"triton {version} has no block pointers, which {distribution} uses", _INSTALL)
    return None


# looked up once at import, so that torch.compile sees constants
MLSTM_KERNELS_MISSING = _missing("mlstm_kernels", "mlstm-kernels")
FLA_MISSING = _missing("fla", "fla-core")


def variants(op: str) -> list[str]:
    """The variants of an operator that are worth timing, as `backend=` takes them.

    Args:
        op: "mlstm_chunkwise", "mlstm_siging_chunkwise" or one of FLA_OPS.
    """
    if op in FLA_OPS:
        return ["triton:fla"]
    if op not in ("mlstm_chunkwise", "mlstm_siging_chunkwise"):
        fail("op", f"one of {', '.join(('mlstm_chunkwise', 'mlstm_siging_chunkwise', *FLA_OPS))}", repr(op))
    sigmoid_gate = op == "mlstm_siging_chunkwise"
    return [
        f"triton:{name}_{size}"
        for name, family in FAMILIES.items()
        if family.sigmoid_gate == sigmoid_gate
        for size in family.chunk_sizes
    ]


def run_variant(variant: str, op: str, *args: Any, **kwargs: Any) -> Any:
    """Call one variant with the arguments of the public function `op`.

    Args:
        variant: one of `variants(op)`.
        op, args, kwargs: the public function's name and its arguments, without `backend`.

    Raises:
        UnsupportedError: the variant cannot serve the call.
    """
    if op in FLA_OPS:
        if variant != "triton:fla":
            fail("variant", f"'triton:fla' for {op}", repr(variant))
        return fla_op(op, *args, **kwargs)
    from tfla_tk import mlstm as public

    variants(op)
    return getattr(public, op)(*args, **kwargs, backend=variant)


# mLSTM


def parse_variant(variant: str, call: MLSTMCall) -> tuple[str, int]:
    """(family, chunk size) of "family" or "family_size"; ValueError for anything else."""
    match = re.fullmatch(r"(.+?)(?:_(\d+))?", variant)
    name, size = (match[1], match[2]) if match else (variant, None)
    if name not in FAMILIES:
        fail("backend", f"'triton:' and one of {', '.join(FAMILIES)}", f"'triton:{variant}'")
    return name, int(size) if size else call.chunk_size


def default_variant(call: MLSTMCall) -> tuple[str, int]:
    """The fastest family and chunk size that are correct for the call: 128 where length and grid allow."""
    families = ["siging_xl"] if call.sigmoid_gate else ["xl_chunk", "limit_chunk"]
    for name in families:
        for size in _CHUNK_SIZES[name]:
            if _refusal(call, name, size) is None:
                return name, size
    # none: the smallest chunk tells what is wrong
    return families[-1], 16


def supports_mlstm(call: MLSTMCall, variant: str | None = None) -> Support:
    """Whether mlstm_kernels serves the call correctly; gradients that are not exact are "by name only"."""
    name, chunk_size = default_variant(call) if variant is None else parse_variant(variant, call)
    if call.transformed:
        return _TRANSFORMED
    refusal = _refusal(call, name, chunk_size)
    if refusal is not None:
        return refusal
    if INTERPRETED and call.device.type == "cpu":
        return Support(True, "runs in Triton's interpreter", auto=False)
    if call.requires_grad and call.normalize:
        return Support(
            True,
            "its gradients leave out the normaliser: exact only where a scale-invariant norm follows h",
            "name the backend to use it nevertheless",
            auto=False,
        )
    if call.requires_grad and call.return_last_states:
        return Support(
            True,
            "its forget gate gradient leaves out the last state",
            "name the backend to use it nevertheless",
            auto=False,
        )
    return Support(True)


def mlstm(
    call: MLSTMCall,
    variant: str | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: Tensor | None,
    n_initial: Tensor | None,
    m_initial: Tensor | None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """h [B, NH, S, V] and the last state, (c, n, m) or with the sigmoid gate (c, n); () unless asked for.

    cu_seqlens is None: `supports_mlstm` refuses variable length.
    """
    name, chunk_size = default_variant(call) if variant is None else parse_variant(variant, call)
    family = FAMILIES[name]
    function = getattr(importlib.import_module(_module_of(name)), family.function)
    if c_initial is not None and n_initial is None:
        # the unnormalised kernel takes an n and ignores it
        n_initial = c_initial.new_zeros(c_initial.shape[:3])
    states = {"c_initial": c_initial, "n_initial": n_initial, "m_initial": m_initial}
    options: dict[str, Any] = {key: None if t is None else t.float() for key, t in states.items()}
    options |= {"return_last_states": call.return_last_states, "eps": call.eps, "chunk_size": chunk_size}
    if name != "limit_chunk":
        options["recompute_states_in_bw"] = call.recompute_states
    if call.sigmoid_gate:
        options["normalize"] = call.normalize
    # its launches go to the current device
    device = torch.cuda.device(call.device) if call.device.type == "cuda" else nullcontext()
    with device, torch.autocast(call.device.type, enabled=False):
        out = function(q, k, v, i, f, **options)
    if not call.return_last_states:
        return out, ()
    h, last = out
    if not call.normalize:
        # comes back uninitialised
        last = (last[0], torch.zeros_like(last[1]))
    return h, last


def load(kernel: str, call: MLSTMCall, variant: str | None = None) -> Support:
    """Import what serves a call that is supported: an installed package may still fail to import."""
    if kernel == "mlstm":
        name, _ = default_variant(call) if variant is None else parse_variant(variant, call)
        fault = _import_fault(_module_of(name))
    else:
        fault = _import_fault(_STEP_MODULE)
    return Support(False, fault, _INSTALL, failed=True) if fault else SUPPORTED


def _module_of(name: str) -> str:
    return f"mlstm_kernels.torch.chunkwise.{FAMILIES[name].module}"


@functools.cache
def _import_fault(module: str) -> str:
    """Why a module cannot be imported; empty when it is."""
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a package of others does on import
        _log.warning("the Triton kernels cannot be used: %s does not import", module, exc_info=True)
        return f"{module} does not import: {type(error).__name__}: {error}"
    return ""


_import_fault._dynamo_marked_constant = True  # type: ignore[attr-defined]


def supports_mlstm_step(call: MLSTMCall, variant: str | None = None) -> Support:
    """Whether mlstm_kernels' Triton step serves one token; ValueError for a variant: it has one form."""
    if variant is not None:
        fail("backend", "'triton' for a step", repr(f"triton:{variant}"))
    if call.sigmoid_gate:
        return Support(False, "mlstm_kernels has no step with sigmoid input gate", "use backend='reference'")
    if call.transformed:
        return _TRANSFORMED
    unusable = _unusable(call.device, MLSTM_KERNELS_MISSING)
    if unusable is not None:
        return unusable
    if call.dtype == torch.float64:
        return Support(False, "Triton kernels have no float64", "use float32 or backend='reference'")
    if call.requires_grad:
        return Support(False, "its step has no gradients", "use torch.no_grad() or backend='reference'")
    for label, dim in (("DHQK", call.dim_qk), ("DHHV", call.dim_v)):
        if dim < _MIN_TILE or dim % min(_MAX_TILE, _next_power_of_2(dim)) != 0:
            return Support(
                False,
                f"{label} = {dim} makes the step read and write out of bounds",
                f"pad {label} to 16, 32, 64 or a multiple of 64",
            )
    elements = call.batch * call.heads * call.dim_qk * call.dim_v
    if elements > INT32_LIMIT:
        return Support(False, f"its int32 offsets wrap: {elements:,} elements in c", "split the batch")
    rows = call.batch * call.heads
    if rows > GRID_LIMIT:
        return _too_many("batch x heads", rows, "split the batch or the heads")
    if INTERPRETED and call.device.type == "cpu":
        return Support(True, "runs in Triton's interpreter", auto=False)
    return SUPPORTED


def mlstm_step(
    call: MLSTMCall,
    variant: str | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c: Tensor,
    n: Tensor,
    m: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """h [B, NH, V] and the next state (c, n, m) as the call wants it, by mlstm_kernels' Triton step."""
    module = importlib.import_module(_STEP_MODULE)
    device = torch.cuda.device(call.device) if call.device.type == "cuda" else nullcontext()
    with device:
        h, state = module.mlstm_recurrent_step__triton(
            q, k, v, i, f, c, n, m, eps=call.eps, dtype_state=torch.float32
        )
    return h, step_ops.stored(call, state, (c, n, m))


def supports_mlstm_sequence(call: MLSTMCall, variant: str | None = None) -> Support:
    """Never; ValueError for a variant."""
    if variant is not None:
        fail("backend", "'triton' for a few tokens", repr(f"triton:{variant}"))
    return Support(
        False,
        "mlstm_kernels has no Triton kernel for a few tokens",
        "use mlstm_chunkwise, mlstm_step or backend='reference'",
    )


def _refusal(call: MLSTMCall, name: str, chunk_size: int) -> Support | None:
    """Why this family at this chunk size cannot serve the call, or None."""
    family = FAMILIES[name]
    if family.sigmoid_gate != call.sigmoid_gate:
        gate = "sigmoid" if family.sigmoid_gate else "exponential"
        return Support(False, f"{name} has the {gate} input gate", f"variants: {', '.join(_names(call))}")
    if call.varlen:
        return Support(
            False,
            "mlstm_kernels has no variable length",
            "call once per sequence, or use backend 'tk' or 'reference'",
        )
    unusable = _unusable(call.device, MLSTM_KERNELS_MISSING)
    if unusable is not None:
        return unusable
    if call.dtype == torch.float64:
        return Support(False, "Triton kernels have no float64", "use float32 or backend='reference'")
    for label, dim in (("DHQK", call.dim_qk), ("DHHV", call.dim_v)):
        if dim < _MIN_TILE:
            return Support(
                False, f"{label} = {dim} is below Triton's smallest tile", f"pad {label} to {_MIN_TILE}"
            )
    if call.dim_qk % min(_MAX_TILE, _next_power_of_2(call.dim_qk)) != 0:
        return Support(
            False,
            f"DHQK = {call.dim_qk} makes the kernels read and write out of bounds",
            "pad DHQK to 16, 32, 64 or a multiple of 64",
        )
    return _length_refusal(call, name, chunk_size) or _gradient_refusal(call, name, chunk_size)


def _length_refusal(call: MLSTMCall, name: str, chunk_size: int) -> Support | None:
    seq = call.seq
    if chunk_size < _MIN_TILE or chunk_size & (chunk_size - 1):
        return Support(False, f"chunk_size = {chunk_size}", "use a power of two of at least 16")
    if name != "limit_chunk" and _MIN_TILE <= seq < 128 and seq & (seq - 1) == 0:
        # one chunk of S, whatever chunk_size says
        chunk_size = seq
    elif name != "limit_chunk" and seq < 128:
        return Support(False, f"{name} needs S >= 128 or a power of two of at least 16, S = {seq}", "pad S")
    if seq % chunk_size != 0:
        return Support(False, f"S = {seq} is no multiple of the chunk size {chunk_size}", "pad S")
    rows = call.batch * call.heads
    if rows > GRID_LIMIT:
        return _too_many("batch x heads", rows, "split the batch or the heads")
    states = rows * (seq // chunk_size + 1) * call.dim_qk * call.dim_v
    # limit_chunk sums dv over slices of the query head dimension
    slices = call.dim_qk // _MAX_TILE if name == "limit_chunk" and call.requires_grad else 1
    largest = max(states, rows * seq * max(call.dim_qk, max(slices, 1) * call.dim_v))
    if largest > INT32_LIMIT:
        return Support(
            False,
            f"its int32 offsets wrap: {largest:,} elements in one tensor",
            "split the batch or the heads",
        )
    return _grid_refusal(name, rows, seq // chunk_size, chunk_size)


def _grid_refusal(name: str, rows: int, chunks: int, chunk_size: int) -> Support | None:
    """Whether a launch exceeds CUDA's grid by its chunks: its blocks along y and z, forward and backward.

    The kernels over the states have batch x heads along z. Those over the outputs and gradients have, in
    limit_chunk, the chunks along y and batch x heads along z; in the others the tiles of a chunk along y and
    chunks x batch x heads along z. Head dimensions lie along x, or along y in tiles of 64.

    Args:
        rows: batch times heads. chunks: of one sequence.
    """
    if name == "limit_chunk":
        if chunks > GRID_LIMIT:
            return _too_many("chunks", chunks, "use larger chunks")
        return None
    if chunks * rows > GRID_LIMIT:
        remedy = "use larger chunks, or split the batch or the heads"
        return _too_many("chunks x batch x heads", chunks * rows, remedy)
    tiles = chunk_size // min(chunk_size, _MAX_TILE)
    if tiles > GRID_LIMIT:
        return _too_many("tiles of a chunk", tiles, "use smaller chunks")
    return None


def _too_many(what: str, count: int, remedy: str) -> Support:
    return Support(False, f"{what} = {count:,}, a CUDA grid takes {GRID_LIMIT:,} there", remedy)


def _gradient_refusal(call: MLSTMCall, name: str, chunk_size: int) -> Support | None:
    if name == "xl_chunk" and call.requires_grad and chunk_size > 128 and call.seq > chunk_size:
        return Support(
            False,
            f"xl_chunk computes wrong gradients for chunk_size = {chunk_size} > 128",
            "use chunk_size 64 or 128, or torch.no_grad()",
        )
    return None


def _names(call: MLSTMCall) -> list[str]:
    return [name for name, family in FAMILIES.items() if family.sigmoid_gate == call.sigmoid_gate]


def _unusable(device: torch.device, missing: Support | None) -> Support | None:
    """Device and installation."""
    if device.type != "cuda" and not (INTERPRETED and device.type == "cpu"):
        return Support(
            False, f"Triton kernels run on a GPU, the tensors are on {device}", "move them to a CUDA device"
        )
    return missing


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


# fla


def supports_fla(op: str, q: Tensor | LinearCall, *, requires_grad: bool = False) -> Support:
    """Whether fla's operator serves a call.

    Args:
        op: one of FLA_OPS.
        q: the queries, or the description of the call: device and dtype decide.
        requires_grad: a gradient will be recorded.
    """
    unusable = _unusable(q.device, FLA_MISSING)
    if unusable is not None:
        return unusable
    if q.dtype == torch.float64:
        return Support(False, "Triton kernels have no float64", "use float32 or the reference")
    if op == "chunk_delta_rule" and q.dtype == torch.float32:
        return Support(False, "fla's chunk_delta_rule does not take float32", "use bfloat16 or float16")
    if (
        requires_grad
        and op in ("chunk_simple_gla", "chunk_gated_delta_rule")
        and _gated_backward_is_guarded()
    ):
        return Support(
            False,
            "fla refuses the gated backward on Hopper with triton >= 3.4 and < 3.7.1, which miscompiles it",
            "use triton >= 3.7.1",
        )
    return Support(True)


def fla_op(op: str, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Call fla's operator: tensors [B, T, H, D], initial state cast to fp32.

    Args:
        op: one of FLA_OPS.
        args, kwargs: fla's own arguments of that operator, q first.

    Returns:
        (o [B, T, H, V], final state fp32 [N, H, K, V] or None).

    Raises:
        UnsupportedError: fla cannot serve the call.
    """
    q = args[0] if args else kwargs["q"]
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    requires_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    support = supports_fla(op, q, requires_grad=requires_grad)
    if not support.ok:
        raise UnsupportedError(f"{op} on backend 'triton'", support.reason, support.remedy)
    state = kwargs.get("initial_state")
    if state is not None:
        kwargs["initial_state"] = state.float()
    function: Callable[..., tuple[Tensor, Tensor | None]] = getattr(importlib.import_module(FLA_OPS[op]), op)
    with on_its_own():
        return original(function)(*args, **kwargs)


def _gated_backward_is_guarded() -> bool:
    """fla's own check, so that a lifted guard counts here too."""
    guard = importlib.import_module("fla.ops.common.chunk_o")
    return bool(guard.IS_NVIDIA_HOPPER and guard.TRITON_ABOVE_3_4_0 and not guard.TRITON_ABOVE_3_7_1)
