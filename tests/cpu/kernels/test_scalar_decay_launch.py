"""What the host side of a scalar decay hands to the kernels of mLSTM; no GPU is touched."""

from __future__ import annotations

import gc
import math
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk.backends.tk import segments
from tfla_tk.backends.tk.scalar_gate import backward as tk_backward
from tfla_tk.backends.tk.scalar_gate import forward as tk_forward
from tfla_tk.backends.tk.scalar_gate import scalar_decay
from tfla_tk.build import Instance
from tfla_tk.build.instances import for_scalar_decay, mlstm_bwd, mlstm_pass
from tfla_tk.core.layout import KeptStates
from tfla_tk.core.memo import Memo

from .addresses import CHUNK, tensor_at
from .backward_launches import Launches as BackwardLaunches
from .forward_launches import Launches as ForwardLaunches
from .stand_in import launch_instead

B, T, H, K, V = 2, 150, 2, 64, 128
SCALE = 0.3


class DecayLaunches(BackwardLaunches):
    """Of the modules for a scalar decay, whose small kernels are another instance."""

    def _make(self, instance: Instance) -> Any:
        around = instance == for_scalar_decay(mlstm_bwd())
        return super()._make(mlstm_bwd() if around else instance)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> ForwardLaunches:
    recorder = ForwardLaunches()
    launch_instead(monkeypatch, tk_forward, recorder)
    monkeypatch.setattr(tk_forward, "_forwards", Memo())
    return recorder


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> DecayLaunches:
    recorder = DecayLaunches()
    launch_instead(monkeypatch, tk_backward, recorder)
    monkeypatch.setattr(tk_backward, "_backwards", Memo())
    return recorder


def draw(
    *, group: int = 1, gate: str = "token", packed: bool = False, state: bool = True, seed: int = 0
) -> tuple[Any, ...]:
    """q, k, v, g, initial_state, cu_seqlens."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    batch, tokens, rows = (1, B * T, 4) if packed else (B, T, B)
    q, k = (normal(batch, tokens, H, K, dtype=torch.bfloat16) for _ in "qk")
    v = normal(batch, tokens, group * H, V, dtype=torch.bfloat16)
    shape = {"token": (batch, tokens, group * H), "head": (group * H,)}.get(gate)
    g = None if shape is None else normal(*shape)
    offsets = torch.tensor([0, 70, 70, 134, B * T]) if packed else None
    return q, k, v, g, normal(rows, group * H, K, V) if state else None, offsets


def operand(x: Tensor) -> tuple[int, ...]:
    """Address and strides of batch, head and token, of a batch of one any."""
    batch, token, head, _ = x.stride()
    return x.data_ptr(), 8 if x.shape[0] == 1 else batch, head, token


def gate(g: Tensor | None, like: Tensor) -> tuple[int, ...]:
    """Strides of batch, head and token, and the dtype."""
    if g is None:
        return 0, 0, 0, 0
    if g.dim() == 1:
        return 0, 1, 0, 0
    batch, token, head = g.stride()
    return batch, head, token, {torch.float32: 0, torch.bfloat16: 1}[g.dtype]


GATES = ["token", "head", "none"]


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("kind", GATES)
def test_forward(kind: str, group: int, packed: bool, forwards: ForwardLaunches) -> None:
    """By the memo and as it is prepared: one launch, and the same."""
    x = draw(group=group, gate=kind, packed=packed)
    options = (SCALE, True)
    prepared = scalar_decay.prepare_simple_gla_fwd(*x, *options)
    for forward in (prepared, lambda *tensors: scalar_decay.simple_gla_fwd(*tensors, *options)):
        for seed in (0, 1):
            q, k, v, g, state, offsets = x = draw(group=group, gate=kind, packed=packed, seed=seed)
            o, last, kept = forward(*x)
            launch = forwards[-1]
            assert [launch.q, launch.k, launch.v, launch.h] == [*map(operand, (q, k, v, o))]
            assert launch.f[1:] == gate(g, v) and launch.i == (0, 0, 0, 0, 0)
            if g is not None:
                assert launch.f[0] == g.data_ptr()
            else:
                assert tensor_at(launch.f[0], torch.float32, (1,)).item() == 0
            assert launch.initial == (state.data_ptr(), 0, 0)
            assert (launch.last, launch.rows) == ((last.data_ptr(), 0, 0), (0, 0, 0))
            assert launch.offsets == (offsets.data_ptr() if packed else 0)
            assert launch.sizes == (q.shape[0], group * H, q.shape[1], K, V)
            assert (launch.group, launch.scale, launch.sigmoid_gate) == (group, SCALE, True)
            assert (launch.normalize, launch.stream, kept) == (False, 7, None)
            assert (o.shape, last.shape) == (v.shape, state.shape)
    assert forwards.instance.name == "decay_fwd_k64_v128"


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
    batch: int, heads: int, dims: tuple[int, int], slice_v: int, segments: int, forwards: ForwardLaunches
) -> None:
    q, k = (torch.randn(batch, 4096, heads, dims[0]).bfloat16() for _ in "qk")
    v = torch.randn(batch, 4096, heads, dims[1]).bfloat16()
    scalar_decay.simple_gla_fwd(q, k, v, torch.zeros(heads), None, None, SCALE, False)
    tile = 64 if dims[0] == 64 else 128
    assert forwards.instance.name == f"decay_fwd_k{tile}_v{slice_v}"
    # of a cut: 64-bit offsets, sequences, segments, chunks of a segment
    assert forwards[-1].cut[1:3] == (batch, segments)


def test_what_is_prepared_holds_no_tensor(forwards: ForwardLaunches) -> None:
    x = draw()
    forward = scalar_decay.prepare_simple_gla_fwd(*x, SCALE, False)
    references = [weakref.ref(t) for t in x if t is not None]
    del x
    gc.collect()
    assert not any(reference() is not None for reference in references)
    _, last, _ = forward(*draw())
    assert last is None and forwards[-1].last == (0, 0, 0)
    assert forwards.forwards == 1


@pytest.mark.parametrize("odd", ["q", "v", "state", "inner"])
def test_what_the_kernels_cannot_read_is_copied(odd: str, forwards: ForwardLaunches) -> None:
    """One element later, or tokens innermost in memory: nothing that TMA can address. o is contiguous."""
    q, _, v, _, state, _ = x = list(draw())

    def late(t: Tensor) -> Tensor:
        return torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t)

    changes = {"q": late(q), "v": late(v), "state": late(state), "inner": v.mT.contiguous().mT}
    place = {"q": 0, "v": 2, "state": 4, "inner": 2}[odd]
    alike = [*x]
    if odd == "inner":
        alike[place] = changes[odd]
    forward = scalar_decay.prepare_simple_gla_fwd(*alike, SCALE, False)
    x[place] = changes[odd]

    def write(launch: SimpleNamespace) -> None:
        pointer, batch, head, token = launch.h
        tensor_at(pointer, torch.bfloat16, v.shape, batch, token, head, 1).copy_(
            tensor_at(launch.v[0], torch.bfloat16, v.shape, launch.v[1], launch.v[3], launch.v[2], 1)
        )

    forwards.write = write
    o, *_ = forward(*x)
    launch = forwards[-1]
    read = {"q": launch.q, "v": launch.v, "state": launch.initial, "inner": launch.v}[odd]
    assert read[0] != x[place].data_ptr() and read[0] % 16 == 0
    assert torch.equal(o, x[2]) and o.is_contiguous()


def gradients(x: tuple[Any, ...], kept: KeptStates | None = None, **changed: Any) -> tuple[Any, ...]:
    """simple_gla_bwd with a gradient of everything; do, d_final before its results."""
    _, _, v, g, state, _ = x
    do, d_final = torch.randn_like(v), None if state is None else torch.randn_like(state)
    options = {"scale": SCALE, "needs_dg": g is not None and g.dim() == 3} | changed
    last = None if state is None else torch.randn_like(state)
    found = scalar_decay.simple_gla_bwd(
        *x, last, do, d_final, options["scale"], options["needs_dg"], False, kept
    )
    return do, d_final, last, *found


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("kind", GATES)
def test_backward(kind: str, group: int, packed: bool, backwards: DecayLaunches) -> None:
    """In the first call of a kind and in later ones; dq and dk are sums over the heads that share them."""
    for seed in (0, 1):
        backwards.clear()
        q, k, v, g, state, offsets = x = draw(group=group, gate=kind, packed=packed, seed=seed)
        do, d_final, last, dq, dk, dv, dg, d_initial = gradients(x)
        names = ["scan", "dv", "dq", "dk", *["gates"] * (kind == "token")]
        assert [launch.name for launch in backwards] == names
        (scan,), (of_dq,), (of_dk,), (of_dv,) = map(backwards.of, ("scan", "dq", "dk", "dv"))
        assert scan.f[1:] == gate(g, v) and scan.i == (0, 0, 0, 0, 0)
        assert g is None or scan.f[0] == g.data_ptr()
        assert math.isclose(scan.scale, SCALE) and scan.rows == (0, 0)
        assert (of_dq.queries, of_dq.keys, of_dq.values) == tuple(map(operand, (do, v, k)))
        assert (of_dk.queries, of_dk.keys, of_dk.values) == tuple(map(operand, (v, do, q)))
        assert (of_dv.queries, of_dv.keys, of_dv.values) == tuple(map(operand, (k, q, do)))
        assert of_dv.out == operand(dv)
        assert of_dq.entering == (state.data_ptr(), 0) and of_dk.entering == (d_final.data_ptr(), 0)
        assert of_dv.leaving == (d_initial.data_ptr(), 0)
        for launch in (of_dq, of_dk, of_dv):
            assert (launch.group, launch.half, launch.stream) == (group, False, 7)
            assert launch.sizes[:3] == (q.shape[0], group * H, q.shape[1])
            assert launch.cut[0] == (offsets.data_ptr() if packed else 0)
        assert of_dq.instance == for_scalar_decay(mlstm_pass("dq", V, K))
        assert (dq.shape, dk.shape) == (q.shape, k.shape)
        for grad, parts in ((dq, group), (dk, group), (dv, 1), (d_initial, 1)):
            assert (grad == parts * DecayLaunches.WRITTEN).all()
        if kind == "token":
            (gates,) = backwards.of("gates")
            assert gates.df[0] == dg.data_ptr() and dg.shape == g.shape
            assert gates.last[:2] == (last.data_ptr(), d_final.data_ptr())
        else:
            assert dg is None
    assert len(tk_backward._backwards) == 1


def test_calls_that_are_not_alike_are_prepared_anew(backwards: DecayLaunches) -> None:
    x = draw()
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        (x, {}),
        (x, {"scale": 0.5}),
        (x, {"needs_dg": False}),
        (draw(gate="head"), {}),
        (draw(gate="none"), {}),
        (draw(state=False), {}),
        (draw(group=2), {}),
        (draw(packed=True), {}),
        ((x[0].transpose(1, 2).contiguous().transpose(1, 2), *x[1:]), {}),
        ((*x[:3], x[3].bfloat16(), *x[4:]), {}),
        ((*x[:4], x[4].mT.contiguous().mT, x[5]), {}),
    ]
    for _ in range(2):
        for call, options in calls:
            backwards.clear()
            *_, d_initial = gradients(call, **options)
            assert (backwards[0].i, backwards[0].name) == ((0, 0, 0, 0, 0), "scan")
            assert call[4] is None or d_initial.stride() == call[4].stride()
            prepared = backwards.prepared
    assert backwards.prepared == prepared
    # that of the state which is copied, and of its copy
    assert len(tk_backward._backwards) == len(calls) + 1


def test_kept_states(backwards: DecayLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    """What enters the segments of "dq" is where the forward has left it; n is not read."""
    monkeypatch.setattr(segments, "cut", lambda n, tokens, *_: segments.Cut(n * -(-tokens // CHUNK), 1))
    x, slots = draw(), 2 * B * H
    workspace = torch.empty(slots * (K * V + K + 8))
    gradients(x, KeptStates(workspace, segments.Cut(3 * B, 1), (32, 64)))
    assert [launch.name for launch in backwards][:3] == ["scan", "segments_dk", "combine"]
    (of_dq,) = backwards.of("dq")
    assert of_dq.boundaries[:2] == (workspace.data_ptr() + 32, 0)
    gradients(x)
    assert len(backwards.of("segments_dq")) == 1


def test_a_zero_in_place_of_gates_is_made_once() -> None:
    scalar_decay._zeros.clear()
    q = draw()[0]
    with torch.inference_mode():
        zero = scalar_decay._log_decay(None, q)
    assert scalar_decay._log_decay(None, q) is zero and not zero.is_inference()
