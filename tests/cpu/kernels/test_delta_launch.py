"""What the host side of the delta rule hands to its kernels, whose place the recurrence takes; no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.pairs import pairwise
from tfla_tk import reference
from tfla_tk.backends.tk.delta_rule import call, launch
from tfla_tk.backends.tk.delta_rule.call import Shape
from tfla_tk.calls.delta_rule import DeltaRuleCore
from tfla_tk.core.layout import CHUNK, Kept

from .addresses import at_odd_address
from .delta_emulation import Kernel, launch_delta_instead

B, T, H = 2, 150, 2
SCALE = 0.3
OFFSETS = [0, 70, 70, 134, 264, B * T]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Whose segments are one chunk."""
    return launch_delta_instead(monkeypatch)


def forget_calls() -> None:
    """Has the next calls prepared anew."""
    launch._forwards.clear()
    launch._backwards.clear()


def split_into(monkeypatch: pytest.MonkeyPatch, chunks: int | None, longest: int | None = None) -> None:
    """Have calls cut into segments of so many chunks, None: not at all.

    Args:
        longest: of leads, in chunks; None: as it is of such a split.
    """
    cut = None if chunks is None else property(lambda self: self.cut_into(chunks))
    monkeypatch.setattr(Shape, "split", cut)
    if longest is not None:
        monkeypatch.setattr(Shape, "longest_lead", longest)


def draw(
    dims: tuple[int, int] = (64, 48),
    *,
    group: int = 1,
    gate: bool = True,
    packed: bool = False,
    state: bool = True,
    tokens: int = T,
) -> DeltaRuleCore:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    batch, seq, rows = (1, B * T, len(OFFSETS) - 1) if packed else (B, tokens, B)
    q, k = (
        torch.nn.functional.normalize(normal(batch, seq, H, dims[0]), dim=-1).bfloat16() for _ in range(2)
    )
    v = normal(batch, seq, group * H, dims[1]).bfloat16()
    g = torch.nn.functional.logsigmoid(normal(batch, seq, group * H) + 2) if gate else None
    beta = torch.sigmoid(normal(batch, seq, group * H))
    initial = normal(rows, group * H, *dims) if state else None
    offsets = torch.tensor(OFFSETS) if packed else None
    return DeltaRuleCore(q, k, v, g, beta, None, None, initial, offsets, SCALE, False, False, False, False)


def error(found: Tensor | None, truth: Tensor) -> float:
    assert found is not None and found.shape == truth.shape
    return float((found.float() - truth.float()).norm() / truth.float().norm())


def cotangents(*outputs: Tensor | None) -> list[Tensor]:
    """Like the outputs; the same whatever tests ran before, and so are the errors of gradients."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(x.shape, generator=generator).to(x.dtype) for x in outputs if x is not None]


def assert_kept(kept: Kept, core: DeltaRuleCore) -> None:
    """It is what such a call leaves."""
    (left,) = kept.tensors
    assert left is not None and left.dim() == 1
    assert kept.layout == launch.kept_layout(core) and left.numel() == kept.layout[0]


def check(core: DeltaRuleCore, keep: bool = True, *, needs_gates: bool = True) -> None:
    """Both directions; without `keep` the backward makes the forward again."""
    g = core.beta.new_zeros(core.beta.shape) if core.g is None else core.g
    o, last, kept = launch.forward(core, output_final_state=True, keep=keep)
    assert (kept is None) == (not keep)
    if kept is not None:
        assert_kept(kept, core)
    inputs = (core.q, core.k, core.v, g, core.beta)
    options: dict[str, Any] = {
        "scale": SCALE,
        "initial_state": core.initial_state,
        "cu_seqlens": core.cu_seqlens,
    }
    expected = reference.gated_delta_rule_recurrent(*inputs, output_final_state=True, **options)
    assert error(o, expected[0]) < 5e-3 and error(last, expected[1]) < 1e-4
    do, dht = cotangents(o, last)
    found = launch.backward(core, kept, do, dht, needs_gates=needs_gates)
    truth = reference.gated_delta_rule_backward(*inputs, do, dht, **options)
    places = {"dq": 0, "dk": 1, "dv": 2, "dg": 3, "dbeta": 4, "dh0": 7}
    given = {"dg": core.g is not None and needs_gates, "dh0": core.initial_state is not None}
    for name, place in places.items():
        if given.get(name, True):
            assert error(found[place], getattr(truth, name)) < 1e-2, name
        else:
            assert found[place] is None


@pytest.mark.parametrize(
    ("group", "gate", "packed", "state", "makers"), pairwise((1, 3), *[(False, True)] * 4)
)
def test_tensors_and_sizes(
    group: int,
    gate: bool,
    packed: bool,
    state: bool,
    makers: bool,
    kernel: Kernel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the chunk matrices made before the forward's walk, where it leaves no multiprocessor idle, and
    beside it. The backward has the same ones."""
    if not makers:
        monkeypatch.setattr(call, "multiprocessors", lambda device: 1)
    core = draw(group=group, gate=gate, packed=packed, state=state)
    check(core)
    check(core, keep=False)
    names = [x.name for x in kernel.launches]
    backward = ["gradients", *["combine"] * (group > 1), *["decay"] * gate, "strength"]
    forward = [*["matrices"] * (not makers), "forward"]
    assert names == forward + backward + forward + forward + backward


@pytest.mark.parametrize(("dim_v", "group"), [(128, 1), (136, 1), (272, 1), (144, 2)])
def test_parts_of_slices_are_fp32(dim_v: int, group: int, kernel: Kernel) -> None:
    """Of V, of which a CTA has 128 columns."""
    check(draw((80, dim_v), group=group, tokens=70))
    combined = [x for x in kernel.launches if x.name == "combine"]
    assert len(combined) == (dim_v > 128) and all(x.of_floats for x in combined)


@pytest.mark.parametrize("group", [2, 4, 5, 8])
def test_heads_of_a_group_add_up_their_results(group: int, kernel: Kernel) -> None:
    """In the walks over the states, or, of many heads, parts that another launch adds up."""
    core = draw((144, 16), group=group, tokens=70)
    check(core)
    walks = {x.shared for x in kernel.launches if x.name in ("left", "right")}
    assert len(walks) == 1 and group % (shared := walks.pop()) == 0
    assert shared <= call.MOST_TURNS and (shared == group or group > call.MOST_TURNS)
    combined = [x for x in kernel.launches if x.name == "combine"]
    assert len(combined) == (shared < group)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize(("chunks", "group", "state", "dim_v"), [(1, 1, True, 144), (2, 3, False, 32)])
def test_split_sequences(
    chunks: int,
    group: int,
    state: bool,
    dim_v: int,
    packed: bool,
    kernel: Kernel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """States at the borders between segments are carried."""
    split_into(monkeypatch, chunks)
    core = draw((48, dim_v), group=group, packed=packed, state=state, tokens=200)
    check(core)
    names = [x.name for x in kernel.launches]
    forward = ["matrices", "leads", "maps", "carry", "forward"]
    assert names[:8] == [*forward, "mirror", "carry", "gradients"]
    kernel.launches.clear()
    launch.forward(core, output_final_state=True, keep=False)
    assert [x.name for x in kernel.launches] == forward
    assert kernel.launches[2].maps[0] == 0  # M itself is for the backward


def test_calls_for_a_backward_alone_are_split(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the backward reads is that of such a forward, which it makes itself where none was kept."""
    monkeypatch.setattr(Shape, "split", property(lambda self: self.cut_into(1) if self.trains else None))
    core = draw(tokens=200)
    check(core)
    check(core, keep=False)
    forward, backward = ["leads", "maps", "carry", "forward"], ["mirror", "carry", "gradients"]
    of_split = [*forward, *backward]
    names = [x.name for x in kernel.launches if x.name in of_split]
    assert names == [*of_split, "forward", *of_split]


def test_a_split_of_sequences_that_are_no_longer_than_a_segment(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_into(monkeypatch, 1)
    check(draw((48, 32), tokens=CHUNK))
    assert {x.name for x in kernel.launches}.isdisjoint({"leads", "maps", "carry"})


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_which_calls_are_split(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few long sequences, with any V; not where K exceeds what the kernels of a split take."""
    monkeypatch.setattr(call, "multiprocessors", lambda device: 132)
    tokens = 65536

    def is_split(dim_k: int, dim_v: int, heads: int = 4) -> bool:
        sizes = (tokens, dim_k, dim_v)
        return Shape(1, tokens // CHUNK, 1, heads, *sizes, 1, False, 0, False, packed).split is not None

    assert is_split(128, 128) and is_split(128, 256) and is_split(64, 512)
    assert not is_split(144, 128) and not is_split(256, 512) and not is_split(128, 128, heads=64)


@pytest.mark.parametrize(
    ("dims", "packed", "group"), pairwise([(48, 320), (192, 64), (256, 144)], (False, True), (1, 3))
)
def test_large_head_dims(dims: tuple[int, int], packed: bool, group: int, kernel: Kernel) -> None:
    """Several slices of V, and more columns of K than makers and the one walk serve."""
    check(draw(dims, group=group, packed=packed, tokens=70))
    # packed chunks have other slots
    assert all((of[0] != 0) == packed for of in kernel.anchor_shapes)
    assert bool(kernel.anchor_shapes) == (dims[0] > 128)
    walks = [x for x in kernel.launches if x.name == "forward"]
    assert walks and (dims[0] <= 128 or not any(x.makers for x in walks))


# Raw inputs


def raw(core: DeltaRuleCore, norm: bool, strength: bool, decay: bool) -> DeltaRuleCore:
    """The call with inputs that such flags are for."""
    heads = core.v.shape[2]
    if norm:
        core = core._replace(q=3 * core.q, k=5 * core.k, qk_l2norm=True)
        core.k[:, 3] = 0
    if strength:
        beta = (4 * core.beta - 2).bfloat16()
        core = core._replace(beta=beta, beta_sigmoid=True, neg_eigval=True)
    if decay:
        assert core.g is not None
        a_log, dt_bias = torch.linspace(-1, 0.5, heads), torch.linspace(0.5, -2, 2 * heads)[::2].bfloat16()
        core = core._replace(g=4 * core.g + 2, A_log=a_log, dt_bias=dt_bias)
    return core


def check_raw(core: DeltaRuleCore, keep: bool = True) -> None:
    """Both directions against the op on a CPU, which is the reference."""
    o, last, kept = launch.forward(core, output_final_state=True, keep=keep)
    if kept is not None:
        assert_kept(kept, core)
    expected = torch.ops.tfla_tk.delta_rule_fwd(*core, True)
    assert error(o, expected[0]) < 5e-3 and error(last, expected[1]) < 5e-3
    assert o.is_contiguous() and last is not None and last.is_contiguous()
    given = cotangents(o, expected[1])
    for needs_gates in (False, True):
        found = launch.backward(core, kept, *given, needs_gates=needs_gates)
        options = core[9:]
        truth = torch.ops.tfla_tk.delta_rule_bwd(*core[:9], *given, *options, needs_gates)
        for name, x, y in zip(core._fields, found, truth, strict=False):
            if x is None:
                assert y.numel() == 0, name
            else:
                assert x.dtype == y.dtype and x.stride() == y.stride(), name
                assert name in ("A_log", "dt_bias") or error(x, y) < 2e-2, name
        if needs_gates and core.A_log is not None:
            check_sums(core, *found[3:7:2], found[6])


def check_sums(
    core: DeltaRuleCore, dg: Tensor | None, da_log: Tensor | None, ddt_bias: Tensor | None
) -> None:
    """The gradients of A_log and dt_bias, from that of g: their own errors add up over the tokens."""
    assert core.g is not None and dg is not None and da_log is not None
    biased = core.g if core.dt_bias is None else core.g + core.dt_bias
    slope = torch.nn.functional.softplus(biased) / torch.sigmoid(biased)
    assert error(da_log, (slope * dg).sum((0, 1))) < 1e-4
    assert (ddt_bias is None) == (core.dt_bias is None)
    if ddt_bias is not None:
        assert error(ddt_bias, dg.sum((0, 1))) < 5e-3


@pytest.mark.parametrize(
    ("norm", "strength", "decay", "packed", "group"),
    pairwise(*[(False, True)] * 4, (1, 3), where=lambda *values: any(values[:3])),
)
def test_raw_inputs(
    norm: bool, strength: bool, decay: bool, packed: bool, group: int, kernel: Kernel
) -> None:
    core = raw(draw((48, 32), group=group, packed=packed, tokens=70), norm, strength, decay)
    check_raw(core)
    names = [x.name for x in kernel.launches]
    assert names.count("inputs") == 3  # of the forward, and again in every backward
    assert names.count("inputs_backward") == 1 + (norm or strength)  # none for gates without gradients
    assert names[0] == "inputs" and names[-1] == "inputs_backward"
    check_raw(core, keep=False)


def test_raw_inputs_without_decay_or_bias(kernel: Kernel) -> None:
    check_raw(raw(draw(gate=False, tokens=70), True, True, False))
    check_raw(raw(draw(tokens=70), False, False, True)._replace(dt_bias=None))


def test_raw_inputs_of_any_layout(kernel: Kernel) -> None:
    """Rows that are not aligned, and dense tensors whose last dimension is not the innermost one."""
    core = raw(draw(tokens=70), True, True, True)
    assert core.g is not None
    odd = torch.cat([core.q, core.q[..., :1]], -1)[..., :-1]
    turned = core.k.transpose(1, 3).contiguous().transpose(1, 3)
    heads_first = core.v.transpose(1, 2).contiguous().transpose(1, 2)
    gates = {name: x.mT.contiguous().mT for name, x in (("g", core.g), ("beta", core.beta))}
    check_raw(core._replace(q=odd, k=turned, v=heads_first, **gates))


@pytest.mark.parametrize("given", [(), (True, True, True), (True, False, False)], ids=["made", "raw", "norm"])
@pytest.mark.parametrize("keep", [False, True], ids=["alone", "kept"])
def test_a_prepared_forward(given: tuple[bool, ...], keep: bool, kernel: Kernel) -> None:
    """It serves tensors that lie alike, wherever they begin, and what has to be copied."""
    core = draw(tokens=70)
    if given:
        core = raw(core, *given)
    odd = core._replace(**{name: at_odd_address(getattr(core, name)) for name in ("q", "v", "initial_state")})
    split = core._replace(v=torch.cat([core.v, core.v[..., :1]], -1)[..., :-1])
    options = {"output_final_state": True, "keep": keep}
    for first, calls in ((core, (core, odd, core)), (odd, (core, odd)), (split, (split,))):
        prepared = launch.prepare(first, **options)
        for one in calls:
            o, last, kept = prepared(*one[:9])
            expected = launch.forward(core, **options)
            assert torch.equal(o, expected[0]) and torch.equal(last, expected[1])
            assert (kept is not None) == keep


def test_raw_inputs_are_prepared_once_for_each_kind(kernel: Kernel) -> None:
    core = raw(draw(tokens=70), True, True, True)
    kinds = (core, core._replace(neg_eigval=False), core._replace(dt_bias=None))
    for one in kinds:
        check_raw(one)
    prepared = kernel.prepared
    for one in kinds:
        check_raw(one)
    assert kernel.prepared == prepared


def test_where_the_walks_over_the_states_begin(kernel: Kernel) -> None:
    check(draw((144, 48)))
    starts = [(sequence, at) for sequence in range(B) for at in (0, 64, 128)]
    assert kernel.begun == [(walk, *start) for walk in ("left", "right") for start in starts]
    kernel.begun.clear()
    check(draw((144, 48), packed=True))
    starts = [(0, 0), (0, 64), (2, 0), (3, 0), (3, 64), (3, 128), (4, 0)]
    assert kernel.begun == [(walk, *start) for walk in ("left", "right") for start in starts]


@pytest.mark.parametrize("group", [1, 3])
def test_a_backward_of_tensors_that_begin_anywhere(group: int, kernel: Kernel) -> None:
    """Also right after one like it whose tensors the kernels take where they are, and the other way round."""
    core = draw(group=group, tokens=70)
    o, last, kept = launch.forward(core, output_final_state=True, keep=True)
    do, dht = cotangents(o, last)
    odd = core._replace(**{name: at_odd_address(getattr(core, name)) for name in ("k", "v", "initial_state")})
    calls = [
        (core, do, dht),
        (odd, do, dht),
        (core, at_odd_address(do), at_odd_address(dht)),
        (core, do, dht),
    ]
    first, *others = (launch.backward(x, kept, *grads, needs_gates=True) for x, *grads in calls)
    for found in others:
        for x, y in zip(found, first, strict=True):
            assert (x is None and y is None) or torch.equal(x, y)
    # whichever comes first
    for order in (calls[::-1], calls[1:], calls[2:]):
        launch._backwards.clear()
        for found in (launch.backward(x, kept, *grads, needs_gates=True) for x, *grads in order):
            for x, y in zip(found, first, strict=True):
                assert (x is None and y is None) or torch.equal(x, y)


@pytest.mark.parametrize("move", [at_odd_address, lambda x: x.repeat_interleave(2)[::2]])
def test_what_is_kept_may_lie_elsewhere(move: Any, kernel: Kernel) -> None:
    """Where a hook on saved tensors has put it."""
    core = draw(tokens=70)
    o, last, kept = launch.forward(core, output_final_state=True, keep=True)
    assert kept is not None
    grads = cotangents(o, last)
    expected = launch.backward(core, kept, *grads, needs_gates=True)
    found = launch.backward(core, kept._replace(tensors=(move(kept.tensors[0]),)), *grads, needs_gates=True)
    for x, y in zip(found, expected, strict=True):
        assert (x is None and y is None) or torch.equal(x, y)


def test_the_layout_of_what_is_kept_is_known_of_fake_tensors(kernel: Kernel) -> None:
    """Of a GPU, on any machine: what torch.compile asks."""
    core = draw((128, 128), group=2, packed=True)
    with FakeTensorMode():
        fake = [None if x is None else torch.empty(x.shape, dtype=x.dtype, device="cuda:0") for x in core[:9]]
        layout = launch.kept_layout(DeltaRuleCore._make((*fake, *core[9:])))
        *_, kept = torch.ops.tfla_tk.delta_rule_fwd_kept(*fake, *core[9:], True, layout)
    assert layout == launch.kept_layout(core) and kept.shape == layout[:1]
    assert kept.device.type == "cuda" and kept.dtype == core.v.dtype


def test_what_is_kept_of_another_size_is_made_again(kernel: Kernel) -> None:
    core = draw(tokens=70)
    o, last, kept = launch.forward(core, output_final_state=True, keep=True)
    assert kept is not None
    grads = cotangents(o, last)
    expected = launch.backward(core, kept, *grads, needs_gates=True)
    size, *others = kept.layout
    left = torch.full((size - 128,), torch.nan).bfloat16()
    for other in (Kept((left,), (size - 128, *others)), Kept((left,), kept.layout)):
        for x, y in zip(launch.backward(core, other, *grads, needs_gates=True), expected, strict=True):
            assert (x is None and y is None) or torch.equal(x, y)


@pytest.mark.parametrize("longest", [0, None], ids=["carried", "leads"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_what_is_kept_of_another_split_is_made_again(
    packed: bool, longest: int | None, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same size: two segments of 3 and 2 chunks, then of 4 and 1. In a graph from torch's cache on
    disk, for example, which kernels of another version have made."""
    core = draw(packed=packed, tokens=5 * CHUNK)
    found = []
    for chunks in (3, 4):
        forget_calls()
        split_into(monkeypatch, chunks, longest)
        o, last, kept = launch.forward(core, output_final_state=True, keep=True)
        assert kept is not None
        found.append(kept)
    grads = cotangents(o, last)
    of_other, of_own = found
    assert of_other.layout[0] == of_own.layout[0]
    expected = launch.backward(core, of_own, *grads, needs_gates=True)
    kernel.launches.clear()
    again = launch.backward(core, of_other, *grads, needs_gates=True)
    assert [x.name for x in kernel.launches].count("forward") == 1
    for x, y in zip(again, expected, strict=True):
        assert (x is None and y is None) or torch.equal(x, y)


def test_the_gradient_of_a_state_lies_like_it(kernel: Kernel) -> None:
    """Also where it is transposed, as with state_v_first."""
    core = draw(tokens=70)
    o, last, kept = launch.forward(core, output_final_state=True, keep=True)
    grads = cotangents(o, last)
    dense = launch.backward(core, kept, *grads, needs_gates=True)[7]
    assert core.initial_state is not None and dense is not None
    transposed = core._replace(initial_state=core.initial_state.mT.contiguous().mT)
    found = launch.backward(transposed, kept, *grads, needs_gates=True)[7]
    assert found is not None and transposed.initial_state is not None
    assert found.stride() == transposed.initial_state.stride()
    assert torch.equal(found, dense)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_lie_like_the_gates(dtype: torch.dtype, kernel: Kernel) -> None:
    """In the dtype and the memory order of g and beta."""
    core = draw(group=2, tokens=70)
    assert core.g is not None
    g, beta = (x.to(dtype).mT.contiguous().mT for x in (core.g, core.beta))
    core = core._replace(g=g, beta=beta)
    check(core)
    o, last, kept = launch.forward(core, output_final_state=True, keep=True)
    found = launch.backward(core, kept, *cotangents(o, last), needs_gates=True)
    for x, y in zip(found[3:5], (g, beta), strict=True):
        assert x is not None and (x.dtype, x.stride()) == (dtype, y.stride())


@pytest.mark.parametrize("dim_k", [64, 144])
def test_states_are_left_for_training_alone(dim_k: int, kernel: Kernel) -> None:
    """Of every chunk, with a wide K at the borders between segments."""
    core = draw((dim_k, 48))
    for keep in (False, True):
        launch.forward(core, output_final_state=True, keep=keep)
        walk = kernel.launches[-1]
        assert (bool(walk.states), bool(walk.borders)) == (keep and dim_k == 64, keep and dim_k == 144)
    check(draw((dim_k, 48), tokens=CHUNK))  # one segment


def test_a_call_like_another_is_prepared_once(kernel: Kernel) -> None:
    check(draw())
    prepared = kernel.prepared
    check(draw())
    assert kernel.prepared == prepared == len(kernel.launches) // 2
