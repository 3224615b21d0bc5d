"""Decoding of mLSTM on the GPU, a step or a few tokens at once: against the recurrence in fp64.

Spikes, empty states and NaN: tests/cpu/kernels/test_mlstm_decoding.py, where the same sources run on a CPU.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.library import opcheck

from tfla_tk.backends.tk.scalar_gate import decoding

from .decoding import (
    DEVICE,
    DIMS,
    DTYPES,
    GATES,
    NAMES,
    STATE,
    TOKENS,
    Decoder,
    Tensors,
    assert_close,
    clone,
    relative_error,
)


@pytest.fixture(params=GATES)
def gate(request: pytest.FixtureRequest) -> str:
    """Exponential gate, sigmoid gate, and without normaliser."""
    return request.param


@pytest.fixture(params=[None, 8, 16], ids=["step", "8", "16"])
def tokens(request: pytest.FixtureRequest) -> int | None:
    """A step, or as many tokens as each instance of the other kernel takes at most."""
    return request.param


@pytest.fixture
def decoder(gate: str, tokens: int | None) -> Decoder:
    return Decoder(*GATES[gate], tokens)


of_several_tokens = pytest.mark.parametrize("tokens", [8], ids=["several"], indirect=True)
of_exponential_gates = pytest.mark.parametrize("gate", ["exp"], indirect=True)
in_place_or_not = pytest.mark.parametrize("inplace", [False, True])
of_state_dtypes = pytest.mark.parametrize("state", DTYPES, ids=str)


@pytest.mark.parametrize("dims", DIMS, ids="{0[0]}_{0[1]}".format)
@of_state_dtypes
def test_all_dims(decoder: Decoder, dims: tuple[int, int], state: torch.dtype) -> None:
    x = decoder.draw(dims=dims, state=state)
    found = decoder(x, dtype_state=state)
    assert (found["h"].dtype, found["c"].dtype, found["n"].dtype) == (torch.bfloat16, state, state)
    assert_close(found, decoder.truth(x))
    if not decoder.options.get("normalize", True):
        assert torch.equal(found["n"], x["n"])


@of_several_tokens
@pytest.mark.parametrize("seq", range(1, 17))
def test_any_number_of_tokens(decoder: Decoder, seq: int) -> None:
    for dims, dtype in itertools.product(((128, 256), (33, 31)), DTYPES[:2]):
        x = decoder.draw(seq=seq, dims=dims, dtype=dtype)
        assert_close(decoder(x), decoder.truth(x))


@pytest.mark.parametrize("dims", [(128, 256), (17, 31)])
@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(DTYPES, 2)), ids=str)
@pytest.mark.parametrize("of_tokens", DTYPES[:2], ids=str)
def test_the_state_changes_its_dtype(
    decoder: Decoder, dims: tuple[int, int], before: torch.dtype, after: torch.dtype, of_tokens: torch.dtype
) -> None:
    x = decoder.draw(dims=dims, dtype=of_tokens, state=before)
    found = decoder(x, dtype_state=after)
    assert {t.dtype for name, t in found.items() if name != "h"} == {after}
    assert_close(found, decoder.truth(x))


@pytest.mark.parametrize("of_tokens", DTYPES, ids=str)
@pytest.mark.parametrize("of_gates", [*DTYPES, torch.float64], ids=str)
def test_dtypes_of_the_tokens(decoder: Decoder, of_tokens: torch.dtype, of_gates: torch.dtype) -> None:
    """In fp32 h is fp32's accuracy."""
    for dims in ((128, 256), (256, 512), (17, 31)):
        x = decoder.draw(dims=dims, dtype=of_tokens)
        x["i"], x["f"] = x["i"].to(of_gates), x["f"].to(of_gates)
        found = decoder(x)
        assert found["h"].dtype == of_tokens
        assert_close(found, decoder.truth(x))


@pytest.mark.parametrize("heads", [1, 2, 7, 8, 132, 1000])
@pytest.mark.parametrize("dims", [(256, 512), (64, 64)], ids=str)
def test_any_number_of_heads(decoder: Decoder, heads: int, dims: tuple[int, int]) -> None:
    """From slices of a few columns to wide ones."""
    for batch, own in ((1, heads), (heads, 1)):
        x = decoder.draw(batch, own, dims)
        assert_close(decoder(x), decoder.truth(x))
        assert_close(decoder(clone(x), inplace=True), decoder.truth(x))


@pytest.mark.parametrize(("batch", "heads"), [(70_000, 1), (1, 70_000), (2, 66_000)])
def test_more_heads_than_a_grid_has_rows(decoder: Decoder, batch: int, heads: int) -> None:
    seq = None if decoder.tokens is None else 3
    x = decoder.draw(batch, heads, (16, 24), seq=seq)
    q = x["q"].transpose(0, 1).contiguous().transpose(0, 1)
    assert_close(decoder(x | {"q": q}), decoder.truth(x))
    assert_close(decoder(clone(x), inplace=True), decoder.truth(x))


def check_tiling(decoder: Decoder, x: Tensors, inplace: bool) -> None:
    options = {"inplace": True} if inplace else {"dtype_state": x["c"].dtype}
    assert_close(decoder(clone(x), **options), decoder.truth(x))


TILED = list(itertools.product(((256, 512), (100, 60), (7, 24), (33, 31)), DTYPES[:2]))


@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16, 32])
@in_place_or_not
@pytest.mark.parametrize("tokens", [None], ids=["step"], indirect=True)
def test_every_tiling_of_a_step(
    decoder: Decoder, lanes: int, inplace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clusters of one to sixteen CTAs."""
    monkeypatch.setattr(decoding, "_lanes", lambda *_: lanes)
    for dims, state in TILED:
        width = 16 // state.itemsize
        width = width if dims[1] % width == 0 else 1
        if -(-dims[1] // (lanes * width)) <= 16:
            check_tiling(decoder, decoder.draw(dims=dims, state=state), inplace)


@pytest.mark.parametrize("warps", [1, 2, 4])
@in_place_or_not
@pytest.mark.parametrize("tokens", [8, 16], indirect=True)
def test_every_tiling_of_several_tokens(
    decoder: Decoder, warps: int, inplace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clusters of one to sixteen CTAs."""
    monkeypatch.setattr(decoding, "_warps", lambda *_: warps)
    for dims, state in TILED:
        eight = state.itemsize == 2 and decoder.tokens == 8 and dims[1] % 8 == 0
        if warps * 8 * (8 if eight else 4) <= 128:
            check_tiling(decoder, decoder.draw(dims=dims, state=state), inplace)


def test_strides(decoder: Decoder) -> None:
    """[B, S, NH, D], parts of a fused projection, every second number, a state in another order."""
    x = decoder.draw()
    expected = decoder(x)
    swapped = (decoder.token_dim, decoder.token_dim + 1)
    fused = torch.cat([x["q"], x["k"], x["v"]], dim=-1).transpose(*swapped).contiguous().transpose(*swapped)
    layouts = [dict(zip("qkv", fused.split((128, 128, 256), dim=-1), strict=True))]
    if decoder.tokens is not None:
        layouts.append({name: torch.stack([x[name], x[name]], -1).flatten(-2)[..., ::2] for name in "qkv"})
        layouts.append({name: x[name].mT.contiguous().mT for name in "qkv"})
    for views in layouts:
        strided = clone(x) | views
        if decoder.tokens is not None:
            strided["i"] = x["i"].transpose(1, 2).contiguous().transpose(1, 2)
        strided["c"] = x["c"].mT.contiguous().mT
        strided["n"] = x["n"].transpose(0, 1).contiguous().transpose(0, 1)
        for found in (decoder(strided), decoder(strided, inplace=True)):
            assert all(torch.equal(found[name], t) for name, t in expected.items())
        assert all(torch.equal(strided[name], expected[name]) for name in expected.keys() - {"h"})


# gates


EXTREME = {
    "both_high": (1e4, 1e4),
    "both_low": (-1e4, -1e4),
    "forget_all": (1.0, -1e4),
    "keep_all": (-1e4, 1e4),
    "write": (80.0, -80.0),
    "keep": (-80.0, 80.0),
    "small": (-80.0, 0.0),
}


@pytest.mark.parametrize("gates", EXTREME)
@pytest.mark.parametrize("state", DTYPES[:2], ids=str)
@pytest.mark.parametrize("tokens", [None, 8], ids=["step", "8"], indirect=True)
def test_extreme_gates(decoder: Decoder, gates: str, state: torch.dtype) -> None:
    for m in (0.0, 80.0, -80.0, 1e4, -1e4):
        x = decoder.draw(state=state)
        for name, value in zip("if", EXTREME[gates], strict=True):
            x[name].fill_(value)
        x["m"].fill_(m)
        found, truth = decoder(x, dtype_state=state), decoder.truth(x)
        assert all(t.isfinite().all() for t in found.values())
        assert_close(found, truth)


# memory, repeats, graphs, streams


@pytest.mark.parametrize("state", DTYPES[:2], ids=str)
@pytest.mark.parametrize("dims", [(256, 512), (100, 300), (17, 31)], ids=str)
def test_every_element_is_written(decoder: Decoder, dims: tuple[int, int], state: torch.dtype) -> None:
    """What the allocator hands out holds NaN."""
    x = decoder.draw(dims=dims, state=state)
    sizes = [x[name].numel() * state.itemsize for name in STATE] + [x["v"].numel() * 2]
    for size in sizes:
        torch.full((-(-size // 4),), torch.nan, device=DEVICE)
    assert all(t.isfinite().all() for t in decoder(x, dtype_state=state).values())


@of_state_dtypes
@pytest.mark.parametrize("dims", [(256, 512), (64, 64), (17, 31)], ids=str)
@pytest.mark.parametrize("batch", [1, 100])
@in_place_or_not
def test_repeats_are_bitwise_equal(
    decoder: Decoder, inplace: bool, batch: int, dims: tuple[int, int], state: torch.dtype
) -> None:
    """In place, too: a hundred times, since a race would not show each time."""
    x = decoder.draw(batch, 8, dims, state=state)
    expected = decoder(x, dtype_state=state)
    names = [name for name in STATE if name in expected]
    different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(100):
        own = clone(x)
        found = decoder(own, **({"inplace": True} if inplace else {"dtype_state": state}))
        assert not inplace or all(found[name] is own[name] for name in names)
        for name, t in expected.items():
            different += (found[name] != t).sum()
    assert different.item() == 0


@pytest.mark.parametrize("batch", [1, 70])
def test_a_graph_replays(decoder: Decoder, batch: int) -> None:
    """A hundred replays of one call in place are a hundred calls."""
    x = decoder.draw(batch, 8, (256, 512))
    eager = clone(x)
    decoder(clone(x), inplace=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decoder(x, inplace=True)
    for _ in range(100):
        graph.replay()
        expected = decoder(eager, inplace=True)
    assert all(torch.equal(captured[name], t) for name, t in expected.items())
    assert captured["h"].isfinite().all()


def test_streams(decoder: Decoder) -> None:
    """Calls of two streams at the same time keep out of each other's way."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [decoder.draw(1, 8, (256, 512), seed=seed) for seed in range(2)]
    expected = []
    for x in inputs:
        own = clone(x)
        for _ in range(50):
            found = decoder(own, inplace=True)
        expected.append(clone(found))
    torch.cuda.synchronize()
    found_by: list[Tensors] = [{}, {}]
    for _ in range(50):
        for n, (stream, x) in enumerate(zip(streams, inputs, strict=True)):
            with torch.cuda.stream(stream):
                found_by[n] = decoder(x, inplace=True)
    torch.cuda.synchronize()
    for found, want in zip(found_by, expected, strict=True):
        assert all(torch.equal(found[name], t) for name, t in want.items())


# many calls


@pytest.mark.parametrize("state", DTYPES[:2], ids=str)
@in_place_or_not
@pytest.mark.parametrize("tokens", [None, 8], ids=["step", "8"], indirect=True)
def test_a_hundred_calls(decoder: Decoder, state: torch.dtype, inplace: bool) -> None:
    """Against the recurrence in fp64, each with its own state.

    A state in 16 bits is rounded at every call: no worse than the reference's is then.
    """
    x = decoder.draw(2, 4, state=state)
    wide, rounded = {name: t.double() for name, t in x.items()}, clone(x)
    for seed in range(100):
        fresh = decoder.draw(2, 4, seed=seed + 1)
        token = {name: fresh[name] for name in TOKENS}
        found = decoder(x | token, **({"inplace": True} if inplace else {"dtype_state": state}))
        truth = decoder(wide | {name: t.double() for name, t in token.items()}, "reference")
        baseline = decoder(rounded | token, "reference", dtype_state=state)
        x, wide, rounded = (
            {name: t for name, t in y.items() if name != "h"} for y in (found, truth, baseline)
        )
        limit = max(4e-3, 1.2 * relative_error(baseline["h"], truth["h"]))
        assert relative_error(found["h"], truth["h"]) <= limit
    if state == torch.float32:
        assert_close(found, truth)


@of_several_tokens
@pytest.mark.parametrize("pieces", [4, 0])
def test_after_a_prefill(decoder: Decoder, pieces: int) -> None:
    """The chunkwise kernel, then eight tokens at a time or none, then single ones, as one pass would."""
    rows = decoder.draw(2, 4, seq=130)
    options = {**decoder.options, "return_last_states": True}
    tokens = {name: rows[name] for name in TOKENS}
    chunkwise, first = decoder.function("chunkwise"), 130 - 8 - 8 * pieces
    exact, _ = chunkwise(**{name: t.double() for name, t in tokens.items()}, **options, backend="reference")
    _, state = chunkwise(**{name: t[:, :, :first] for name, t in tokens.items()}, **options, backend="tk")
    carried = dict(zip(STATE, state, strict=False))
    for start in range(first, 122, 8):
        found = decoder({**{name: t[:, :, start : start + 8] for name, t in tokens.items()}, **carried})
        carried = {name: found[name] for name in carried}
        assert relative_error(found["h"], exact[:, :, start : start + 8]) <= 6e-3
    found = decoder.by_steps({**{name: t[:, :, 122:] for name, t in tokens.items()}, **carried})
    assert relative_error(found["h"], exact[:, :, 122:]) <= 6e-3


@pytest.mark.parametrize("op", ["mlstm_step", "mlstm_sequence"])
@pytest.mark.parametrize("sigmoid_gate", [False, True])
def test_opcheck(sigmoid_gate: bool, op: str) -> None:
    x = Decoder(*GATES["exp"], 8 if op == "mlstm_sequence" else None).draw()
    tensors = [x[name] for name in NAMES[:7]] + [None if sigmoid_gate else x["m"]]
    options = (sigmoid_gate, True, 1e-6)
    opcheck(getattr(torch.ops.tfla_tk, op).default, (*tensors, *options, torch.bfloat16))
    opcheck(getattr(torch.ops.tfla_tk, f"{op}_").default, (*tensors, *options))


@in_place_or_not
@pytest.mark.parametrize("tokens", [None, 8], ids=["step", "8"], indirect=True)
def test_compile(decoder: Decoder, inplace: bool) -> None:
    x = decoder.draw()
    again = clone(x)

    def run(given: Tensors) -> Tensors:
        return decoder(given, inplace=inplace)

    expected = run(x)
    found = torch.compile(run, fullgraph=True)(again)
    assert all(torch.equal(found[name], t) for name, t in expected.items())


@of_exponential_gates
@pytest.mark.parametrize("tokens", [None, 8], ids=["step", "8"], indirect=True)
def test_a_large_state(decoder: Decoder) -> None:
    """Offsets beyond 2^31 elements: 16,400 heads of 256 x 512."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("not enough memory")
    heads = 16_400
    one = decoder.draw(1, 1, (256, 512))
    one["c"] = one["c"].bfloat16()
    x = {name: t.expand(1, heads, *t.shape[2:]) for name, t in one.items()}
    x |= {name: x[name].contiguous() for name in STATE}
    truth = decoder.truth(one)
    found = decoder(x, inplace=True)
    first = {name: t[:, :1] for name, t in found.items()}
    assert_close(first, truth)
    assert torch.equal(found["h"], first["h"].expand_as(found["h"]))
    for part in found["c"].split(1000, dim=1):
        assert torch.equal(part, first["c"].expand_as(part))


@pytest.mark.sanitize
@in_place_or_not
@pytest.mark.parametrize("dims", [(64, 64), (256, 512), (17, 31)], ids=str)
def test_small(decoder: Decoder, dims: tuple[int, int], inplace: bool) -> None:
    """For compute-sanitizer: drawn and judged on the CPU."""
    x = decoder.draw(1, 2, dims, device="cpu", seq=3 if decoder.tokens == 8 else None)
    found = decoder({name: t.cuda() for name, t in x.items()}, inplace=inplace)
    assert_close({name: t.cpu() for name, t in found.items()}, decoder.truth(x))
