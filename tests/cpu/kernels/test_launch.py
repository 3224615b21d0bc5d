"""What the forward's host side hands to a kernel, whose place the reference takes: nothing else is in h, the
states and the rows; no GPU is touched.
"""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tfla_tk.backends.tk import segments
from tfla_tk.backends.tk.scalar_gate import forward as tk_forward
from tfla_tk.backends.tk.scalar_gate import walks as tk_walks
from tfla_tk.core.memo import Memo
from tfla_tk.ops import mlstm as ops

from .addresses import at_odd_address
from .forward_emulation import ForwardFormulas
from .stand_in import launch_instead

B, NH, S, K, V = 2, 3, 40, 64, 128
WIDE = (64, 144)  # head dims of three walks backward


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ForwardFormulas:
    found = ForwardFormulas()
    launch_instead(monkeypatch, found, tk_forward)
    monkeypatch.setattr(tk_forward, "_forwards", Memo())
    return found


def operands(dim: int) -> dict[str, Callable[[], Tensor]]:
    """A [B, NH, S, dim] tensor in every layout that a caller may pass, by name."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape).bfloat16()

    return {
        "contiguous": lambda: normal(B, NH, S, dim),
        "transposed": lambda: normal(B, S, NH, dim).transpose(1, 2),
        "fused": lambda: normal(B, S, NH, 3 * dim)[..., dim : 2 * dim].transpose(1, 2),
        "head_last": lambda: normal(B, NH, dim, S).mT,
        "expanded": lambda: normal(B, 1, S, dim).expand(B, NH, S, dim),
        "shifted": lambda: normal(B, NH, S, dim + 8)[..., 1 : dim + 1],
        "shifted_transposed": lambda: normal(B, S, NH, dim + 8)[..., 1 : dim + 1].transpose(1, 2),
        "odd_rows": lambda: normal(B, NH, S, dim + 4)[..., :dim],
    }


IN_PLACE = ("contiguous", "transposed", "fused")
COPIED = ("head_last", "expanded", "shifted", "shifted_transposed", "odd_rows")
STATES = ((B, NH, K, V), (B, NH, K), (B, NH, 1))


def tensors_of(layout: str = "contiguous", *, states: bool = False, seq: int = S) -> tk_forward.Tensors:
    """What a forward takes: q, k, v in a layout of `operands`."""
    q, k, v = (operands(dim)[layout]()[:, :, :seq] for dim in (K, K, V))
    gates = torch.randn(B, NH, seq), torch.randn(B, NH, seq)
    c, n, m = (torch.rand(shape) if states else None for shape in STATES)
    return q, k, v, *gates, c, n, m, None


def options_of(**changed: Any) -> tk_forward.Options:
    return tk_forward.Options(False, True, 1e-6, False, False)._replace(**changed)


def assert_like_the_reference(
    found: Any, tensors: tk_forward.Tensors, options: tk_forward.Options, rtol: float = 2e-2
) -> None:
    """All results, and None for those that are not asked for."""
    expected = torch.ops.tfla_tk.mlstm_fwd(*tensors, *options[:3], True, True)
    h, c, n, m, *rows, _ = found
    torch.testing.assert_close(h, expected[0], rtol=rtol, atol=1e-2)
    assert h.stride() == torch.empty_like(tensors[2]).stride()
    given = [options.return_last_states] * 3 + [options.return_rows] * 3
    given = [x and (options.normalize or place != 3) for place, x in enumerate(given)]
    for place, x in enumerate((c, n, m, *rows)):
        if not given[place] or (options.sigmoid_gate and place in (2, 4, 5)):
            assert x is None
        else:
            torch.testing.assert_close(x, expected[1 + place], rtol=1e-3, atol=1e-3)


def check(tensors: tk_forward.Tensors, **changed: Any) -> Any:
    options = options_of(**changed)
    found = tk_forward.run(tensors, options)
    assert_like_the_reference(found, tensors, options)
    return found


@pytest.mark.parametrize("layout", [*IN_PLACE, *COPIED])
def test_any_layout(layout: str, kernels: ForwardFormulas) -> None:
    """Aligned rows are read in place."""
    q, k, v, *_ = tensors = tensors_of(layout)
    check(tensors)
    (launch,) = kernels.launches
    given = [x.data_ptr() for x in (q, k, v)]
    assert ([launch.q[0], launch.k[0], launch.v[0]] == given) == (layout in IN_PLACE)


@pytest.mark.parametrize("layout", [*IN_PLACE, *COPIED])
def test_h_has_the_strides_that_the_fake_op_says(layout: str, kernels: ForwardFormulas) -> None:
    tensors = tensors_of(layout)
    h, *_ = tk_forward.run(tensors, options_of())
    with FakeTensorMode() as mode:
        q, i = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((B, NH, S, K), (B, NH, S)))
        fake = ops._fwd_fake(
            q, q, mode.from_tensor(tensors[2]), i, i, None, None, None, None, False, True, 1e-6, False, False
        )
    assert h.stride() == fake[0].stride()


@pytest.mark.parametrize("sizes", [(1, NH, S), (B, 1, S), (B, NH, 1), (1, 1, 1)])
def test_strides_of_single_entries_suit_the_descriptor(
    sizes: tuple[int, int, int], kernels: ForwardFormulas
) -> None:
    """A dimension of size 1 may have any stride in PyTorch; TMA wants multiples of 16 bytes."""

    def view(dim: int) -> Tensor:
        dense = (NH * S * dim, S * dim, dim)
        strides = (3 if size == 1 else stride for size, stride in zip(sizes, dense, strict=True))
        return torch.randn(B * NH * S * dim).bfloat16().as_strided((*sizes, dim), (*strides, 1))

    q, v = view(K), view(V)
    tk_forward.run((q, q, v, torch.randn(sizes), torch.randn(sizes), *[None] * 4), options_of())
    (launch,) = kernels.launches
    assert launch.q[0] == q.data_ptr()
    assert all(stride > 0 and stride % 8 == 0 for x in (launch.q, launch.v, launch.h) for stride in x[1:])


@pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_and_gates_of_any_strides(
    dtype: torch.dtype, of_gates: torch.dtype, kernels: ForwardFormulas
) -> None:
    q, k, v, *_ = tensors_of()
    i = torch.randn(B, S, NH).to(of_gates).transpose(1, 2)
    f = torch.randn(B, 1, 2 * S).to(of_gates)[..., ::2].expand(B, NH, S)
    check((q.to(dtype), k.to(dtype), v.to(dtype), i, f, *[None] * 4), eps=0.5)


@pytest.mark.parametrize("dims", [(80, 272), (256, 512), (16, 16)])
def test_head_dims(dims: tuple[int, int], kernels: ForwardFormulas) -> None:
    q, k, v = (torch.randn(B, NH, S, dim).bfloat16() for dim in (dims[0], *dims))
    check((q, k, v, *tensors_of()[3:5], *[None] * 4))


@pytest.mark.parametrize(("sigmoid_gate", "normalize"), [(False, True), (True, True), (True, False)])
def test_states_and_rows(sigmoid_gate: bool, normalize: bool, kernels: ForwardFormulas) -> None:
    """Without normaliser n is zero, and nothing is written of it."""
    q, k, v, i, f, c, n, m, _ = tensors_of(states=True)
    gates = {"sigmoid_gate": sigmoid_gate, "normalize": normalize}
    tensors = q, k, v, i, f, c, n if normalize else None, None if sigmoid_gate else m, None
    for asked in itertools.product((False, True), repeat=2):
        found = check(tensors, **gates, return_last_states=asked[0], return_rows=asked[1])
        assert normalize or not asked[0] or bool((found[2] == 0).all())


def launch_of(
    seq: int, kernels: ForwardFormulas, dims: tuple[int, int] = (K, V), **options: Any
) -> tuple[Any, Any]:
    """Of so many tokens, whose results are not computed, and what is returned."""
    kernels.computes = False
    q, v = (torch.empty(1, 2, seq, dim, dtype=torch.bfloat16) for dim in dims)
    gate = torch.empty(1, 2, seq)
    found = tk_forward.run((q, q, v, gate, gate, *[None] * 4), options_of(**options))
    return kernels.launches[-1], found


def test_a_long_sequence_is_cut(kernels: ForwardFormulas) -> None:
    short, _ = launch_of(S, kernels)
    assert short.cut == (0, False, 1, 1, 1)
    long, _ = launch_of(10_000, kernels)
    *_, count, chunks = long.cut
    assert count > 1
    assert count == -(-10_000 // (64 * chunks))


@pytest.mark.parametrize("normalize", [True, False])
def test_a_forward_is_cut_as_its_backward_and_leaves_it_the_states(
    normalize: bool, kernels: ForwardFormulas, monkeypatch: pytest.MonkeyPatch
) -> None:
    seq, new_empty = 10_000, Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **kw: new_empty(*args, **kw).fill_(math.nan))
    launch, (*_, states) = launch_of(
        seq, kernels, WIDE, return_rows=True, normalize=normalize, keep_states=True
    )
    cut = tk_walks.cut_sequences((1, 2, seq, *WIDE), 1, 132, packed=False)
    assert launch.cut[-2:] == states.layout.cut == cut
    assert cut.segments > 1
    slots = 2 * (cut.segments - 1)
    assert launch.workspace == states.tensors[0].data_ptr()
    assert states.layout.offsets == kernels.workspace_offsets(slots, *WIDE)
    assert bool(states.tensors[0].isnan().all())  # nothing is written but by the kernels


def test_states_are_left_where_a_cut_is_and_they_are_asked_for(kernels: ForwardFormulas) -> None:
    """Without that a forward has a cut of its own."""
    assert launch_of(S, kernels, WIDE, return_rows=True, keep_states=True)[1][-1] is None
    launch, (*_, states) = launch_of(10_000, kernels, WIDE, return_rows=True)
    assert launch.cut[-2:] == segments.cut(1, 10_000, 2, 132)
    assert states is None


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("seq", [S, 10_001])
def test_narrow_heads_leave_states_of_every_second_chunk(
    seq: int, normalize: bool, kernels: ForwardFormulas
) -> None:
    """Whatever the cut, which is the forward's own: 16-bit states, their units and n, all aligned."""
    kernels.computes = False
    launch, (*_, states) = launch_of(seq, kernels, normalize=normalize, keep_states=True)
    assert launch.cut[-2:] == launch_of(seq, kernels, normalize=normalize)[0].cut[-2:]
    count, at = 2 * -(-seq // 128), states.tensors[0].data_ptr()
    of_units, of_norms = states.layout.offsets
    assert launch.left == (at, at + of_units, at + of_norms if normalize else 0)
    assert of_units >= 2 * count * K * V and of_norms >= of_units + 4 * count
    assert 2 * states.tensors[0].numel() >= of_norms + 4 * count * K
    assert not any(address % 256 for address in states.layout.offsets)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences(dtype: torch.dtype, kernels: ForwardFormulas) -> None:
    lengths = 2 * torch.tensor([0, 10, 10, S], dtype=dtype)
    offsets = lengths.repeat_interleave(2)[::2]  # strided
    q, k, v = (torch.randn(1, NH, 2 * S, dim).bfloat16() for dim in (K, K, V))
    gates = torch.randn(1, NH, 2 * S), torch.randn(1, NH, 2 * S)
    found = check((q, k, v, *gates, *[None] * 3, offsets), return_last_states=True, return_rows=True)
    assert [t.shape[0] for t in found[1:4]] == [3, 3, 3]


@pytest.mark.parametrize("layout", [*IN_PLACE, *COPIED])
def test_what_is_prepared_serves_every_call_like_it(layout: str, kernels: ForwardFormulas) -> None:
    """Wherever its tensors begin, also where vector loads cannot take them; it holds no tensor."""
    first, options = tensors_of(layout, states=True), options_of(return_last_states=True)
    forward = tk_forward.prepare(first, options)
    references = [weakref.ref(x) for x in first if x is not None]
    del first
    gc.collect()
    assert not any(reference() for reference in references)
    for odd in ((), (), (0, 1, 2) if layout in IN_PLACE else (), (5, 6, 7)):
        tensors = tensors_of(layout, states=True)
        own = tuple(at_odd_address(x) if n in odd else x for n, x in enumerate(tensors))
        assert_like_the_reference(forward(*own), own, options)
        launch = kernels.launches[-1]
        assert not any(at % 16 for at in launch.initial)
        if len(kernels.launches) <= 2:  # later copies lie in another way
            in_place = launch.q[0] == own[0].data_ptr()
            assert kernels.prepared == 1 and in_place == (layout in IN_PLACE)


def test_calls_alike_share_a_forward(kernels: ForwardFormulas) -> None:
    """Everything that a launch has but addresses makes another one."""
    x, options = tensors_of(), options_of()
    changes: list[tuple[tk_forward.Tensors, tk_forward.Options]] = [
        (x, options),
        (tensors_of("transposed"), options),
        (tensors_of("fused"), options),
        (tensors_of(seq=S - 1), options),
        ((*x[:3], x[3].bfloat16(), *x[4:]), options),
        ((*x[:3], x[3], x[4].mT.contiguous().mT, *x[5:]), options),
        (tensors_of(states=True), options),
        ((*(t.half() for t in x[:3]), *x[3:]), options),
        *((x, options._replace(**{name: True})) for name in ("return_last_states", "return_rows")),
        (x, options._replace(eps=1e-5)),
        (x, options._replace(sigmoid_gate=True)),
        (x, options._replace(sigmoid_gate=True, normalize=False)),
    ]
    for _ in range(2):
        for tensors, changed in changes:
            tk_forward.run(tensors, changed)
    assert kernels.prepared == len(changes)
    assert len(kernels.launches) == 2 * len(changes)
