"""What the host side of GLA hands to its kernels, whose place the reference takes; no GPU is touched."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import reference
from tfla_tk.backends.tk import segments
from tfla_tk.backends.tk.channel_gate import backward, call, launch, support
from tfla_tk.calls.gla import GLACore
from tfla_tk.core.layout import Cut, Kept
from tfla_tk.core.memo import Memo
from tfla_tk.core.support import SUPPORTED

from .addresses import at_odd_address
from .gla_launches import ANCHOR_BYTES, Kernel
from .stand_in import launch_instead

B, T, H = 2, 150, 3


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel()
    launch_instead(monkeypatch, found, call, launch, backward)
    monkeypatch.setattr(segments, "cut", lambda n, tokens, *_: Cut(n, -(-tokens // 64)))
    monkeypatch.setattr(segments, "cut_packed", lambda n, tokens, *_: Cut(n, tokens // 64 + 1))
    monkeypatch.setattr(launch, "_forwards", Memo())
    monkeypatch.setattr(backward, "_backwards", Memo())
    return found


@pytest.fixture(params=[1, 2], ids="{} chunks".format)
def cut(request: pytest.FixtureRequest, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> int:
    """Sequences are cut into segments of so many chunks."""
    chunks: int = request.param
    monkeypatch.setattr(segments, "cut", lambda n, tokens, *_: Cut(n * -(-tokens // (64 * chunks)), chunks))
    monkeypatch.setattr(
        segments, "cut_packed", lambda n, tokens, *_: Cut(n + tokens // (64 * chunks), chunks)
    )
    return chunks


def draw(
    dims: tuple[int, int] = (64, 128),
    dtype: torch.dtype = torch.bfloat16,
    of_gates: torch.dtype = torch.float32,
    offsets: torch.dtype | None = None,
    state: bool = True,
    batch_invariant: bool = False,
    heads: int = H,
) -> GLACore:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    batch, tokens, rows = (B, T, B) if offsets is None else (1, B * T, 4)
    q, k, g = (normal(batch, tokens, heads, dims[0]) for _ in range(3))
    v = normal(batch, tokens, heads, dims[1]).to(dtype)
    cu_seqlens = None if offsets is None else torch.tensor([0, 70, 70, 134, B * T], dtype=offsets)
    g = torch.nn.functional.logsigmoid(g).to(of_gates)
    initial = normal(rows, heads, *dims) if state else None
    return GLACore(q.to(dtype), k.to(dtype), v, g, initial, cu_seqlens, 0.3, batch_invariant)


def check(core: GLACore, output_final_state: bool = True) -> None:
    expected = reference.gla_chunkwise(
        *core[:4],
        scale=core.scale,
        initial_state=core.initial_state,
        output_final_state=output_final_state,
        cu_seqlens=core.cu_seqlens,
    )
    o, last, kept = launch.forward(core, output_final_state=output_final_state, keep=True)
    assert o.is_contiguous() and (last is None or last.is_contiguous())
    if core.q.shape[3] <= 128:
        assert torch.equal(o, expected[0])
    else:  # another order of the sum over K
        torch.testing.assert_close(o, expected[0], atol=1e-2, rtol=1e-2)
    assert kept is None or kept.tensors[0] is not None
    if output_final_state:
        torch.testing.assert_close(last, expected[1])
    else:
        assert last is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state", [False, True], ids=["zeros", "state"])
def test_tensors_and_sizes(dtype: torch.dtype, of_gates: torch.dtype, state: bool, kernel: Kernel) -> None:
    core = draw(dtype=dtype, of_gates=of_gates, state=state)
    check(core)
    check(core, output_final_state=False)
    assert len(kernel.launches) == 2


@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=str)
def test_packed_sequences(offsets: torch.dtype, kernel: Kernel) -> None:
    check(draw(offsets=offsets))


def test_views(kernel: Kernel) -> None:
    """What TMA can address is read as it lies; the rest is copied."""
    core = draw()
    fused = torch.cat([core.q, core.k], dim=-1)
    heads_first = core.g.transpose(1, 2).contiguous().transpose(1, 2)
    views = core._replace(q=fused[..., :64], k=fused[..., 64:], g=heads_first)
    check(views._replace(v=core.v.transpose(1, 2).contiguous().transpose(1, 2)))
    assert kernel.launches[-1].q[1:] == (T * H * 128, 128, H * 128)
    assert kernel.launches[-1].g[1:] == (H * T * 64, T * 64, 64)
    check(core._replace(g=torch.cat([core.g, core.g[..., :4]], -1)[..., :64]))
    check(core._replace(g=core.g[..., :1].expand(*core.g.shape)))
    assert core.initial_state is not None
    check(core._replace(initial_state=core.initial_state.mT.contiguous().mT))


@pytest.mark.parametrize("dims", [(256, 128), (192, 64), (144, 512)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("offsets", [None, torch.int64], ids=str)
def test_wide_keys_take_launches_of_128_channels(
    dims: tuple[int, int], offsets: torch.dtype | None, kernel: Kernel
) -> None:
    check(draw(dims=dims, offsets=offsets))
    assert [x.shape[8] for x in kernel.launches] == [128, dims[0] - 128]


def test_a_call_like_another_is_prepared_once(kernel: Kernel) -> None:
    for _ in range(3):
        check(draw())
    assert kernel.prepared == 1
    check(draw(dims=(96, 64)))
    assert kernel.prepared == 2


@pytest.mark.parametrize("keep", [False, True], ids=["alone", "kept"])
def test_a_prepared_forward(keep: bool, cut: int, kernel: Kernel) -> None:
    """It serves tensors that lie alike, wherever they begin, and what has to be copied."""
    core = draw()
    odd = core._replace(**{name: at_odd_address(getattr(core, name)) for name in ("k", "g", "initial_state")})
    split = core._replace(v=torch.cat([core.v, core.v[..., :1]], -1)[..., :-1])
    options = {"output_final_state": True, "keep": keep}
    expected = launch.forward(core, **options)
    for first, calls in ((core, (core, odd, core)), (odd, (core, odd)), (split, (split,))):
        prepared = launch.prepare(first, **options)
        for one in calls:
            o, last, kept = prepared(*one[:6])
            assert torch.equal(o, expected[0]) and torch.equal(last, expected[1])
            assert (kept is not None) == keep


def test_a_backward_serves_odd_addresses(cut: int, kernel: Kernel) -> None:
    core = draw()
    check_backward(core)
    check_backward(core._replace(**{name: at_odd_address(getattr(core, name)) for name in ("q", "g")}))
    check_backward(core)


@pytest.mark.slow
def test_a_backward_begins_with_odd_addresses(cut: int, kernel: Kernel) -> None:
    """What a first call had to copy says nothing of later ones that lie alike."""
    core = draw()
    check_backward(core._replace(initial_state=at_odd_address(core.initial_state)))
    check_backward(core)
    backward._backwards.clear()
    do = torch.ones_like(core.v)
    first, *others = (
        launch.backward(core, None, x, None, needs_gates=True) for x in (at_odd_address(do), do)
    )
    for found in others:
        assert all(map(torch.equal, found, first))


def test_the_gradient_of_a_state_lies_like_it(cut: int, kernel: Kernel) -> None:
    """Also where it is transposed, as with state_v_first."""
    core = draw()
    state = core.initial_state.mT.contiguous().mT
    do = torch.ones_like(core.v)
    dense, found = (
        launch.backward(core._replace(initial_state=x), None, do, None, needs_gates=True)[4]
        for x in (core.initial_state, state)
    )
    assert found.stride() == state.stride() and torch.equal(found, dense)


def check_backward(
    core: GLACore, needs_gates: bool = True, with_dht: bool = True, kept: Kept | None = None
) -> None:
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(core.v.shape, generator=generator).to(core.v.dtype)
    dht = None
    if with_dht:
        rows = core.q.shape[0] if core.cu_seqlens is None else core.cu_seqlens.shape[0] - 1
        shape = (rows, *core.q.shape[2:], core.v.shape[3])
        dht = torch.randn(*shape, generator=generator)
    expected = reference.gla_backward(
        *core[:4],
        do,
        dht,
        scale=core.scale,
        initial_state=core.initial_state,
        cu_seqlens=core.cu_seqlens,
    )
    dq, dk, dv, dg, dh0 = launch.backward(core, kept, do, dht, needs_gates=needs_gates)
    for found, wanted, like in (
        (dq, expected.dq, core.q),
        (dk, expected.dk, core.k),
        (dv, expected.dv, core.v),
    ):
        assert found is not None
        is_sum = found is dv and core.q.shape[3] > 128  # of rounded ones
        rtol, atol = (2e-2, 0.2) if is_sum else (1e-2, 1e-4)
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)
        assert found.dtype == like.dtype
    if needs_gates:
        assert dg is not None
        torch.testing.assert_close(dg, expected.dg, rtol=1e-2, atol=1e-3)
        assert dg.dtype == core.g.dtype
    else:
        assert dg is None
    if core.initial_state is None:
        assert dh0 is None
    else:
        torch.testing.assert_close(dh0, expected.dh0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state", [False, True], ids=["zeros", "state"])
def test_backward(dtype: torch.dtype, of_gates: torch.dtype, state: bool, kernel: Kernel) -> None:
    core = draw(dtype=dtype, of_gates=of_gates, state=state)
    for needs_gates in (True, False):
        for with_dht in (True, False):
            check_backward(core, needs_gates, with_dht)
    assert [x.name for x in kernel.launches] == ["mirror", "left", "right"] * 4


def test_anchors_are_asked_for_with_the_offsets(kernel: Kernel) -> None:
    """Packed sequences have more slots for them."""
    for offsets in (None, torch.int64):
        check_backward(draw(offsets=offsets))
    assert [shape[0] != 0 for shape in kernel.of_anchors] == [False, True]
    assert [shape[0] for shape in kernel.of_anchors] == [x.shape[0] for x in kernel.launches[::3]]


@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=str)
def test_backward_of_packed_sequences(offsets: torch.dtype, kernel: Kernel) -> None:
    check_backward(draw(offsets=offsets))


def test_backward_of_views(kernel: Kernel) -> None:
    core = draw(of_gates=torch.bfloat16)
    fused = torch.cat([core.q, core.k], dim=-1)
    heads_first = core.g.transpose(1, 2).contiguous().transpose(1, 2)
    check_backward(core._replace(q=fused[..., :64], k=fused[..., 64:], g=heads_first))
    check_backward(core._replace(g=torch.cat([core.g, core.g[..., :4]], -1)[..., :64]))
    assert core.initial_state is not None
    check_backward(core._replace(initial_state=core.initial_state.mT.contiguous().mT))


def test_a_backward_like_another_is_prepared_once(kernel: Kernel) -> None:
    for _ in range(3):
        check_backward(draw())
    assert kernel.prepared == 3
    check_backward(draw(dims=(96, 208)))
    assert kernel.prepared == 6


@pytest.mark.parametrize(
    ("dims", "heads", "expected"),
    [((128, 128), 66, 1), ((128, 128), 67, 2), ((64, 128), 99, 1), ((128, 256), 99, 1)],
)
def test_walkers_of_states(dims: tuple[int, int], heads: int, expected: int, kernel: Kernel) -> None:
    """Two where they have to share multiprocessors, and have registers for it."""
    q, v = (torch.empty(1, 1, heads, dim, device="meta") for dim in dims)
    core = GLACore(q, q, v, q, None, None, 1.0, False)
    assert call.Shape.of(core).walkers_of_states == expected


def test_the_option_fixes_the_walkers_of_states(kernel: Kernel) -> None:
    for dims, expected in (((128, 128), 2), ((192, 64), 2), ((64, 128), 1), ((128, 256), 1)):
        for batch, heads in ((1, 1), (1, 66), (1, 67), (40, 16)):
            q, v = (torch.empty(batch, 1, heads, dim, device="meta") for dim in dims)
            core = GLACore(q, q, v, q, None, None, 1.0, True)
            assert call.Shape.of(core).walkers_of_states == expected


@pytest.mark.slow
def test_calls_with_and_without_the_option_are_prepared_apart(kernel: Kernel) -> None:
    for batch_invariant in (False, True, False, True):
        check_backward(draw(dims=(128, 64), batch_invariant=batch_invariant))
    assert [x.walkers for x in kernel.launches if x.name != "mirror"] == [1, 1, 2, 2] * 2
    assert kernel.prepared == 6


WIDE = [(256, 128), (192, 256), (128, 384), (256, 512), (96, 320), (144, 272)]


@pytest.mark.parametrize("offsets", [None, torch.int64], ids=str)
@pytest.mark.parametrize("dims", WIDE, ids="{0[0]}_{0[1]}".format)
def test_the_backward_of_wide_heads(
    dims: tuple[int, int], offsets: torch.dtype | None, kernel: Kernel
) -> None:
    """dv is a sum over slices of K, all else is of sums over slices of V."""
    check_backward(draw(dims=dims, offsets=offsets, heads=2))
    slices = [1 + (dims[0] > 128), *[1 + (dims[1] > 256)] * 2]
    names = [[name] * count for name, count in zip(("mirror", "left", "right"), slices, strict=True)]
    assert [x.name for x in kernel.launches] == [*itertools.chain(*names)]


@pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("needs_gates", "with_dht"), [(True, False), (False, True)])
def test_slices_of_v_without_states_or_gates(
    needs_gates: bool, with_dht: bool, of_gates: torch.dtype, kernel: Kernel
) -> None:
    check_backward(draw(dims=(64, 272), of_gates=of_gates, state=False), needs_gates, with_dht)


def test_slices_of_v_have_anchors_of_their_own(kernel: Kernel) -> None:
    check_backward(draw(dims=(64, 512)))
    of_left, of_right = ([x for x in kernel.launches if x.name == name] for name in ("left", "right"))
    at = [x.gates[2][2] for x in of_left]
    assert at == [x.gates[2][2] for x in of_right]
    assert at[1] - at[0] == ANCHOR_BYTES
    assert len({x.slice[1] for x in (*of_left, *of_right)}) == 1  # the sums


@pytest.mark.parametrize("dims", [(256, 512), (144, 272), (100, 250)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_gradients_are_served_for_all_heads_of_the_forward(
    dims: tuple[int, int], requires_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(support.device, "device_fault", lambda index: ("", ""))
    monkeypatch.setattr(support.device, "supports", lambda *of: asked.append(of) or SUPPORTED)
    of_call: Any = SimpleNamespace(
        device=torch.device("cuda"), dtype=torch.bfloat16, requires_grad=requires_grad, dim_qk=dims[0],
        dim_v=dims[1], heads=2, value_heads=2, sequences=3, goes_by_token=lambda most: False,
    )  # fmt: skip
    assert support.supports_gla(of_call).ok
    ((_, kernels_of, *key),) = asked
    _, found = kernels_of(*key)
    assert len(found) == (4 if requires_grad else 1)


@pytest.mark.parametrize("dims", [(272, 64), (64, 528), (257, 64)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_other_head_dims_are_refused(dims: tuple[int, int], requires_grad: bool) -> None:
    of_call: Any = SimpleNamespace(
        device=torch.device("cuda"), dtype=torch.bfloat16, requires_grad=requires_grad, dim_qk=dims[0],
        dim_v=dims[1], heads=2, value_heads=2, sequences=3, goes_by_token=lambda most: False,
    )  # fmt: skip
    verdict = support.supports_gla(of_call)
    assert not verdict.ok
    assert f"K = {dims[0]}, V = {dims[1]}" in verdict.reason


# Cut sequences


@pytest.mark.parametrize("offsets", [None, torch.int32], ids=str)
@pytest.mark.parametrize("state", [False, True], ids=["zeros", "state"])
@pytest.mark.parametrize("dims", [(64, 128), (192, 64)], ids="{0[0]}_{0[1]}".format)
def test_a_cut_forward_begins_with_the_states_at_borders(
    dims: tuple[int, int], state: bool, offsets: torch.dtype | None, kernel: Kernel, cut: int
) -> None:
    check(draw(dims=dims, state=state, offsets=offsets))
    walks = -(-dims[0] // 128)
    assert [x.name for x in kernel.launches] == ["segments", *["forward"] * walks]
    sequences, segments_of_call, chunks = kernel.launches[0].shape[2:5]
    assert segments_of_call > sequences and chunks == cut


@pytest.mark.slow
@pytest.mark.parametrize("offsets", [None, torch.int64], ids=str)
@pytest.mark.parametrize("is_kept", [False, True], ids=["made again", "kept"])
def test_a_cut_backward(is_kept: bool, offsets: torch.dtype | None, kernel: Kernel, cut: int) -> None:
    """The forward's states at the borders are taken where it has kept them."""
    for state, with_dht in itertools.product((False, True), repeat=2):
        core = draw(state=state, offsets=offsets)
        kept = launch.forward(core, output_final_state=False, keep=True)[2] if is_kept else None
        kernel.launches.clear()
        check_backward(core, with_dht=with_dht, kept=kept)
        before = [(x.name, x.backward) for x in kernel.launches if x.name == "segments"]
        assert before == [("segments", False)] * (not is_kept) + [("segments", True)]
        assert [x.name for x in kernel.launches[-3:]] == ["mirror", "left", "right"]


@pytest.mark.slow
@pytest.mark.parametrize("offsets", [None, torch.int64], ids=str)
@pytest.mark.parametrize("dims", WIDE, ids="{0[0]}_{0[1]}".format)
def test_a_cut_backward_of_wide_heads(
    dims: tuple[int, int], offsets: torch.dtype | None, kernel: Kernel, cut: int
) -> None:
    """Every slice finds its own rows and columns of the states at borders."""
    core = draw(dims=dims, offsets=offsets, heads=2)
    check_backward(core)
    check_backward(core, kept=launch.forward(core, output_final_state=False, keep=True)[2])


def test_a_backward_keeps_the_cut_of_its_forward(
    kernel: Kernel, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = draw()
    kept = launch.forward(core, output_final_state=False, keep=True)[2]
    monkeypatch.setattr(segments, "cut", lambda *_: Cut(B, 3))
    check_backward(core, kept=kept)
    assert kernel.launches[-1].shape[4] == cut


def test_nothing_is_kept_of_whole_sequences(kernel: Kernel) -> None:
    assert launch.forward(draw(), output_final_state=True, keep=True)[2] is None


def test_few_heads_are_cut_to_fill_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "multiprocessors", lambda device: 132)

    def ctas(batch: int, tokens: int, heads: int, packed: bool = False) -> int:
        q = torch.empty(batch, tokens, heads, 128, device="meta")
        offsets = torch.empty(9, dtype=torch.int32, device="meta") if packed else None
        shape = call.Shape.of(GLACore(q, q, q, q, None, offsets, 1.0, False))
        return shape.cut.segments * heads

    assert 100 <= ctas(1, 8192, 16) <= 132
    assert ctas(1, 65536, 16) >= 100
    assert ctas(8, 8192, 16) == 128 and ctas(16, 2048, 32) == 512
    assert ctas(1, 256, 16) == 16
    assert ctas(1, 65536, 16, packed=True) >= 100


@pytest.mark.parametrize("heads", [1, 66, 67])
def test_walkers_of_states_with_batch_invariance(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "multiprocessors", lambda device: 132)
    q = torch.empty(1, 1, heads, 128, device="meta")
    core = GLACore(q, q, q, q, None, None, 1.0, True)
    assert call.Shape.of(core).walkers_of_states == 2
