"""mLSTM's decoding, one token or a few: its kernels, whose sources run on a CPU here, behind the public
functions."""

from __future__ import annotations

import itertools
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tfla_tk
from tfla_tk.backends.tk.scalar_gate import decoding as host
from tfla_tk.build.instances import MAX_DIM_V, MAX_TOKENS
from tfla_tk.core.layout import MAX_SLICES

from .calls import Tensors, flat
from .scalar_gate import Decoding
from .stand_in import at_odd_address

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# of h and of a state in this dtype, relative Frobenius error
TOLERANCE = {torch.float64: 5e-6, torch.float32: 5e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
GATES = {
    "exp": ("mlstm", {}),
    "sig": ("mlstm_siging", {}),
    "unnormalised": ("mlstm_siging", {"normalize": False}),
}
TOKENS = ((), (5,), (16,))


def draw(
    tokens: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, state: torch.dtype = torch.float32,
    dims: tuple[int, int] = (64, 128), batch: int = 1, heads: int = 2,
) -> Tensors:  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    shapes = {
        **dict.fromkeys("qk", (*tokens, dims[0])),
        "v": (*tokens, dims[1]),
        **dict.fromkeys("if", tokens or (1,)),
    }
    shapes |= {"c": dims, "n": dims[:1], "m": (1,)}
    drawn = {name: torch.randn(batch, heads, *shape, generator=generator) for name, shape in shapes.items()}
    drawn["f"] += 3
    return {
        name: t.to(state if name in "cnm" else dtype if name in "qkv" else t.dtype)
        for name, t in drawn.items()
    }


def results(x: Tensors, gate: str = "exp", backend: str = "tk", **options: Any) -> Tensors:
    name, of_gate = GATES[gate]
    function = getattr(tfla_tk, f"{name}_step" if x["q"].dim() == 3 else f"{name}_sequence")
    given = {name: t for name, t in x.items() if gate == "exp" or name != "m"}
    found = flat(function(**given, backend=backend, **of_gate, **options))
    return dict(zip("hcnm", found.values(), strict=False))


def exact(x: Tensors, gate: str = "exp") -> Tensors:
    return results({name: t.double() for name, t in x.items()}, gate, "reference")


def check(x: Tensors, gate: str = "exp", **options: Any) -> Tensors:
    """That a call has the results of the recurrence in fp64, in place or new ones: of the state c e^m and n
    e^m, which is all that counts."""
    expected = exact(x, gate)
    found = results(x, gate, **options)
    assert found.keys() == expected.keys() and found["h"].is_contiguous()
    for name, true in expected.items():
        own = found[name].double()
        if name in "cn" and "m" in expected:
            scale = (found["m"].double() - expected["m"]).exp()
            own = own * (scale[..., None] if name == "c" else scale)
        assert (own - true).norm() <= 2 * TOLERANCE[found[name].dtype] * true.norm(), name
        assert name == "h" or (found[name] is x[name]) == options.get("inplace", False)
    return found


PAIRS = [
    (tokens, gate, dtype, before, after)
    for n, (before, after) in enumerate(itertools.product(DTYPES, DTYPES))
    for m, tokens in enumerate(TOKENS)
    for gate, dtype in [([*GATES][(n + m) % 3], DTYPES[(n // 3 + n + 2 * m) % 3])]
]


@pytest.mark.parametrize(("tokens", "gate", "dtype", "before", "after"), PAIRS, ids=str)
def test_a_new_state(tokens: Any, gate: str, dtype: Any, before: Any, after: Any, decoding: Decoding) -> None:
    check(draw(tokens, dtype, before), gate, dtype_state=after)
    (launch,) = decoding.launches
    assert launch.stream == 7 and launch.tiling[1] > 1  # aligned, so that vectors are loaded


IN_PLACE = [
    (tokens, [*GATES][(n + m) % 3], DTYPES[(n + 2 * m) % 3], layout)
    for n, layout in enumerate(("as they are", "turned", "wider", "odd"))
    for m, tokens in enumerate(TOKENS)
]


@pytest.mark.parametrize(("tokens", "gate", "state", "layout"), IN_PLACE, ids=str)
def test_in_place(tokens: Any, gate: str, state: torch.dtype, layout: str, decoding: Decoding) -> None:
    """Bitwise a new state. What a kernel cannot write is updated in a copy, and copied back."""
    x = draw(tokens, state=state)
    expected = results(x, gate, dtype_state=state)
    if layout == "turned":
        x["c"] = x["c"].mT.contiguous().mT
    elif layout == "wider":
        x["n"] = x["n"].double()
    elif layout == "odd":
        x["c"] = at_odd_address(x["c"])
    found = check(x, gate, inplace=True)
    if layout == "odd":  # other slices, and sums in another order
        return
    assert all(torch.equal(found[name].to(t.dtype), t) for name, t in expected.items())
    if layout == "as they are":  # nothing is copied
        assert decoding.launches[-1].before[:2] == (x["c"].data_ptr(), x["n"].data_ptr())


def test_any_number_of_tokens(decoding: Decoding) -> None:
    for count in range(1, MAX_TOKENS + 1):
        check(draw((count,), torch.float32, dims=(40, 36)))
        check(draw((count,), state=torch.bfloat16, dims=(33, 31)), "sig")


def test_one_token_of_a_sequence_is_a_step(decoding: Decoding) -> None:
    """Bitwise."""
    x = draw((1,))
    found = results(x)
    step = results(x | {name: x[name][:, :, 0] for name in "qkv"})
    assert torch.equal(found.pop("h")[:, :, 0], step.pop("h"))
    assert all(torch.equal(found[name], t) for name, t in step.items())


DIMS = ((1, 1), (256, 1), (1, 512), (3, 5), (256, 512), (255, 511), (100, 300))


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("tokens", [(), (3,), (9,)], ids=str)
def test_head_dims(tokens: Any, dims: tuple[int, int], decoding: Decoding) -> None:
    check(draw(tokens, torch.float32, dims=dims, heads=1))


@pytest.mark.parametrize("tokens", TOKENS, ids=str)
def test_slices_of_any_width(tokens: Any, decoding: Decoding) -> None:
    """The widest and the narrowest; the order of sums is all that they change."""
    x = draw(tokens, torch.float32, dims=(64, 256))
    for invariant in (False, True):
        with tfla_tk.batch_invariant(invariant):
            check(x)
    narrow, wide = (launch.tiling[0] for launch in decoding.launches)
    assert narrow < wide


EXTREME = {
    "both_high": (1e4, 1e4),
    "both_low": (-1e4, -1e4),
    "forget_all": (1.0, -1e4),
    "keep_all": (-1e4, 1e4),
    "write": (80.0, -80.0),
    "keep": (-80.0, 80.0),
}


@pytest.mark.parametrize("gates", EXTREME)
def test_extreme_gates(gates: str, decoding: Decoding) -> None:
    for_states = (0.0, torch.float32, "exp"), (80.0, torch.bfloat16, "exp"), (0.0, torch.float32, "sig")
    for tokens, (m, state, gate) in itertools.product(((), (8,), (16,)), for_states):
        x = draw(tokens, torch.float32, state, heads=1, dims=(32, 64))
        for name, value in zip("if", EXTREME[gates], strict=True):
            x[name].fill_(value)
        x["m"].fill_(m)
        assert all(t.isfinite().all() for t in check(x, gate).values())


@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_spike_among_the_tokens(place: int, decoding: Decoding) -> None:
    """i = 80: what was before is forgotten, what the spike wrote stays; tokens before it do not see it."""
    x = draw((8,), torch.float32)
    x["i"].fill_(-80.0)
    x["i"][:, :, place] = 80.0
    check(x)


@pytest.mark.parametrize("tokens", TOKENS, ids=str)
def test_an_empty_memory(tokens: Any, decoding: Decoding) -> None:
    """m = -inf: nothing was there."""
    x = draw(tokens, torch.float32)
    x["m"].fill_(-torch.inf)
    x["c"].zero_()
    x["n"].zero_()
    check(x)


@pytest.mark.parametrize("tokens", [(), (8,), (16,)], ids=str)
def test_a_state_that_is_kept(tokens: Any, decoding: Decoding) -> None:
    """Nothing written, nothing forgotten: bit for bit the state that it was."""
    x = draw(tokens)
    x["i"].fill_(-1e4)
    x["f"].fill_(1e4)
    found = results(x)
    assert all(torch.equal(found[name], x[name]) for name in "cnm")


@pytest.mark.parametrize("name", ["q", "i", "f"])
def test_nan_of_a_token_leaves_those_before_it(name: str, decoding: Decoding) -> None:
    x = draw((8,))
    clean = results(x)
    x[name][0, 1, 5] = torch.nan
    found = results(x)
    assert torch.equal(found["h"][0, 1, :5], clean["h"][0, 1, :5])
    assert found["h"][0, 1, 5].isnan().all() and (name == "q" or found["h"][0, 1, 5:].isnan().all())
    assert all(torch.equal(found[of][0, 0], clean[of][0, 0]) for of in clean)


@pytest.mark.parametrize("tokens", TOKENS[:2], ids=str)
def test_tokens_are_read_where_they_lie(tokens: Any, decoding: Decoding) -> None:
    """Any strides: a fused projection, the end of a longer sequence, every second number, gates of one."""
    x = draw(tokens, batch=2)
    fused = torch.cat([x["q"], x["k"], x["v"]], -1).transpose(1, -2).contiguous().transpose(1, -2)
    views = dict(zip("qkv", fused.split((64, 64, 128), dim=-1), strict=True))
    views["i"] = torch.cat([x["i"], x["i"]], -1)[..., x["i"].shape[-1] :]
    views["f"] = x["f"][:1, :1, :1].half().expand_as(x["f"])
    check(x | views)
    (launch,) = decoding.launches
    for name, y in views.items():
        address, batch, head, *rest = getattr(launch, name)[:5]
        assert (address, batch, head) == (y.data_ptr(), *y.stride()[:2])
        assert name in "if" or [*y.stride()[2:]] == rest[-len(y.stride()[2:]) :]
    check(x | {"q": x["q"].repeat_interleave(2, -1)[..., ::2], "i": x["i"].double()})


@pytest.mark.parametrize("tokens", TOKENS[:2], ids=str)
def test_gates_that_are_converted_live_until_the_launch(
    tokens: Any, decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels get addresses alone."""
    to_float, run = torch.Tensor.float, decoding.run
    converted: list[tuple[weakref.ref[torch.Tensor], int]] = []
    alive: list[bool] = []

    def float_(x: torch.Tensor) -> torch.Tensor:
        found = to_float(x)
        converted.append((weakref.ref(found), found.data_ptr()))
        return found

    def launch(*arguments: Any) -> None:
        given = {x[0] for x in arguments if isinstance(x, tuple)}
        alive.extend(x() is not None and address in given for x, address in converted)
        run(*arguments)

    x = draw(tokens)
    x |= {name: x[name].double() for name in "if"}
    monkeypatch.setattr(torch.Tensor, "float", float_)
    decoding.run = launch
    results(x)
    assert alive == [True, True]


@pytest.mark.parametrize("tokens", TOKENS[:2], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_vectors_do_not_fit(tokens: Any, dtype: torch.dtype, decoding: Decoding) -> None:
    check(draw(tokens, state=dtype, dims=(64, 31)), dtype_state=dtype)
    assert decoding.launches[0].tiling[1] == 1


@pytest.mark.parametrize("multiprocessors", [1, 114, 132])
def test_slices_of_a_head(multiprocessors: int) -> None:
    """Never more than a cluster has CTAs; a small batch takes more than a large one."""
    for width, dim_v in itertools.product((1, 4, 8), range(1, MAX_DIM_V + 1)):
        if dim_v % width:
            continue
        batches, columns = (1, 8, 64, 4096), 8 * max(width, 4)
        lanes = [host._lanes(heads, dim_v, width, multiprocessors) for heads in batches]
        warps = [host._warps(heads, dim_v, width, multiprocessors) for heads in batches]
        assert lanes == sorted(lanes) and {*lanes} <= {1, 2, 4, 8, 16, 32}
        assert warps == sorted(warps) and {*warps} <= {1, 2}
        for of_slice in (*(count * width for count in lanes), *(count * columns for count in warps)):
            assert -(-dim_v // of_slice) <= MAX_SLICES


# the launcher


def test_what_the_launcher_refuses(emulated: SimpleNamespace) -> None:
    rows, gate, state = (16, 64, 64, 64, 1), (16, 64, 64, 1, 0), (16, 16, 16, 0, 0, 0)

    def launch(across: int = 1, width: int = 4, tokens: int = 1, dim_qk: int = 64, dim_v: int = 64) -> None:
        sizes, of_launch = (1, 1, tokens, dim_qk, dim_v), (0.125, 1e-6, False, True, True, 0, 0)
        emulated.mlstm(*([rows] * 3), 0, gate, gate, state, state, 16, (across, width), sizes, *of_launch)

    of_sharing, of_slices = "no kernel for this sharing of C", "too many slices"
    for fault, told in (
        *(({"across": across}, of_sharing) for across in (0, 3)),
        *(({"tokens": tokens}, "or this many tokens or keys") for tokens in (0, 17)),
        ({"dim_qk": 257}, "or this many tokens or keys"),
        ({"across": 64}, "no kernel for so many lanes"),
        ({"across": 8, "tokens": 2}, "no kernel for so many warps"),
        *(({"width": 2, "tokens": tokens}, "no kernel for this width") for tokens in (1, 2)),
        *(({"across": across, "dim_v": 272}, of_slices) for across in (2, 4)),
        ({"tokens": 2, "dim_v": 528}, of_slices),
    ):
        with pytest.raises(ValueError, match=told):
            launch(**fault)
