"""A few tokens of mLSTM on the GPU: against the recurrence in fp64, the step kernel, in place, in graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.library import opcheck

import tfla_tk
from tfla_tk import UnsupportedError
from tfla_tk.backends.tk.scalar_gate import sequence as tk_sequence

from .decoding import (
    DEVICE,
    DIMS,
    DTYPES,
    NAMES,
    STATE,
    TOKENS,
    Tensors,
    assert_close,
    clone,
    relative_error,
)


@dataclass(frozen=True)
class Sequence:
    """A public function with one choice of its gate and normaliser."""

    function: str
    options: dict[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES if self.function == "mlstm_sequence" else NAMES[:-1]

    def __call__(self, x: Tensors, backend: str = "tk", **options: Any) -> Tensors:
        """h and the last state by name."""
        given = {name: x[name] for name in self.names}
        h, state = getattr(tfla_tk, self.function)(**given, **self.options, **options, backend=backend)
        return {"h": h, **dict(zip(STATE, state, strict=False))}

    def truth(self, x: Tensors) -> Tensors:
        """The recurrence in fp64 on the same rounded inputs."""
        return self({name: t.double() for name, t in x.items()}, "reference")

    def by_steps(self, x: Tensors, backend: str = "tk") -> Tensors:
        """The same, token by token."""
        step = getattr(tfla_tk, self.function.replace("sequence", "step"))
        state = [x[name] for name in self.names[5:]]
        outputs = []
        for t in range(x["q"].shape[2]):
            token = [x[name][:, :, t] for name in "qkv"] + [x[name][:, :, t : t + 1] for name in "if"]
            h, state = step(*token, *state, **self.options, backend=backend)
            outputs.append(h)
        return {"h": torch.stack(outputs, 2), **dict(zip(STATE, state, strict=False))}


SEQUENCES = {
    "exp": Sequence("mlstm_sequence", {}),
    "sig": Sequence("mlstm_siging_sequence", {"normalize": True}),
    "sig_unnormalised": Sequence("mlstm_siging_sequence", {"normalize": False}),
}


@pytest.fixture(params=SEQUENCES)
def sequence(request: pytest.FixtureRequest) -> Sequence:
    """Exponential gate, sigmoid gate, and without normaliser."""
    return SEQUENCES[request.param]


@pytest.fixture
def draw() -> Callable[..., Tensors]:
    """Tokens and the state before them."""

    def draw(
        seq: int = 8,
        batch: int = 2,
        heads: int = 3,
        dims: tuple[int, int] = (128, 256),
        dtype: torch.dtype = torch.bfloat16,
        state: torch.dtype = torch.float32,
        seed: int = 0,
        device: str = DEVICE,
    ) -> Tensors:
        generator = torch.Generator(device).manual_seed(seed)
        dim_qk, dim_v = dims
        shapes = (
            *((seq, dim_qk), (seq, dim_qk), (seq, dim_v), (seq,), (seq,)),
            *((dim_qk, dim_v), (dim_qk,), (1,)),
        )
        found = {
            name: torch.randn(batch, heads, *shape, generator=generator, device=device)
            for name, shape in zip(NAMES, shapes, strict=True)
        }
        found["f"] += 3
        kinds = {**dict.fromkeys("qkv", dtype), **dict.fromkeys(STATE, state)}
        return {name: t.to(kinds.get(name, torch.float32)) for name, t in found.items()}

    return draw


Draw = Callable[..., Tensors]


@pytest.mark.parametrize("dims", DIMS, ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("state", DTYPES, ids=str)
@pytest.mark.parametrize("seq", [5, 8, 16])
def test_all_dims(
    sequence: Sequence, seq: int, dims: tuple[int, int], state: torch.dtype, draw: Draw
) -> None:
    x = draw(seq, dims=dims, state=state)
    found = sequence(x, dtype_state=state)
    assert (found["h"].dtype, found["c"].dtype, found["n"].dtype) == (torch.bfloat16, state, state)
    assert_close(found, sequence.truth(x))
    if not sequence.options.get("normalize", True):
        assert torch.equal(found["n"], x["n"])


@pytest.mark.parametrize("seq", range(1, 17))
def test_any_number_of_tokens(sequence: Sequence, seq: int, draw: Draw) -> None:
    for dims, dtype in itertools.product(((128, 256), (33, 31)), DTYPES[:2]):
        x = draw(seq, dims=dims, dtype=dtype)
        assert_close(sequence(x), sequence.truth(x))


def test_more_tokens_are_refused(sequence: Sequence, draw: Draw) -> None:
    x = draw(17)
    with pytest.raises(UnsupportedError, match=r"17 tokens, the kernel takes 16.*use mlstm_chunkwise"):
        sequence(x)
    assert sequence(x, "reference")["h"].shape[2] == 17


@pytest.mark.parametrize("dims", [(128, 256), (17, 31)])
@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(DTYPES, 2)), ids=str)
def test_the_state_changes_its_dtype(
    sequence: Sequence, dims: tuple[int, int], before: torch.dtype, after: torch.dtype, draw: Draw
) -> None:
    for seq, dtype in itertools.product((8, 16), DTYPES[:2]):
        x = draw(seq, dims=dims, dtype=dtype, state=before)
        found = sequence(x, dtype_state=after)
        assert {t.dtype for name, t in found.items() if name != "h"} == {after}
        assert_close(found, sequence.truth(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gates", [*DTYPES, torch.float64], ids=str)
def test_dtypes_of_the_tokens(sequence: Sequence, dtype: torch.dtype, gates: torch.dtype, draw: Draw) -> None:
    """In fp32 h is fp32's accuracy."""
    for dims, seq in itertools.product(((128, 256), (256, 512), (17, 31)), (6, 16)):
        x = draw(seq, dims=dims, dtype=dtype)
        x["i"], x["f"] = x["i"].to(gates), x["f"].to(gates)
        found = sequence(x)
        assert found["h"].dtype == dtype
        assert_close(found, sequence.truth(x))


@pytest.mark.parametrize("heads", [1, 2, 7, 8, 132, 1000])
@pytest.mark.parametrize("dims", [(256, 512), (64, 64)], ids=str)
def test_any_number_of_heads(sequence: Sequence, heads: int, dims: tuple[int, int], draw: Draw) -> None:
    """From slices of a few columns to wide ones."""
    for batch, own in ((1, heads), (heads, 1)):
        x = draw(8, batch, own, dims)
        assert_close(sequence(x), sequence.truth(x))
        assert_close(sequence(clone(x), inplace=True), sequence.truth(x))


@pytest.mark.parametrize(("batch", "heads"), [(70_000, 1), (1, 70_000), (2, 66_000)])
def test_more_heads_than_a_grid_has_rows(sequence: Sequence, batch: int, heads: int, draw: Draw) -> None:
    x = draw(3, batch, heads, (16, 24))
    tokens = x["q"].transpose(0, 1).contiguous().transpose(0, 1)
    assert_close(sequence(x | {"q": tokens}), sequence.truth(x))
    assert_close(sequence(clone(x), inplace=True), sequence.truth(x))


@pytest.mark.parametrize("warps", [1, 2, 4])
@pytest.mark.parametrize("inplace", [False, True])
def test_every_tiling(
    sequence: Sequence, warps: int, inplace: bool, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clusters of one to sixteen CTAs."""
    monkeypatch.setattr(tk_sequence, "_warps", lambda *_: warps)
    for dims, state, seq in itertools.product(
        ((256, 512), (100, 60), (7, 24), (33, 31)), DTYPES[:2], (8, 16)
    ):
        eight = state.itemsize == 2 and seq == 8 and dims[1] % 8 == 0
        if warps * 8 * (8 if eight else 4) > 128:
            continue
        x = draw(seq, dims=dims, state=state)
        options = {"inplace": True} if inplace else {"dtype_state": state}
        assert_close(sequence(clone(x), **options), sequence.truth(x))


@pytest.mark.parametrize("seq", [1, 7, 16])
def test_strides(sequence: Sequence, seq: int, draw: Draw) -> None:
    """[B, S, NH, D], parts of a fused projection, every second number, a state in another order."""
    x = draw(seq)
    expected = sequence(x)
    fused = torch.cat([x["q"], x["k"], x["v"]], dim=-1).transpose(1, 2).contiguous().transpose(1, 2)
    parts = dict(zip("qkv", fused.split((128, 128, 256), dim=-1), strict=True))
    spread = {name: torch.stack([x[name], x[name]], -1).flatten(-2)[..., ::2] for name in "qkv"}
    turned = {name: x[name].mT.contiguous().mT for name in "qkv"}
    for tokens in (parts, spread, turned):
        strided = clone(x) | tokens
        strided["i"] = x["i"].transpose(1, 2).contiguous().transpose(1, 2)
        strided["c"], strided["n"] = (
            x["c"].mT.contiguous().mT,
            x["n"].transpose(0, 1).contiguous().transpose(0, 1),
        )
        for found in (sequence(strided), sequence(strided, inplace=True)):
            assert all(torch.equal(found[name], t) for name, t in expected.items())
        assert all(torch.equal(strided[name], expected[name]) for name in expected.keys() - {"h"})


GATES = {
    "both_high": (1e4, 1e4),
    "both_low": (-1e4, -1e4),
    "forget_all": (1.0, -1e4),
    "keep_all": (-1e4, 1e4),
    "write": (80.0, -80.0),
    "keep": (-80.0, 80.0),
    "small": (-80.0, 0.0),
}


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("state", DTYPES[:2], ids=str)
def test_extreme_gates(sequence: Sequence, gates: str, state: torch.dtype, draw: Draw) -> None:
    for m in (0.0, 80.0, -80.0, 1e4, -1e4):
        x = draw(state=state)
        x["i"].fill_(GATES[gates][0])
        x["f"].fill_(GATES[gates][1])
        x["m"].fill_(m)
        found, truth = sequence(x, dtype_state=state), sequence.truth(x)
        assert all(t.isfinite().all() for t in found.values())
        assert_close(found, truth)


@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_spike_among_the_tokens(place: int, draw: Draw) -> None:
    """i = 80: what was before is forgotten, what the spike wrote stays; tokens before it do not see it."""
    x = draw()
    x["i"].fill_(-80.0)
    x["i"][:, :, place] = 80.0
    assert_close(SEQUENCES["exp"](x), SEQUENCES["exp"].truth(x))


def test_an_empty_memory(draw: Draw) -> None:
    """m = -inf: nothing was there."""
    x = draw()
    x["m"].fill_(-torch.inf)
    x["c"].zero_()
    x["n"].zero_()
    assert_close(SEQUENCES["exp"](x), SEQUENCES["exp"].truth(x))


@pytest.mark.parametrize("name", ["q", "k", "v", "i", "f", "c"])
def test_nan_reaches_its_own_head_alone(sequence: Sequence, name: str, draw: Draw) -> None:
    x = draw()
    clean = sequence(x)
    x[name][1, 2] = torch.nan
    found = sequence(x)
    assert found["h"][1, 2].isnan().all()
    for result, t in found.items():
        assert torch.equal(t[0], clean[result][0]) and torch.equal(t[1, :2], clean[result][1, :2])


@pytest.mark.parametrize("name", ["q", "i", "f"])
def test_nan_of_a_token_leaves_those_before_it(sequence: Sequence, name: str, draw: Draw) -> None:
    x = draw()
    clean = sequence(x)
    x[name][1, 2, 5] = torch.nan
    h = sequence(x)["h"][1, 2]
    assert torch.equal(h[:5], clean["h"][1, 2, :5]) and h[5].isnan().all()
    assert name == "q" or h[5:].isnan().all()


@pytest.mark.parametrize("state", DTYPES[:2], ids=str)
@pytest.mark.parametrize("dims", [(256, 512), (100, 300), (17, 31)], ids=str)
def test_every_element_is_written(
    sequence: Sequence, dims: tuple[int, int], state: torch.dtype, draw: Draw
) -> None:
    """What the allocator hands out holds NaN."""
    x = draw(dims=dims, state=state)
    sizes = [x[name].numel() * state.itemsize for name in STATE] + [x["v"].numel() * 2]
    for size in sizes:
        torch.full((-(-size // 4),), torch.nan, device=DEVICE)
    assert all(t.isfinite().all() for t in sequence(x, dtype_state=state).values())


@pytest.mark.parametrize("seq", [8, 13])
def test_equals_as_many_steps(sequence: Sequence, seq: int, draw: Draw) -> None:
    """The step kernel and this one, in fp32."""
    x = draw(seq, 2, 4, (256, 512), dtype=torch.float32)
    found, steps = sequence(x), sequence.by_steps(x)
    assert_close(found, {name: t.double() for name, t in steps.items()})


@pytest.mark.parametrize("state", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(256, 512), (64, 64), (17, 31)], ids=str)
@pytest.mark.parametrize(("batch", "seq"), [(1, 8), (1, 16), (100, 8)])
def test_in_place(
    sequence: Sequence, batch: int, seq: int, dims: tuple[int, int], state: torch.dtype, draw: Draw
) -> None:
    """Bit for bit what a new state holds; a hundred times, since a race would not show each time."""
    x = draw(seq, batch, 8, dims, state=state)
    expected = sequence(x, dtype_state=state)
    names = [name for name in STATE if name in expected]
    different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(100):
        own = clone(x)
        found = sequence(own, inplace=True)
        assert all(found[name] is own[name] for name in names)
        for name, t in expected.items():
            different += (found[name] != t).sum()
    assert different.item() == 0


def test_in_place_with_parts_in_dtypes_of_their_own(draw: Draw) -> None:
    x = draw()
    x["c"], x["m"] = x["c"].bfloat16(), x["m"].half()
    truth = SEQUENCES["exp"].truth(x)
    found = SEQUENCES["exp"](x, inplace=True)
    assert [found[name].dtype for name in STATE] == [torch.bfloat16, torch.float32, torch.float16]
    assert_close(found, truth)


@pytest.mark.parametrize("state", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("batch", "seq"), [(1, 8), (70, 8), (70, 16)])
def test_repeats_are_bitwise_equal(
    sequence: Sequence, batch: int, seq: int, state: torch.dtype, draw: Draw
) -> None:
    x = draw(seq, batch, 8, (256, 512), state=state)
    first = sequence(x, dtype_state=state)
    different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(100):
        again = sequence(x, dtype_state=state)
        for name, t in first.items():
            different += (again[name] != t).sum()
    assert different.item() == 0


@pytest.mark.parametrize("batch", [1, 70])
def test_cuda_graph(sequence: Sequence, batch: int, draw: Draw) -> None:
    """A hundred replays of one call in place are a hundred calls."""
    x = draw(8, batch, 8, (256, 512))
    eager = clone(x)
    sequence(clone(x), inplace=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sequence(x, inplace=True)
    for _ in range(100):
        graph.replay()
        expected = sequence(eager, inplace=True)
    assert all(torch.equal(captured[name], t) for name, t in expected.items())
    assert captured["h"].isfinite().all()


def test_streams(sequence: Sequence, draw: Draw) -> None:
    """Calls of two streams at the same time keep out of each other's way."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [draw(8, 1, 8, (256, 512), seed=seed) for seed in range(2)]
    expected = []
    for x in inputs:
        own = clone(x)
        for _ in range(50):
            found = sequence(own, inplace=True)
        expected.append(clone(found))
    torch.cuda.synchronize()
    found_by: list[Tensors] = [{}, {}]
    for _ in range(50):
        for n, (stream, x) in enumerate(zip(streams, inputs, strict=True)):
            with torch.cuda.stream(stream):
                found_by[n] = sequence(x, inplace=True)
    torch.cuda.synchronize()
    for found, want in zip(found_by, expected, strict=True):
        assert all(torch.equal(found[name], t) for name, t in want.items())


@pytest.mark.parametrize("state", DTYPES[:2], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_hundred_calls(sequence: Sequence, state: torch.dtype, inplace: bool, draw: Draw) -> None:
    """Against the recurrence in fp64; a state in 16 bits, rounded at every call, against the reference's too.

    Each carries its own state.
    """
    x = draw(8, 2, 4, (128, 256), state=state)
    wide, rounded = {name: t.double() for name, t in x.items()}, clone(x)
    for seed in range(100):
        fresh = draw(8, 2, 4, (128, 256), seed=seed + 1)
        tokens = {name: fresh[name] for name in TOKENS}
        found = sequence(x | tokens, **({"inplace": True} if inplace else {"dtype_state": state}))
        truth = sequence(wide | {name: t.double() for name, t in tokens.items()}, "reference")
        baseline = sequence(rounded | tokens, "reference", dtype_state=state)
        x, wide, rounded = (
            {name: t for name, t in y.items() if name != "h"} for y in (found, truth, baseline)
        )
        limit = max(4e-3, 1.2 * relative_error(baseline["h"], truth["h"]))
        assert relative_error(found["h"], truth["h"]) <= limit
    if state == torch.float32:
        assert_close(found, truth)


def test_a_state_that_is_kept_for_thousands_of_calls(draw: Draw) -> None:
    """Nothing written, nothing forgotten: bit for bit the state that it was."""
    x = draw(8, 1, 2)
    x["i"].fill_(-1e4)
    x["f"].fill_(1e4)
    before = clone(x)
    for _ in range(3000):
        SEQUENCES["exp"](x, inplace=True)
    assert all(torch.equal(x[name], before[name]) for name in STATE)


def test_between_prefill_and_steps(sequence: Sequence, draw: Draw) -> None:
    """The chunkwise kernel, then eight tokens at a time, then single ones, as one pass would."""
    seq, batch, heads = 130, 2, 4
    rows = draw(seq, batch, heads)
    chunkwise = getattr(tfla_tk, sequence.function.replace("sequence", "chunkwise"))
    options = {**sequence.options, "return_last_states": True}
    tokens = {name: rows[name] for name in TOKENS}
    exact, _ = chunkwise(**{name: t.double() for name, t in tokens.items()}, **options, backend="reference")
    _, state = chunkwise(**{name: t[:, :, :90] for name, t in tokens.items()}, **options, backend="tk")
    carried = dict(zip(STATE, state, strict=False))
    for start in range(90, 122, 8):
        found = sequence({**{name: t[:, :, start : start + 8] for name, t in tokens.items()}, **carried})
        carried = {name: found[name] for name in carried}
        assert relative_error(found["h"], exact[:, :, start : start + 8]) <= 6e-3
    found = sequence.by_steps({**{name: t[:, :, 122:] for name, t in tokens.items()}, **carried})
    assert relative_error(found["h"], exact[:, :, 122:]) <= 6e-3


@pytest.mark.parametrize("sigmoid_gate", [False, True])
def test_opcheck(sigmoid_gate: bool, draw: Draw) -> None:
    x = draw()
    tensors = [x[name] for name in NAMES[:7]] + [None if sigmoid_gate else x["m"]]
    options = (sigmoid_gate, True, 1e-6)
    opcheck(torch.ops.tfla_tk.mlstm_sequence.default, (*tensors, *options, torch.bfloat16))
    opcheck(torch.ops.tfla_tk.mlstm_sequence_.default, (*tensors, *options))


@pytest.mark.parametrize("inplace", [False, True])
def test_compile(sequence: Sequence, inplace: bool, draw: Draw) -> None:
    x = draw()
    again = clone(x)

    def run(given: Tensors) -> Tensors:
        return sequence(given, inplace=inplace)

    expected = run(x)
    found = torch.compile(run, fullgraph=True)(again)
    assert all(torch.equal(found[name], t) for name, t in expected.items())


def test_a_large_state(draw: Draw) -> None:
    """Offsets beyond 2^31 elements: 16,400 heads of 256 x 512."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("not enough memory")
    heads = 16_400
    one = draw(8, 1, 1, (256, 512))
    one["c"] = one["c"].bfloat16()
    x = {name: t.expand(1, heads, *t.shape[2:]) for name, t in one.items()}
    x |= {name: x[name].contiguous() for name in STATE}
    truth = SEQUENCES["exp"].truth(one)
    found = SEQUENCES["exp"](x, inplace=True)
    first = {name: t[:, :1] for name, t in found.items()}
    assert_close(first, truth)
    assert torch.equal(found["h"], first["h"].expand_as(found["h"]))
    for part in found["c"].split(1000, dim=1):
        assert torch.equal(part, first["c"].expand_as(part))


@pytest.mark.sanitize
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("seq", [3, 16])
@pytest.mark.parametrize("dims", [(64, 64), (256, 512), (17, 31)], ids=str)
def test_small(sequence: Sequence, dims: tuple[int, int], seq: int, inplace: bool, draw: Draw) -> None:
    """For compute-sanitizer: drawn and judged on the CPU."""
    x = draw(seq, 1, 2, dims, device="cpu")
    found = sequence({name: t.cuda() for name, t in x.items()}, inplace=inplace)
    assert_close({name: t.cpu() for name, t in found.items()}, sequence.truth(x))
