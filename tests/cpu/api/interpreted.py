"""Runs the Triton adapters of mLSTM on a CPU in Triton's interpreter and prints what it measured as JSON.

Started by test_triton_interpreted.py in a process of its own: TRITON_INTERPRET is read when triton is
imported and must not leak into other tests. Usage: python interpreted.py <case> ...; each case maps names
to numbers, most of them relative Frobenius errors against the fp64 reference.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
# mlstm_kernels compiles its gate arithmetic, which the interpreter does not need
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import json
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tfla_tk
from tfla_tk import reference

HEADS, DIM_QK, DIM_V = 2, 16, 32
MLSTM = {"exp": tfla_tk.mlstm_chunkwise, "sig": tfla_tk.mlstm_siging_chunkwise}
INPUTS = ("q", "k", "v", "i", "f")

Loss = Callable[[Any], Tensor]
Numbers = dict[str, float]


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error; 0 where both are zero."""
    difference, norm = (actual.double() - expected.double()).norm(), expected.double().norm()
    return float(difference / norm) if norm > 0 else float(difference)


def double(tensors: list[Tensor]) -> list[Tensor]:
    return [t.double() for t in tensors]


def mlstm_inputs(seq: int, dim_qk: int = DIM_QK) -> list[Tensor]:
    g = torch.Generator().manual_seed(seq)
    heads = HEADS if seq <= 96 else 1  # the interpreter's time goes with them
    shapes = [(1, heads, seq, dim_qk)] * 2 + [(1, heads, seq, DIM_V)] + [(1, heads, seq)] * 2
    q, k, v, i, f = (torch.randn(shape, generator=g) for shape in shapes)
    return [q, k, v, i, f + 3]


def mlstm_state(gate: str, heads: int = HEADS) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    c, n, m = (torch.randn(1, heads, *dims, generator=g) for dims in ((DIM_QK, DIM_V), (DIM_QK,), (1,)))
    return [c, n, m] if gate == "exp" else [c, n]


def projection(out: Tensor) -> Tensor:
    """A plain loss: a fixed random projection."""
    g = torch.Generator().manual_seed(2)
    return (out * torch.randn(out.shape, generator=g).to(out.dtype)).sum()


def after_norm(out: Tensor) -> Tensor:
    """The loss behind a scale-invariant norm, as in xLSTM's block."""
    return projection(out / out.pow(2).mean(-1, keepdim=True).sqrt())


def gradients(function: Callable[..., Any], inputs: list[Tensor], loss: Loss, **options: Any) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in inputs]
    loss(function(*leaves, **options)).backward()
    return [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]


def gradient_errors(
    function: Callable[..., Any],
    inputs: list[Tensor],
    names: tuple[str, ...],
    loss: Loss,
    variant: str,
    **options: Any,
) -> Numbers:
    actual = gradients(function, inputs, loss, backend=variant, **options)
    expected = gradients(function, double(inputs), loss, backend="reference", **options)
    return {f"d{name}": error(a, e) for name, a, e in zip(names, actual, expected, strict=True)}


def mlstm_forward(gate: str, variant: str, seq: int, normalize: bool = True) -> Numbers:
    """h and the last state, from an initial state."""
    options: dict[str, Any] = {"return_last_states": True} | (
        {"normalize": normalize} if gate == "sig" else {}
    )
    tokens = mlstm_inputs(seq)
    inputs = tokens + mlstm_state(gate, heads=tokens[0].shape[1])
    h, last = MLSTM[gate](*inputs, backend=variant, **options)
    h_ref, last_ref = MLSTM[gate](*double(inputs), backend="reference", **options)
    return {"h": error(h, h_ref)} | {
        name: error(a, e) for name, a, e in zip("cnm"[: len(last)], last, last_ref, strict=True)
    }


def mlstm_step(dims: tuple[int, int], state_dtype: torch.dtype) -> Numbers:
    """One token from a state of that dtype."""
    g = torch.Generator().manual_seed(0)
    shapes = ((dims[0],), (dims[0],), (dims[1],), (1,), (1,), dims, (dims[0],), (1,))
    inputs = [torch.randn(3, HEADS, *shape, generator=g) for shape in shapes]
    inputs[5:] = [t.to(state_dtype) for t in inputs[5:]]
    h, last = tfla_tk.mlstm_step(*inputs, backend="triton")
    h_true, last_true = reference.mlstm_step(*double(inputs))
    pairs = zip(("h", "c", "n", "m"), (h, *last), (h_true, *last_true), strict=True)
    return {name: error(found, truth) for name, found, truth in pairs}


def siging_inference_of_mlstm_kernels() -> Numbers:
    """1 where it raises, before and after this package's kernels take its place."""
    from mlstm_kernels.torch.backend_module import mLSTMBackend, mLSTMBackendConfig

    from tfla_tk.integrations.xlstm import replaced

    config = mLSTMBackendConfig(chunkwise_kernel="chunkwise--triton_xl_chunk_siging", mode="inference")
    backend = mLSTMBackend(config)
    inputs = dict(zip(INPUTS, mlstm_inputs(128), strict=True))

    def raises() -> float:
        try:
            backend(**inputs)
        except ValueError:
            return 1.0
        return 0.0

    before = raises()
    with replaced(backend):
        return {"before": before, "after": raises()}


def mlstm_gradients(gate: str, variant: str, seq: int, loss: Loss, normalize: bool = True) -> Numbers:
    options = {"normalize": normalize} if gate == "sig" else {}
    return gradient_errors(MLSTM[gate], mlstm_inputs(seq), INPUTS, loss, variant, **options)


def mlstm_last_state_gradients(gate: str, variant: str, which: int) -> Numbers:
    """A loss on C (0) or n (1) of the last state alone."""
    options: dict[str, Any] = {"return_last_states": True} | ({"normalize": False} if gate == "sig" else {})
    return gradient_errors(
        MLSTM[gate], mlstm_inputs(128), INPUTS, lambda out: projection(out[1][which]), variant, **options
    )


def xl_chunk_256_gradients() -> Numbers:
    """mlstm_kernels itself: the adapter refuses this call."""
    from mlstm_kernels.torch.chunkwise.triton_xl_chunk import mlstm_chunkwise__xl_chunk

    inputs = mlstm_inputs(512)
    actual = gradients(mlstm_chunkwise__xl_chunk, inputs, after_norm, chunk_size=256)
    expected = gradients(MLSTM["exp"], double(inputs), after_norm, backend="reference")
    return {f"d{name}": error(a, e) for name, a, e in zip(INPUTS, actual, expected, strict=True)}


def refused() -> Numbers:
    """Which calls the adapter refuses: 1 for refused."""
    calls = {
        "xl_chunk_256 with gradient": ("triton:xl_chunk_256", 512, DIM_QK, True),
        "xl_chunk_256 without gradient": ("triton:xl_chunk_256", 512, DIM_QK, False),
        "xl_chunk_256, one chunk": ("triton:xl_chunk_256", 256, DIM_QK, True),
        "DHQK 48": ("triton", 64, 48, False),
        "S 63": ("triton", 63, DIM_QK, False),
        "S 192, chunk 128": ("triton:xl_chunk_128", 192, DIM_QK, False),
    }
    result = {}
    for name, (variant, seq, dim_qk, requires_grad) in calls.items():
        inputs = [t.requires_grad_(requires_grad) for t in mlstm_inputs(seq, dim_qk)]
        try:
            MLSTM["exp"](*inputs, backend=variant)
            result[name] = 0.0
        except tfla_tk.UnsupportedError as refusal:
            assert refusal.reason and refusal.remedy
            result[name] = 1.0
    return result


def written_out_of_bounds(dim_qk: int) -> Numbers:
    """Elements past the end of a tensor that mlstm_kernels writes to, called directly."""
    from mlstm_kernels.torch.chunkwise.triton_xl_chunk import mlstm_chunkwise__xl_chunk

    empty, margin, mark = torch.empty, 512, 12345.0
    buffers: list[Tensor] = []

    def guarded(*size: Any, **options: Any) -> Tensor:
        plain = empty(*size, **options)
        buffer = torch.full((plain.numel() + margin,), mark, dtype=plain.dtype)
        buffers.append(buffer)
        return buffer[: plain.numel()].view(plain.shape)

    torch.empty = guarded
    try:
        mlstm_chunkwise__xl_chunk(*mlstm_inputs(64, dim_qk))
    finally:
        torch.empty = empty
    return {"elements": float(sum((b[-margin:] != mark).sum() for b in buffers))}


def auto_choice() -> Numbers:
    """ "auto" leaves the interpreter alone."""
    choice = tfla_tk.which("mlstm_chunkwise", *mlstm_inputs(64))
    return {
        "reference": float(choice.backend == "reference"),
        "triton ok": float(choice.reasons["triton"].ok),
    }


def closed_gates(gate: str, variant: str) -> Numbers:
    """Rows of h that are NaN with one token's input gate at -inf, its forget gate at -inf, both at -1e4."""
    numbers = {}
    for name, gates, value in (("i", "i", -torch.inf), ("f", "f", -torch.inf), ("both at -1e4", "if", -1e4)):
        inputs = mlstm_inputs(128)
        for which in gates:
            inputs[INPUTS.index(which)][..., 70] = value
        numbers[name] = float(MLSTM[gate](*inputs, backend=variant)[0, 0].isnan().any(-1).sum())
    return numbers


def closed_step() -> Numbers:
    """Whether h of a step is NaN, likewise; and for both gates at -inf."""
    c, n, m = mlstm_state("exp")
    numbers = {}
    for name, gates, value in (
        ("f", "f", -torch.inf), ("both", "if", -torch.inf), ("both at -1e4", "if", -1e4),
    ):  # fmt: skip
        q, k, v, i, f = (x[:, :, 0] for x in mlstm_inputs(16))
        i, f = (torch.full_like(x, value) if which in gates else x for which, x in (("i", i), ("f", f)))
        h, _ = tfla_tk.mlstm_step(q, k, v, i[..., None], f[..., None], c, n, m, backend="triton")
        numbers[name] = float(h.isnan().any())
    return numbers


CASES: dict[str, Callable[[], Numbers]] = {
    "refused": refused,
    "auto": auto_choice,
    "norm/xl_chunk_256": xl_chunk_256_gradients,
    "out_of_bounds/48": lambda: written_out_of_bounds(48),
    "out_of_bounds/64": lambda: written_out_of_bounds(64),
}
for gate, variant, seq in (
    ("exp", "triton", 128),
    ("exp", "triton", 16),
    ("exp", "triton", 96),
    ("exp", "triton:xl_chunk", 128),
    ("exp", "triton:xl_chunk_256", 512),
    ("exp", "triton:limit_chunk_64", 128),
    ("sig", "triton", 128),
    ("sig", "triton", 64),
    ("sig", "triton:siging_xl_64", 128),
):
    CASES[f"forward/{gate}/{variant}/{seq}"] = lambda g=gate, v=variant, s=seq: mlstm_forward(g, v, s)
CASES["forward/sig/unnormalised"] = lambda: mlstm_forward("sig", "triton", 128, normalize=False)
for gate, variant in (
    ("exp", "triton:xl_chunk_64"),
    ("exp", "triton:limit_chunk_64"),
    ("sig", "triton:siging_xl_64"),
):
    CASES[f"plain/{gate}/{variant}"] = lambda g=gate, v=variant: mlstm_gradients(g, v, 128, projection)
    CASES[f"norm/{gate}/{variant}"] = lambda g=gate, v=variant: mlstm_gradients(g, v, 128, after_norm)
CASES["norm/exp/triton:xl_chunk_256/one chunk"] = lambda: mlstm_gradients(
    "exp", "triton:xl_chunk_256", 256, after_norm
)
CASES["plain/sig/unnormalised"] = lambda: mlstm_gradients(
    "sig", "triton:siging_xl_256", 512, projection, False
)
for gate, variant in (
    ("exp", "triton:xl_chunk_64"),
    ("exp", "triton:limit_chunk_64"),
    ("sig", "triton:siging_xl_64"),
):
    CASES[f"last_c/{gate}/{variant}"] = lambda g=gate, v=variant: mlstm_last_state_gradients(g, v, 0)
    CASES[f"closed/{variant}"] = lambda g=gate, v=variant: closed_gates(g, v)
CASES["closed step"] = closed_step
CASES["step/16/32"] = lambda: mlstm_step((16, 32), torch.float32)
CASES["step/64/128"] = lambda: mlstm_step((64, 128), torch.float32)
CASES["step/64/64, fp16 state"] = lambda: mlstm_step((64, 64), torch.float16)
CASES["siging inference"] = siging_inference_of_mlstm_kernels
CASES["last_n/exp"] = lambda: mlstm_last_state_gradients("exp", "triton", 1)


def look_for_builtins_once() -> None:
    """Those of a module of Triton: the interpreter would look for them in every call of a function."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    names: dict[Any, list[str]] = {}

    def patch_builtin(module: Any, builder: Any, scope: Any) -> None:
        if module not in names:
            names[module] = [name for name in dir(module) if is_builtin(getattr(module, name, None))]
        for name in names[module]:
            if is_builtin(member := getattr(module, name)):
                interpreter._patch_attr(module, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


def main(cases: dict[str, Callable[[], Numbers]], names: list[str]) -> None:
    look_for_builtins_once()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(json.dumps({name: cases[name]() for name in names or cases}))


if __name__ == "__main__":
    main(CASES, sys.argv[1:])
