"""Calls of the public functions on the tk backend, with something else in the place of the kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

import tfla_tk
from tfla_tk import decode, delta_rule, gla, kda, mlstm, simple_gla
from tfla_tk.backends.tk import channel_gate, device, refusals, segments
from tfla_tk.backends.tk import kda as tk_kda
from tfla_tk.backends.tk import mlstm as tk_mlstm
from tfla_tk.backends.tk.delta_rule import call as delta_call
from tfla_tk.backends.tk.delta_rule import inputs as delta_inputs
from tfla_tk.backends.tk.delta_rule import launch as delta_launch
from tfla_tk.backends.tk.scalar_gate import backward, decoding, forward, walks
from tfla_tk.core.support import SUPPORTED

from .delta_rule import DeltaRule
from .gla import GLA
from .kda import KDA
from .scalar_gate import ScalarGate
from .stand_in import Kernels

Tensors = dict[str, Tensor]
MODULES = (
    *(forward, backward, walks, decoding, channel_gate),
    *(delta_call, delta_launch, delta_inputs, tk_kda),
)
MEMOS = [x._forwards for x in (forward, channel_gate, delta_launch, tk_kda)]
MEMOS += [x._backwards for x in (backward, channel_gate, delta_launch, tk_kda)]
OFFSETS = [0, 70, 70, 134, 270]
B, T, H = 2, 100, 2


@dataclass(frozen=True)
class Op:
    """A public function.

    Attributes:
        kernels: what stands for its kernels.
        path: of its module, which keeps plans.
        gates: their names.
        states: names of the initial states, and shapes behind [N, H] by K and V.
        options: of every call.
        most: head dims that its kernels take with gradients.
    """

    name: str
    kernels: type[Kernels]
    path: Any
    gates: tuple[str, ...]
    states: tuple[str, ...] = ("initial_state",)
    options: tuple[tuple[str, Any], ...] = (("output_final_state", True),)
    most: tuple[int, int] = (256, 512)

    def __str__(self) -> str:
        return self.name

    @property
    def is_mlstm(self) -> bool:
        """Whether heads come before tokens."""
        return self.name.startswith("mlstm")

    @property
    def is_delta_rule(self) -> bool:
        return self.name in ("chunk_gated_delta_rule", "chunk_kda")

    def channels(self, gate: str, dim_k: int) -> tuple[int, ...]:
        """The dims of a gate behind tokens and heads."""
        return (dim_k,) if gate == "g" and self.name in ("chunk_gla", "chunk_kda") else ()

    def fitting(self, dims: tuple[int, int]) -> tuple[int, int]:
        """Head dims, as far as its kernels take them."""
        return min(dims[0], self.most[0]), min(dims[1], self.most[1])


_LAST = ("return_last_states", True)
OPS = {
    "exp": Op(
        *("mlstm_chunkwise", ScalarGate, mlstm._chunkwise, ("i", "f")),
        *(("c_initial", "n_initial", "m_initial"), (_LAST,)),
    ),
    "sig": Op(
        *("mlstm_siging_chunkwise", ScalarGate, mlstm._chunkwise, ("i", "f")),
        *(("c_initial", "n_initial"), (_LAST,)),
    ),
    "sig unnormalised": Op(
        *("mlstm_siging_chunkwise", ScalarGate, mlstm._chunkwise, ("i", "f")),
        *(("c_initial",), (_LAST, ("normalize", False))),
    ),
    "decay": Op("chunk_simple_gla", ScalarGate, simple_gla._path, ("g",)),
    "gla": Op("chunk_gla", GLA, gla._path, ("g",)),
    "delta": Op("chunk_gated_delta_rule", DeltaRule, delta_rule._path, ("g", "beta")),
    "kda": Op("chunk_kda", KDA, kda._path, ("g", "beta"), most=(128, 128)),
}
MLSTM = ("exp", "sig", "sig unnormalised")
# KDA's kernels take whole sequences, in all batches bit for bit alike
CUT = {name: op for name, op in OPS.items() if name != "kda"}


def take_tensors_for_a_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the tk backend serve calls of tensors on a CPU."""
    monkeypatch.setattr(device, "supports", lambda *key: SUPPORTED)
    monkeypatch.setattr(device, "load", lambda *key: SUPPORTED)
    monkeypatch.setattr(refusals, "of_operands", lambda call: None)
    for name in ("step", "sequence"):
        monkeypatch.setattr(tk_mlstm, f"supports_mlstm_{name}", lambda call, variant=None: SUPPORTED)
    forget_calls()


def forget_calls() -> None:
    """Has the next calls planned and prepared anew."""
    paths = decode._step, decode._sequence, *(op.path for op in OPS.values())
    for memo in (*MEMOS, *(path.plans for path in paths)):
        memo.clear()


def cut_into(monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    """Have sequences cut into segments of so many chunks, in the delta rule splits as well."""
    for name, packed in (("cut", False), ("cut_packed", True)):
        monkeypatch.setattr(
            segments,
            name,
            lambda n, tokens, *_, packed=packed: segments.cut_into(n, tokens, chunks, packed=packed),
        )
    monkeypatch.setattr(delta_call, "SEGMENT_CHUNKS", chunks)
    split = property(lambda self: None if self.is_wide else self.cut_into(chunks))
    monkeypatch.setattr(delta_call.Shape, "split", split)
    forget_calls()


def draw(
    op: Op,
    dims: tuple[int, int] = (64, 48),
    *,
    dtype: torch.dtype = torch.bfloat16,
    of_gates: torch.dtype = torch.float32,
    state: bool = True,
    packed: bool = False,
    group: int = 1,
    tokens: int = T,
    seed: int = 0,
) -> Tensors:
    """Inputs of a call, by their names. mLSTM and GLA have no groups of heads.

    Args:
        dims: as far as the kernels take them.
    """
    dims = op.fitting(dims)
    generator = torch.Generator().manual_seed(seed)
    batch, tokens, rows = (1, OFFSETS[-1], len(OFFSETS) - 1) if packed else (B, tokens, B)
    if op.is_mlstm or op.name == "chunk_gla":
        group = 1

    def normal(heads: int, *dims: int) -> Tensor:
        shape = (batch, heads, tokens) if op.is_mlstm else (batch, tokens, heads)
        return torch.randn(*shape, *dims, generator=generator)

    q, k, v = normal(H, dims[0]), normal(H, dims[0]), normal(group * H, dims[1])
    if op.is_delta_rule:
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
    x = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
    for name in op.gates:
        gate = normal(group * H, *op.channels(name, dims[0])) + {"f": 3, "g": 2}.get(name, 0)
        if not op.is_mlstm:
            gate = logsigmoid(gate) if name == "g" else torch.sigmoid(gate)
        x[name] = gate.to(of_gates)
    for name, shape in zip(op.states, (dims, dims[:1], (1,)), strict=False):
        if state:
            x[name] = torch.randn(rows, group * H, *shape, generator=generator)
    if packed:
        x["cu_seqlens"] = torch.tensor(OFFSETS)
    return x


# flags that have inputs made of raw ones, by the delta rule and by KDA
FLAGS = ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "use_gate_in_kernel")


def raw(x: Tensors, flags: dict[str, Any], parameters: Iterable[str] = ("A_log", "dt_bias")) -> Tensors:
    """The inputs that such flags are for."""
    heads, channels = x["v"].shape[2], x["g"].shape[3:].numel()
    if flags.get("use_qk_l2norm_in_kernel"):
        x |= {"q": 3 * x["q"], "k": 5 * x["k"]}
        x["k"][:, 3] = 0
    if flags.get("use_beta_sigmoid_in_kernel"):
        x["beta"] = 4 * x["beta"] - 2
    if flags.get("use_gate_in_kernel"):
        made = {
            "A_log": torch.linspace(-1, 0.5, 2 * heads)[::2],
            "dt_bias": torch.linspace(0.5, -2, heads * channels).bfloat16(),
        }
        x |= {"g": 4 * x["g"] + 2} | {name: made[name] for name in parameters}
    return x


def results(op: Op, x: Tensors, backend: str = "tk", without: Iterable[str] = (), **options: Any) -> Tensors:
    """Outputs of a call, and the gradients of all its inputs for gradients of all outputs.

    Args:
        without: names of inputs that have no gradient, and "last": the last state has none.
    """
    options = {**dict(op.options), **options}
    fixed = {"cu_seqlens", "m_initial", "g_gamma", *without}
    x = {name: t.detach().requires_grad_(name not in fixed) for name, t in x.items()}
    outputs = flat(getattr(tfla_tk, op.name)(**x, **options, backend=backend))
    generator = torch.Generator().manual_seed(7)
    recorded = [y for y in outputs.values() if y.requires_grad][: 1 if "last" in fixed else None]
    given = [random_like(y, generator) for y in recorded]
    inputs = {name: t for name, t in x.items() if t.requires_grad}
    found = torch.autograd.grad(recorded, list(inputs.values()), given, allow_unused=True)
    grads = {f"d{name}": grad for name, grad in zip(inputs, found, strict=True) if grad is not None}
    return {name: y.detach() for name, y in outputs.items()} | grads


def random_like(y: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal; a long tensor repeats itself, since drawing takes time."""
    drawn = torch.randn(min(y.numel(), 1 << 16), generator=generator).to(y.dtype)
    return drawn.repeat(-(-y.numel() // (1 << 16)))[: y.numel()].view(y.shape)


def flat(outputs: Any) -> Tensors:
    """The output and the states of a call, by numbers."""
    if isinstance(outputs, tuple):
        first, rest = outputs
        outputs = (first, *(rest if isinstance(rest, tuple) else (rest,)))
    else:
        outputs = (outputs,)
    return {f"output {n}": y for n, y in enumerate(outputs) if y is not None}


def truth(op: Op, x: Tensors, without: Iterable[str] = (), **options: Any) -> Tensors:
    """The same by the reference in fp64."""
    wide = {name: t if name == "cu_seqlens" else t.double() for name, t in x.items()}
    return results(op, wide, "reference", without, **options)


def assert_close(found: Tensors, expected: Tensors, tolerance: float) -> None:
    """By the norm of the error, which is of 16-bit rounding."""
    assert found.keys() == expected.keys()
    for name, y in expected.items():
        error = (found[name].double() - y).norm() / y.norm().clamp(min=1e-3)
        assert error <= tolerance, f"{name}: {error}"


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, y in expected.items():
        assert torch.equal(found[name], y), name


def check(
    op: Op, x: Tensors, without: Iterable[str] = (), tolerance: float = 1e-2, **options: Any
) -> Tensors:
    """That the results of a call are those of the reference; gradients lie like their inputs."""
    found = results(op, x, without=without, **options)
    assert_close(found, truth(op, x, without, **options), tolerance)
    for name, t in x.items():
        if f"d{name}" in found:
            assert found[f"d{name}"].dtype == t.dtype, name
            assert found[f"d{name}"].stride() == torch.empty_like(t).stride(), name
    return found
