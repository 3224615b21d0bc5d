"""The host side of a scalar decay, which calls mLSTM's kernels, by its results; no GPU is touched."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import reference
from tfla_tk.backends.tk.scalar_gate import backward as tk_backward
from tfla_tk.backends.tk.scalar_gate import forward as tk_forward
from tfla_tk.backends.tk.scalar_gate import scalar_decay
from tfla_tk.calls.linear import SimpleGLACore
from tfla_tk.core.layout import Kept
from tfla_tk.core.memo import Memo

from .addresses import at_odd_address
from .forward_emulation import ForwardFormulas
from .stand_in import launch_instead

B, T, H, K, V = 2, 150, 2, 16, 32
SCALE = 0.3


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> ForwardFormulas:
    found = ForwardFormulas()
    launch_instead(monkeypatch, found, tk_forward)
    monkeypatch.setattr(tk_forward, "_forwards", Memo())
    return found


def draw(
    dtype: torch.dtype = torch.bfloat16,
    *,
    group: int = 1,
    gate: str = "token",
    packed: bool = False,
    state: bool = True,
    seed: int = 0,
) -> tuple[Any, ...]:
    """q, k, v, g, initial_state, cu_seqlens; gates and states in fp64 where all else is."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    batch, tokens, rows = (1, B * T, 4) if packed else (B, T, B)
    q, k = (normal(batch, tokens, H, K) for _ in "qk")
    v = normal(batch, tokens, group * H, V)
    shape = {"token": (batch, tokens, group * H), "head": (group * H,)}.get(gate)
    g = None if shape is None else torch.nn.functional.logsigmoid(normal(*shape, dtype=wide) + 2)
    offsets = torch.tensor([0, 70, 70, 134, B * T]) if packed else None
    return q, k, v, g, normal(rows, group * H, K, V, dtype=wide) if state else None, offsets


def of_tokens(g: Tensor | None, v: Tensor) -> Tensor | None:
    """A gate of every token."""
    return g.expand(v.shape[:3]) if g is not None and g.dim() == 1 else g


GATES = ["token", "head", "none"]


def by_the_memo(*tensors: Any) -> tuple[Any, ...]:
    return scalar_decay.forward(SimpleGLACore(*tensors, SCALE), output_final_state=True, keep=False)


def check_forward(x: tuple[Any, ...], found: tuple[Any, ...]) -> None:
    q, k, v, g, state, offsets = x
    o, last, kept = found
    expected = reference.simple_gla_chunkwise(
        q, k, v, of_tokens(g, v), None, SCALE, state, output_final_state=True, cu_seqlens=offsets
    )
    torch.testing.assert_close(o, expected[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(last, expected[1], rtol=1e-3, atol=1e-3)
    assert kept is None and o.is_contiguous()


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("kind", GATES)
def test_forward(kind: str, group: int, packed: bool, forwards: ForwardFormulas) -> None:
    """By the memo and as it is prepared, which holds no tensor."""
    x = draw(group=group, gate=kind, packed=packed)
    prepared = scalar_decay.prepare(SimpleGLACore(*x, SCALE), output_final_state=True, keep=False)
    references = [weakref.ref(t) for t in x if t is not None]
    del x
    gc.collect()
    assert not any(reference() is not None for reference in references)
    for forward in (prepared, by_the_memo):
        for seed in (0, 1):
            x = draw(group=group, gate=kind, packed=packed, seed=seed)
            check_forward(x, forward(*x))
    assert forwards.prepared == 2


@pytest.mark.parametrize(
    ("batch", "heads", "dims", "slice_v", "segments"),
    [
        (4, 16, (128, 128), 64, 4),  # 128 CTAs, 132 multiprocessors: uncut
        (5, 16, (128, 128), 128, 5),
        (4, 16, (128, 64), 64, 8),
        (4, 16, (64, 128), 128, 8),
        (4, 16, (128, 192), 256, 8),
    ],
)
def test_slices_of_v_where_there_are_few_heads(
    batch: int, heads: int, dims: tuple[int, int], slice_v: int, segments: int, forwards: ForwardFormulas
) -> None:
    forwards.computes = False
    q, k = (torch.empty(batch, 4096, heads, dims[0]).bfloat16() for _ in "qk")
    v = torch.empty(batch, 4096, heads, dims[1]).bfloat16()
    core = SimpleGLACore(q, k, v, torch.zeros(heads), None, None, SCALE)
    scalar_decay.forward(core, output_final_state=False, keep=False)
    (launch,) = forwards.launches
    assert (launch.tile[1], launch.cut[3]) == (slice_v, segments)


@pytest.mark.parametrize("odd", ["q", "v", "state", "inner"])
def test_what_the_kernels_cannot_read_is_copied(odd: str, forwards: ForwardFormulas) -> None:
    """One element later, or tokens innermost in memory: nothing that TMA can address. o is contiguous."""
    x = list(draw())
    if odd == "inner":
        x[2] = x[2].mT.contiguous().mT
    forward = scalar_decay.prepare(SimpleGLACore(*x, SCALE), output_final_state=True, keep=False)
    if odd != "inner":
        place = {"q": 0, "v": 2, "state": 4}[odd]
        x[place] = at_odd_address(x[place])
    check_forward(tuple(x), forward(*x))


def check_backward(
    x: tuple[Any, ...], kept: Kept | None = None, *, scale: float = SCALE, needs_dg: bool | None = None
) -> None:
    """With a gradient of everything."""
    q, k, v, g, state, offsets = x
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(v.shape, generator=generator).to(v.dtype)
    d_final = last = None
    if state is not None:
        d_final = torch.randn(state.shape, generator=generator).to(state.dtype)
        _, last = reference.simple_gla_chunkwise(
            q, k, v, of_tokens(g, v), None, scale, state, output_final_state=True, cu_seqlens=offsets
        )
    if needs_dg is None:
        needs_dg = g is not None and g.dim() == 3
    core = SimpleGLACore(*x, scale)
    found = scalar_decay.backward(core, kept, do, d_final, needs_gates=needs_dg, final_state=last)
    expected = reference.simple_gla_backward(
        q, k, v, of_tokens(g, v), do, d_final, scale=scale, initial_state=state, cu_seqlens=offsets
    )
    wanted = {"dq": q, "dk": k, "dv": v, "dg": g if needs_dg else None, "d_initial": state}
    for grad, truth, (name, like) in zip(found, expected, wanted.items(), strict=True):
        if like is None:
            assert grad is None, name
        else:
            # of dg within what a chunk drops as forgotten
            assert (grad - truth).norm() <= (1e-4 if name == "dg" else 1e-9) * truth.norm(), name
            assert grad.shape == like.shape


@pytest.mark.parametrize("chunks", [1, 100], ids=["cut", "whole"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("kind", GATES)
def test_backward(kind: str, group: int, packed: bool, chunks: int, backward_formulas: Any) -> None:
    """In the first call of a kind and in later ones; dq and dk are sums over the heads that share them."""
    backward_formulas.segment_chunks = chunks
    for seed in (0, 1):
        check_backward(draw(torch.float64, group=group, gate=kind, packed=packed, seed=seed))
    assert len(tk_backward._backwards) == 1


def test_calls_that_are_not_alike_are_prepared_anew(backward_formulas: Any) -> None:
    x = draw(torch.float64)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        (x, {}),
        (x, {"scale": 0.5}),
        (x, {"needs_dg": False}),
        (draw(torch.float64, gate="head"), {}),
        (draw(torch.float64, gate="none"), {}),
        (draw(torch.float64, state=False), {}),
        (draw(torch.float64, group=2), {}),
        (draw(torch.float64, packed=True), {}),
        ((x[0].transpose(1, 2).contiguous().transpose(1, 2), *x[1:]), {}),
        ((*x[:4], x[4].mT.contiguous().mT, x[5]), {}),
    ]
    for _ in range(2):
        for call, options in calls:
            check_backward(call, **options)
    # of the state which is copied that of its copy
    assert len(tk_backward._backwards) == len(calls)


def test_kept_states(backward_formulas: Any) -> None:
    """The states that the forward has left are not made again."""
    backward_formulas.segment_chunks = 1
    x = draw(torch.float64)
    *_, kept = scalar_decay.forward(SimpleGLACore(*x, SCALE), output_final_state=True, keep=True)
    for states, names in ((kept, {"gradients"}), (None, {"forward", "gradients"})):
        backward_formulas.launches.clear()
        check_backward(x, states)
        assert {launch.name for launch in backward_formulas.launches} & {"forward", "gradients"} == names
        assert backward_formulas.summed == {"dk"}


def test_a_zero_in_place_of_gates_is_made_once() -> None:
    scalar_decay._zeros.clear()
    q = draw()[0]
    with torch.inference_mode():
        zero = scalar_decay._tensors(q, q, q, None, None, None)[4]
    assert scalar_decay._tensors(q, q, q, None, None, None)[4] is zero and not zero.is_inference()
