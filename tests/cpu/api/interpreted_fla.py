"""The same as interpreted.py for the adapters onto fla's operators; as a script it runs the cases of both."""

from __future__ import annotations

import builtins
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

# first: it sets what triton reads when it is imported
import interpreted  # isort: skip
from interpreted import DIM_QK, DIM_V, HEADS, Numbers, error, main, projection  # isort: skip

import torch
import torch.nn.functional as F
from torch import Tensor

import tfla_tk
from tfla_tk import reference
from tfla_tk.backends.triton import fla as adapters

TOKENS = 70  # two chunks of 64, the second one with few tokens: the interpreter's time goes with them


class InterpretedIndex(int):
    """A loop index with the one method of a Triton scalar that fla's kernels use on it."""

    def to(self, dtype: Any) -> Any:
        import triton.language as tl

        return tl.full((), int(self), dtype)


def interpreted_range(*bounds: Any) -> Iterator[InterpretedIndex]:
    plain = (int(b.handle.data.item()) if hasattr(b, "handle") else int(b) for b in bounds)
    return (InterpretedIndex(i) for i in builtins.range(*plain))


def prepare_fla() -> None:
    """Let fla run without a driver: the first autotuning configuration wins, loop indices act as scalars."""
    from triton.runtime.autotuner import Autotuner

    Autotuner._bench = lambda self, *args, config, **meta: [0.0, 0.0, 0.0]
    for module in adapters.FLA_OPS.values():
        importlib.import_module(module)
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops."):
            module.__dict__["range"] = interpreted_range


def heads_of(op: str) -> int:
    """The interpreter's time goes with them, and KDA's kernels take the most of it."""
    return 1 if op == "chunk_kda" else HEADS


def fla_inputs(op: str, seq: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Differentiable inputs [1, T, H, D] and other arguments."""
    g, heads = torch.Generator().manual_seed(3), heads_of(op)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, seq, heads, *shape, generator=g)

    tensors = {"q": normal(DIM_QK), "k": F.normalize(normal(DIM_QK), dim=-1), "v": normal(DIM_V)}
    if op in ("chunk_gla", "chunk_simple_gla", "chunk_gated_delta_rule", "chunk_kda"):
        tensors["g"] = F.logsigmoid(normal(DIM_QK) if op in ("chunk_gla", "chunk_kda") else normal())
    if "delta" in op or op == "chunk_kda":
        tensors["beta"] = torch.sigmoid(normal())
    tensors = {name: t if name == "g" else t.to(dtype) for name, t in tensors.items()}
    tensors["initial_state"] = torch.randn(1, heads, DIM_QK, DIM_V, generator=g)
    options = {"layer_idx": 1, "num_layers": 4} if op == "chunk_lightning_attn" else {}
    return tensors, options


def fla_expected(op: str, options: dict[str, Any], **tensors: Any) -> tuple[Tensor, Tensor]:
    """The reference of the same operator."""
    if op == "chunk_retention":
        tensors["g_gamma"] = reference.retention_log_decay(HEADS).double()
    if op == "chunk_lightning_attn":
        tensors["g_gamma"] = reference.lightning_log_decay(HEADS, **options).double()
    name = {"chunk_retention": "simple_gla", "chunk_lightning_attn": "simple_gla"}.get(
        op, op.removeprefix("chunk_")
    )
    result: tuple[Tensor, Tensor] = getattr(reference, f"{name}_chunkwise")(
        **tensors, output_final_state=True
    )
    return result


def fla_dtype(op: str) -> torch.dtype:
    """Of q, k and v: what fla takes and the interpreter has."""
    return torch.float16 if op == "chunk_delta_rule" else torch.float32


def fla(op: str) -> Numbers:
    """Output, final state and all gradients under a loss on both.

    Simple GLA over packed sequences, V first.
    """
    prepare_fla()
    packs = op == "chunk_simple_gla"
    tensors, options = fla_inputs(op, 31 + TOKENS if packs else TOKENS, fla_dtype(op))
    call = partial(getattr(tfla_tk, op), backend="triton")
    packed: dict[str, Any] = {}
    if packs:
        tensors["initial_state"] = torch.randn(4, HEADS, DIM_V, DIM_QK)
        offsets = torch.tensor([0, 30, 30, 31, 31 + TOKENS])
        packed = {"cu_seqlens": offsets, "state_v_first": True}
        call = partial(call, cu_seqlens_cpu=offsets, scale=DIM_QK**-0.5)
    leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    leaves64 = {name: t.double().requires_grad_() for name, t in tensors.items()}
    o, state = call(**leaves, **options, **packed, output_final_state=True)
    o_ref, state_ref = fla_expected(op, options, **leaves64, **packed)
    (projection(o.float()) + projection(state)).backward()
    (projection(o_ref) + projection(state_ref)).backward()
    return {"o": error(o, o_ref), "state": error(state, state_ref)} | {
        f"d{name}": error(leaves[name].grad, leaves64[name].grad) for name in leaves
    }


def raw(op: str) -> Numbers:
    """The gated delta rule or KDA as fla's layers call it: raw inputs, twice as many value heads, V first."""
    prepare_fla()
    g = torch.Generator().manual_seed(4)
    heads = heads_of(op)
    gate = (1, 100, 2 * heads)
    shapes = {"q": (1, 100, heads, DIM_QK), "k": (1, 100, heads, DIM_QK), "v": (*gate, DIM_V)}
    channels = (DIM_QK,) if op == "chunk_kda" else ()
    shapes |= {"g": (*gate, *channels), "beta": gate, "A_log": gate[2:]}
    shapes["dt_bias"] = (math.prod((2 * heads, *channels)),)
    shapes["initial_state"] = (1, 2 * heads, DIM_V, DIM_QK)
    inputs = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    flags = (
        "use_qk_l2norm_in_kernel",
        "use_gate_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval",
    )
    options = dict.fromkeys((*flags, "state_v_first", "output_final_state"), True)
    found = []
    for backend, dtype in (("triton", torch.float32), ("reference:recurrent", torch.float64)):
        leaves = {name: t.detach().to(dtype).clone().requires_grad_() for name, t in inputs.items()}
        o, state = getattr(tfla_tk, op)(**leaves, **options, backend=backend)
        (projection(o) + projection(state)).backward()
        found.append({"o": o, "state": state} | {f"d{name}": t.grad for name, t in leaves.items()})
    actual, expected = found
    return {name: error(actual[name], want) for name, want in expected.items()}


def steps(op: str) -> Numbers:
    """A few tokens by fla's recurrence, where there are no gradients."""
    prepare_fla()
    chunkwise = op.replace("fused_recurrent", "chunk")
    tensors, _ = fla_inputs(chunkwise, 5, torch.float32)
    o_ref, state_ref = fla_expected(chunkwise, {}, **{name: t.double() for name, t in tensors.items()})
    if op == "fused_recurrent_gla":
        tensors["gk"] = tensors.pop("g")
    o, state = getattr(tfla_tk, op)(**tensors, output_final_state=True, backend="triton")
    return {"o": error(o, o_ref), "state": error(state, state_ref)}


CASES: dict[str, Callable[[], Numbers]] = {
    f"raw/{op}": partial(raw, op) for op in ("chunk_gated_delta_rule", "chunk_kda")
}
for op in adapters.FLA_OPS:
    if op.startswith("chunk_"):
        CASES[f"chunks/{op}"] = partial(fla, op)
    else:
        CASES[f"steps/{op}"] = partial(steps, op)


if __name__ == "__main__":
    main(interpreted.CASES | CASES, sys.argv[1:])
