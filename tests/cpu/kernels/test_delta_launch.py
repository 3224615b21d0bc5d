"""What the host side of the delta rule hands to its kernels, whose place the recurrence takes; no GPU."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import build, reference
from tfla_tk.backends.tk import operands
from tfla_tk.backends.tk.delta_rule import call, inputs, launch, split
from tfla_tk.backends.tk.delta_rule.call import Shape
from tfla_tk.calls.delta_rule import DeltaRuleCore
from tfla_tk.core.layout import CHUNK, DELTA_ANCHOR_CHUNKS, SEGMENT_CHUNKS
from tfla_tk.core.memo import Memo

from .addresses import at_odd_address, sequences_of
from .delta_emulation import Kernel

B, T, H = 2, 150, 2
SCALE = 0.3
OFFSETS = [0, 70, 70, 134, 264, B * T]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Whose segments are one chunk."""
    found = Kernel(CHUNK)
    monkeypatch.setattr(build, "load", found.load)
    for module in (inputs, launch):
        monkeypatch.setattr(module, "current_stream", lambda device: 7)
    for memo in ("_forwards", "_backwards"):
        monkeypatch.setattr(launch, memo, Memo())
    monkeypatch.setattr(call, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(call, "SEGMENT_CHUNKS", 1)
    return found


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
    return DeltaRuleCore(
        q, k, v, g, beta, None, None, initial, offsets, SCALE, False, False, False, False, "auto"
    )


def error(found: Tensor | None, truth: Tensor) -> float:
    assert found is not None and found.shape == truth.shape
    return float((found.float() - truth.float()).norm() / truth.float().norm())


def cotangents(*outputs: Tensor | None) -> list[Tensor]:
    """Like the outputs; the same whatever tests ran before, and so are the errors of gradients."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(x.shape, generator=generator).to(x.dtype) for x in outputs if x is not None]


def check(core: DeltaRuleCore, keep: bool = True) -> None:
    """Both directions; without `keep` the backward makes the forward again."""
    g = core.beta.new_zeros(core.beta.shape) if core.g is None else core.g
    o, last, kept = launch.forward(core, output_final_state=True, keep=keep)
    assert (kept is None) == (not keep)
    inputs = (core.q, core.k, core.v, g, core.beta)
    options: dict[str, Any] = {
        "scale": SCALE,
        "initial_state": core.initial_state,
        "cu_seqlens": core.cu_seqlens,
    }
    expected = reference.gated_delta_rule_recurrent(*inputs, output_final_state=True, **options)
    assert error(o, expected[0]) < 5e-3 and error(last, expected[1]) < 1e-4
    do, dht = cotangents(o, last)
    found = launch.backward(core, kept, do, dht, needs_gates=True)
    truth = reference.gated_delta_rule_backward(*inputs, do, dht, **options)
    places = {"dq": 0, "dk": 1, "dv": 2, "dg": 3, "dbeta": 4, "dh0": 7}
    given = {"dg": core.g is not None, "dh0": core.initial_state is not None}
    for name, place in places.items():
        if given.get(name, True):
            assert error(found[place], getattr(truth, name)) < 1e-2, name
        else:
            assert found[place] is None


@pytest.mark.parametrize("makers", [False, True], ids=["before", "beside"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("gate", [False, True], ids=["ungated", "gated"])
@pytest.mark.parametrize("state", [False, True], ids=["zeros", "state"])
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
    # packed chunks have other slots
    assert [of[0] != 0 for of in kernel.anchor_shapes] == [packed] * len(kernel.anchor_shapes)
    assert bool(kernel.anchor_shapes) == gate
    names = [x.name for x in kernel.launches]
    backward = ["mirror", "left", "right", *["mlstm_bwd_gates"] * gate, "strength"]
    forward = [*["matrices"] * (not makers), "forward"]
    assert names == forward + backward + forward + forward + backward


@pytest.mark.parametrize("group", [2, 4, 5, 8])
def test_heads_of_a_group_add_up_their_results(group: int, kernel: Kernel) -> None:
    """In the walks over the states, or, of many heads, parts that another launch adds up."""
    core = draw((16, 16), group=group, tokens=70)
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
    """States at the borders between segments are carried; those within a segment the walks leave."""
    monkeypatch.setattr(Shape, "split", property(lambda self: self.cut_into(chunks)))
    core = draw((48, dim_v), group=group, packed=packed, state=state, tokens=200)
    check(core)
    names = [x.name for x in kernel.launches]
    forward = ["matrices", "maps", "carry", "forward"]
    assert names[:7] == [*forward, "mirror", "carry", "mirror"]
    kernel.launches.clear()
    launch.forward(core, output_final_state=True, keep=False)
    assert [x.name for x in kernel.launches] == forward
    assert kernel.launches[1].maps[0] == 0  # M itself is for the backward


def test_a_split_of_sequences_that_are_no_longer_than_a_segment(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Shape, "split", property(lambda self: self.cut_into(1)))
    check(draw((48, 32), tokens=CHUNK))
    assert {x.name for x in kernel.launches}.isdisjoint({"maps", "carry"})


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


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("dims", [(48, 320), (192, 64), (256, 144)], ids=str)
def test_large_head_dims(dims: tuple[int, int], group: int, kernel: Kernel) -> None:
    """Several slices of V in the walks over the states, and more columns of K than makers serve."""
    check(draw(dims, group=group, tokens=70))
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
    expected = torch.ops.tfla_tk.delta_rule_fwd(*core, True)
    assert error(o, expected[0]) < 5e-3 and error(last, expected[1]) < 5e-3
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


RAW = [flags for flags in itertools.product((False, True), repeat=3) if any(flags)]


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("flags", RAW)
def test_raw_inputs(flags: tuple[bool, bool, bool], packed: bool, group: int, kernel: Kernel) -> None:
    core = raw(draw((48, 32), group=group, packed=packed, tokens=70), *flags)
    check_raw(core)
    names = [x.name for x in kernel.launches]
    assert names.count("inputs") == 3  # of the forward, and again in every backward
    assert names.count("inputs_backward") == 1 + any(flags[:2])  # none for gates without gradients
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
    gates = {name: x.mT.contiguous().mT for name, x in (("g", core.g), ("beta", core.beta))}
    check_raw(core._replace(q=odd, k=turned, **gates))


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
    prepared = len(kernel.instances)
    for one in kinds:
        check_raw(one)
    assert len(kernel.instances) == prepared


def test_where_the_walks_over_the_states_begin(kernel: Kernel) -> None:
    check(draw())
    starts = [(sequence, at) for sequence in range(B) for at in (0, 64, 128)]
    assert kernel.begun == [(walk, *start) for walk in ("left", "right") for start in starts]
    kernel.begun.clear()
    check(draw(packed=True))
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


def test_states_at_borders_are_left_for_training_alone(kernel: Kernel) -> None:
    launch.forward(draw(), output_final_state=True, keep=False)
    assert kernel.launches[-1].borders == 0
    _, _, kept = launch.forward(draw(tokens=CHUNK), output_final_state=True, keep=True)  # one segment
    assert kernel.launches[-1].borders == 0
    assert kept is not None
    check(draw(tokens=CHUNK))


def test_a_call_like_another_is_prepared_once(kernel: Kernel) -> None:
    for _ in range(2):
        check(draw())
    names = [instance.name for instance in kernel.instances]
    assert names == [
        "delta_forward_k64_overlapped",
        "delta_backward_k64_overlapped",
        "delta_states_v64",
        "decay_bwd",
    ]


# The cut of the walks over the states


def shape_of(sequences: int, seq: int, *, packed: bool = False, heads: int = 16, dim: int = 128) -> Shape:
    batch = 1 if packed else sequences
    slots = -(-seq // CHUNK) + (sequences if packed else 0)
    return Shape(sequences, slots, batch, heads, seq, dim, dim, 1, False, 0, packed, packed)


def test_borders_are_anchors() -> None:
    segment_tokens = SEGMENT_CHUNKS * CHUNK
    assert SEGMENT_CHUNKS % DELTA_ANCHOR_CHUNKS == 0
    assert [shape_of(1, segment_tokens + more).borders for more in (0, 1)] == [0, 1]


@pytest.mark.parametrize("seq", [1, 64, 1023, 1024, 1025, 2048, 5000, 8192, 100_000])
def test_a_sequence_is_cut_alike_in_any_call(seq: int) -> None:
    """By its length alone: in any batch, and packed among others, whose borders have slots of their own."""

    def pieces(cut: tuple[int, ...], tokens: int) -> list[list[range]]:
        return [sequence.segments for sequence in sequences_of(cut, 1, tokens)]

    chunks = -(-seq // CHUNK)
    expected = [range(at, min(at + SEGMENT_CHUNKS, chunks)) for at in range(0, chunks, SEGMENT_CHUNKS)]
    for batch, heads in itertools.product((1, 2, 300), (1, 16, 64)):
        shape = shape_of(batch, seq, heads=heads)
        assert pieces(shape.with_offsets(0, shape.cut)[:5], seq) == [expected]
        assert shape.cut.segments == batch * len(expected)
        assert shape.borders == batch * (len(expected) - 1)
    generator = random.Random(seq)
    for count in (1, 3, 50):
        lengths = [generator.choice((0, 1, 1024, generator.randint(0, 10_000))) for _ in range(count)]
        place = generator.randrange(count)
        lengths[place] = seq
        offsets = torch.tensor([0, *itertools.accumulate(lengths)])
        shape = shape_of(count, sum(lengths), packed=True)
        found = sequences_of(shape.with_offsets(offsets.data_ptr(), shape.cut)[:5], 1, shape.seq)
        assert found[place].segments == expected
        slots = [
            slot for sequence in found for slot in range(sequence.boundaries.start, sequence.boundaries.stop)
        ]
        assert len(set(slots)) == len(slots) and all(0 <= slot < shape.borders for slot in slots)


def test_walkers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two per CTA of the walks over the states where segments and heads fill the GPU, else one."""
    monkeypatch.setattr(call, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(Shape, "split", None)
    of_states = {
        shape: shape_of(shape[0], shape[1], heads=shape[2]).states_walkers
        for shape in ((1, 8192, 32), (8, 8192, 16), (1, 8192, 16), (1, 2048, 16), (1, 32768, 16))
    }
    assert list(of_states.values()) == [2, 2, 2, 1, 2]
    assert shape_of(8, 8192, dim=64).states_walkers == 1
    assert [shape_of(n, 8192).walkers for n in (1, 8)] == [1, 2]
    wide = shape_of(4, 4096, heads=6)._replace(dim_k=256, dim_v=512)
    assert (wide.walkers, wide.states_walkers, wide.makers) == (2, 2, 0)
    assert shape_of(1, 8192)._replace(dim_k=144).makers == 0 < shape_of(1, 8192).makers
    for count in (1, 8):
        fixed = shape_of(count, 1000)._replace(batch_invariant=True)
        assert (fixed.walkers, fixed.states_walkers) == (2, 2)
        fixed_wide = fixed._replace(dim_k=256, dim_v=512)
        assert (fixed_wide.walkers, fixed_wide.states_walkers) == (2, 2)
        assert fixed._replace(dim_k=64, dim_v=64).states_walkers == 1


def test_makers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the multiprocessors that the forward's walk leaves idle, where these are enough."""
    monkeypatch.setattr(call, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(Shape, "split", None)
    found = {heads: shape_of(1, 8192, heads=heads).makers for heads in (1, 16, 32)}
    assert found == {1: 128, 16: 100, 32: 68}
    assert shape_of(2, 4096, dim=64).makers == 100
    assert shape_of(3, 300, packed=True, heads=4).makers == 32  # no more than there are slots
    assert shape_of(1, 1, heads=2).makers == 2
    for heads in range(1, 200):
        shape = shape_of(1, 8192, heads=heads)
        ctas = heads * -(-2 // shape.forward_walkers)
        assert shape.makers == 0 or (shape.makers > 0 and shape.makers + ctas <= 132)


def test_two_walkers_leave_room_for_makers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mirror has no makers."""
    monkeypatch.setattr(call, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(Shape, "split", None)
    shape = shape_of(4, 8192)
    assert shape.forward_walkers == 2 and shape.makers == 132 - 64 and shape.walkers == 1
    # one block of 64 columns has one walker
    assert shape_of(8, 8192, dim=64).forward_walkers == 1
    fixed = shape._replace(batch_invariant=True)
    assert fixed.forward_walkers == fixed.walkers == 2


def test_who_makes_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walks of two walkers that fill the GPU, and all with small K; a large state leaves no registers."""
    monkeypatch.setattr(call, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(Shape, "split", None)
    for count, heads, dim, makers, matrices in (
        (8, 16, 128, False, 1),
        (8, 32, 128, False, 1),
        (1, 32, 128, True, 2),
        (1, 48, 128, True, 2),
        (4, 16, 64, True, 1),
        (8, 16, 64, False, 1),
        (8, 16, 256, False, 2),
    ):
        shape = shape_of(count, 8192, heads=heads, dim=dim)
        assert (shape.makers > 0, shape.matrices) == (makers, matrices), (count, heads, dim)
        _, p, flags = shape.matrices_at(1024)
        assert (p > 0, flags > 0) == (matrices == 2, makers)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("has_makers", [False, True])
def test_a_walk_that_does_not_make_the_scores_is_given_them(
    dim: int, has_makers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward's walk and the mirror, which may have another number of walkers, with makers or without."""
    monkeypatch.setattr(call, "multiprocessors", lambda device: 132)
    if not has_makers:
        monkeypatch.setattr(Shape, "makers", 0)
    for heads, fixed in itertools.product(range(1, 300), (False, True)):
        shape = shape_of(1, 4096, heads=heads, dim=dim)._replace(batch_invariant=fixed)
        for walkers, makers in ((shape.forward_walkers, shape.makers), (shape.walkers, 0)):
            assert shape.matrices >= split.matrices_before(dim, walkers, makers), (heads, fixed)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "multiprocessors", lambda device: 132)


def test_few_long_sequences_are_split(hopper: None) -> None:
    """Into segments that end at borders of the walks over the states, and without makers."""
    for sequences, seq, heads in ((1, 65536, 16), (1, 32768, 8), (1, 32768, 4), (2, 16384, 2), (1, 16384, 1)):
        shape = shape_of(sequences, seq, heads=heads)
        assert shape.split is not None and shape.makers == 0
        assert shape.split.chunks % SEGMENT_CHUNKS == 0
        count = -(-seq // (shape.split.chunks * CHUNK))
        assert shape.split.segments == sequences * count and count > 1
        assert shape.carried == sequences * (count - 1)
    packed = shape_of(1, 65536, packed=True)
    assert packed.split is not None and packed.split.chunks == shape_of(1, 65536).split.chunks


def test_others_are_left_whole(hopper: None) -> None:
    """Short ones, and those that fill the GPU; and in any case where results may not follow from the call."""
    for sequences, seq, heads in ((1, 2125, 2), (1, 1, 1), (8, 8192, 16), (1, 32768, 64), (16, 2048, 4)):
        assert shape_of(sequences, seq, heads=heads).split is None
    # many packed ones of unknown lengths
    assert shape_of(16, 65536, packed=True).split is None
    assert shape_of(1, 65536)._replace(batch_invariant=True).split is None
    # what the kernels carry
    assert shape_of(1, 65536, dim=256).split is None


def test_more_multiprocessors_take_shorter_segments(hopper: None) -> None:
    """Or as long ones."""
    for heads, seq in itertools.product((1, 2, 4, 8, 16), (8192, 16384, 65536)):
        machines = [split.Machine(count, 3.35e6) for count in (66, 132, 264)]
        lengths = [split.segment_chunks(1, seq, heads, 1, split.Slices(2, 2), of) or seq for of in machines]
        assert lengths == sorted(lengths, reverse=True)


def test_faster_memory_takes_no_longer() -> None:
    sizes = {"pairs": 256, "chunks": 16, "dims": (128, 128), "walkers": (1, 2)}
    slow, fast = (split.forward(**sizes, group=1, machine=split.Machine(132, rate)) for rate in (2e6, 5e6))
    assert fast.time < slow.time


def test_slices_and_heads_share_the_turns(hopper: None) -> None:
    assert [shape_of(1, 512)._replace(group=4, dim_v=v).shared for v in (128, 256, 512)] == [4, 2, 1]


@pytest.mark.parametrize(
    ("told", "rate"), [({}, 3.35e6), ({"memory_clock_rate": 2_619_000, "memory_bus_width": 5120}, 3.352e6)]
)
def test_memory_rate(told: dict[str, int], rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of an H100 where torch does not tell."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**told))
    assert operands.memory_rate.__wrapped__(0) == pytest.approx(rate, rel=1e-3)
