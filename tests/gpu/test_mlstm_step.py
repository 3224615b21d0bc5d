"""The mLSTM step on the GPU: against the recurrence in fp64, in place, at extreme gates, in graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.library import opcheck

import tfla_tk
from tfla_tk.backends.tk.scalar_gate import step as tk_step

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

Close = Callable[..., None]


@dataclass(frozen=True)
class Step:
    """A public function with one choice of its gate and normaliser."""

    function: str
    options: dict[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES if self.function == "mlstm_step" else NAMES[:-1]

    @property
    def sigmoid_gate(self) -> bool:
        return self.function != "mlstm_step"

    def __call__(self, x: Tensors, backend: str = "tk", **options: Any) -> Tensors:
        """h and the next state by name."""
        given = {name: x[name] for name in self.names}
        h, state = getattr(tfla_tk, self.function)(**given, **self.options, **options, backend=backend)
        return {"h": h, **dict(zip(STATE, state, strict=False))}

    def truth(self, x: Tensors) -> Tensors:
        """The recurrence in fp64 on the same rounded inputs."""
        return self({name: t.double() for name, t in x.items()}, "reference")


STEPS = {
    "exp": Step("mlstm_step", {}),
    "sig": Step("mlstm_siging_step", {"normalize": True}),
    "sig_unnormalised": Step("mlstm_siging_step", {"normalize": False}),
}


@pytest.fixture(params=STEPS)
def step(request: pytest.FixtureRequest) -> Step:
    """Exponential gate, sigmoid gate, and without normaliser."""
    return STEPS[request.param]


@pytest.fixture
def draw() -> Callable[..., Tensors]:
    """A token and the state before it."""

    def draw(
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
        shapes = ((dim_qk,), (dim_qk,), (dim_v,), (1,), (1,), (dim_qk, dim_v), (dim_qk,), (1,))
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
def test_all_dims(step: Step, dims: tuple[int, int], state: torch.dtype, draw: Draw) -> None:
    x = draw(dims=dims, state=state)
    found = step(x, dtype_state=state)
    assert (found["h"].dtype, found["c"].dtype, found["n"].dtype) == (torch.bfloat16, state, state)
    assert_close(found, step.truth(x))
    if not step.options.get("normalize", True):
        assert torch.equal(found["n"], x["n"])


@pytest.mark.parametrize("dims", [(128, 256), (17, 31)])
@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(DTYPES, 2)), ids=str)
def test_the_state_changes_its_dtype(
    step: Step, dims: tuple[int, int], before: torch.dtype, after: torch.dtype, draw: Draw
) -> None:
    x = draw(dims=dims, state=before)
    found = step(x, dtype_state=after)
    assert {t.dtype for name, t in found.items() if name != "h"} == {after}
    assert_close(found, step.truth(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gates", [*DTYPES, torch.float64], ids=str)
def test_dtypes_of_the_token(step: Step, dtype: torch.dtype, gates: torch.dtype, draw: Draw) -> None:
    for dims in ((128, 256), (17, 31)):
        x = draw(dims=dims, dtype=dtype)
        x["i"], x["f"] = x["i"].to(gates), x["f"].to(gates)
        found = step(x)
        assert found["h"].dtype == dtype
        assert_close(found, step.truth(x))


@pytest.mark.parametrize("heads", [1, 2, 7, 8, 132, 1000])
@pytest.mark.parametrize("dims", [(256, 512), (64, 64)], ids=str)
def test_any_number_of_heads(step: Step, heads: int, dims: tuple[int, int], draw: Draw) -> None:
    """From slices of a few columns to whole rows."""
    for batch, own in ((1, heads), (heads, 1)):
        x = draw(batch, own, dims)
        assert_close(step(x), step.truth(x))
        assert_close(step(clone(x), inplace=True), step.truth(x))


@pytest.mark.parametrize(("batch", "heads"), [(70_000, 1), (1, 70_000), (2, 66_000)])
def test_more_heads_than_a_grid_has_rows(step: Step, batch: int, heads: int, draw: Draw) -> None:
    x = draw(batch, heads, (16, 24))
    token = x["q"].transpose(0, 1).contiguous().transpose(0, 1)
    assert_close(step(x | {"q": token}), step.truth(x))
    assert_close(step(clone(x), inplace=True), step.truth(x))


@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("inplace", [False, True])
def test_every_tiling(
    step: Step, lanes: int, inplace: bool, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clusters of one to sixteen CTAs."""
    monkeypatch.setattr(tk_step, "_lanes", lambda *_: lanes)
    for dims, state in itertools.product(((256, 512), (100, 60), (7, 24), (33, 31)), DTYPES[:2]):
        width = 16 // state.itemsize
        width = width if dims[1] % width == 0 else 1
        if -(-dims[1] // (lanes * width)) > 16:
            continue
        x = draw(dims=dims, state=state)
        assert_close(
            step(clone(x), **({"inplace": True} if inplace else {"dtype_state": state})), step.truth(x)
        )


def test_strides(step: Step, draw: Draw) -> None:
    """Parts of a fused projection, a state in another order of its dimensions."""
    x = draw()
    expected = step(x)
    strided = clone(x)
    fused = torch.cat([x["q"], x["k"], x["v"]], dim=-1).transpose(0, 1).contiguous().transpose(0, 1)
    strided["q"], strided["k"], strided["v"] = fused.split((128, 128, 256), dim=-1)
    strided["c"], strided["n"] = (
        x["c"].mT.contiguous().mT,
        x["n"].transpose(0, 1).contiguous().transpose(0, 1),
    )
    for found in (step(strided), step(strided, inplace=True)):
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
def test_extreme_gates(step: Step, gates: str, state: torch.dtype, draw: Draw) -> None:
    for m in (0.0, 80.0, -80.0, 1e4, -1e4):
        x = draw(state=state)
        x["i"].fill_(GATES[gates][0])
        x["f"].fill_(GATES[gates][1])
        x["m"].fill_(m)
        found, truth = step(x, dtype_state=state), step.truth(x)
        assert all(t.isfinite().all() for t in found.values())
        assert_close(found, truth)


def test_a_spike_and_its_end(draw: Draw) -> None:
    """i = 80, then -80: what was before is forgotten, what the spike wrote stays."""
    step = STEPS["exp"]
    x = draw()
    wide = {name: t.double() for name, t in x.items()}
    for i in (80.0, -80.0, -80.0, 80.0, 0.0):
        x["i"].fill_(i)
        wide["i"].fill_(i)
        found, truth = step(x), step(wide, "reference")
        assert_close(found, truth)
        x |= {name: found[name] for name in STATE}
        wide |= {name: truth[name] for name in STATE}


def test_an_empty_memory(draw: Draw) -> None:
    """m = -inf: nothing was there."""
    x = draw()
    x["m"].fill_(-torch.inf)
    x["c"].zero_()
    x["n"].zero_()
    assert_close(STEPS["exp"](x), STEPS["exp"].truth(x))


@pytest.mark.parametrize("name", ["q", "k", "v", "c"])
def test_nan_reaches_its_own_head_alone(step: Step, name: str, draw: Draw) -> None:
    x = draw()
    clean = step(x)
    x[name][1, 2] = torch.nan
    found = step(x)
    assert found["h"][1, 2].isnan().all()
    for result, t in found.items():
        assert torch.equal(t[0], clean[result][0]) and torch.equal(t[1, :2], clean[result][1, :2])


@pytest.mark.parametrize("state", DTYPES[:2], ids=str)
@pytest.mark.parametrize("dims", [(256, 512), (100, 300), (17, 31)], ids=str)
def test_every_element_is_written(step: Step, dims: tuple[int, int], state: torch.dtype, draw: Draw) -> None:
    """What the allocator hands out holds NaN."""
    x = draw(dims=dims, state=state)
    sizes = [x[name].numel() * state.itemsize for name in STATE] + [x["v"].numel() * 2]
    for size in sizes:
        torch.full((-(-size // 4),), torch.nan, device=DEVICE)
    assert all(t.isfinite().all() for t in step(x, dtype_state=state).values())


@pytest.mark.parametrize("state", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(256, 512), (64, 64), (17, 31)], ids=str)
@pytest.mark.parametrize("batch", [1, 100])
def test_in_place(step: Step, batch: int, dims: tuple[int, int], state: torch.dtype, draw: Draw) -> None:
    """Bit for bit what a new state holds; a hundred times, since a race would not show each time."""
    x = draw(batch, 8, dims, state=state)
    expected = step(x, dtype_state=state)
    names = [name for name in STATE if name in expected]
    different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(100):
        own = clone(x)
        found = step(own, inplace=True)
        assert all(found[name] is own[name] for name in names)
        for name, t in expected.items():
            different += (found[name] != t).sum()
    assert different.item() == 0


def test_in_place_with_parts_in_dtypes_of_their_own(draw: Draw) -> None:
    x = draw()
    x["c"], x["m"] = x["c"].bfloat16(), x["m"].half()
    truth = STEPS["exp"].truth(x)
    found = STEPS["exp"](x, inplace=True)
    assert [found[name].dtype for name in STATE] == [torch.bfloat16, torch.float32, torch.float16]
    assert_close(found, truth)


@pytest.mark.parametrize("state", DTYPES[:2], ids=str)
@pytest.mark.parametrize("batch", [1, 70])
def test_repeats_are_bitwise_equal(step: Step, batch: int, state: torch.dtype, draw: Draw) -> None:
    x = draw(batch, 8, (256, 512), state=state)
    first = step(x, dtype_state=state)
    different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(200):
        again = step(x, dtype_state=state)
        for name, t in first.items():
            different += (again[name] != t).sum()
    assert different.item() == 0


@pytest.mark.parametrize("batch", [1, 70])
def test_cuda_graph(step: Step, batch: int, draw: Draw) -> None:
    """A hundred replays of one step in place are a hundred steps."""
    x = draw(batch, 8, (256, 512))
    eager = clone(x)
    step(clone(x), inplace=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x, inplace=True)
    for _ in range(100):
        graph.replay()
        expected = step(eager, inplace=True)
    assert all(torch.equal(captured[name], t) for name, t in expected.items())
    assert captured["h"].isfinite().all()


def test_streams(step: Step, draw: Draw) -> None:
    """Steps of two streams at the same time keep out of each other's way."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [draw(1, 8, (256, 512), seed=seed) for seed in range(2)]
    expected = []
    for x in inputs:
        own = clone(x)
        for _ in range(50):
            found = step(own, inplace=True)
        expected.append(clone(found))
    torch.cuda.synchronize()
    found_by = [{}, {}]
    for _ in range(50):
        for n, (stream, x) in enumerate(zip(streams, inputs, strict=True)):
            with torch.cuda.stream(stream):
                found_by[n] = step(x, inplace=True)
    torch.cuda.synchronize()
    for found, want in zip(found_by, expected, strict=True):
        assert all(torch.equal(found[name], t) for name, t in want.items())


@pytest.mark.parametrize("state", DTYPES[:2], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_hundred_steps(step: Step, state: torch.dtype, inplace: bool, draw: Draw) -> None:
    """Against the recurrence in fp64, each with its own state.

    A state in 16 bits is rounded at every token: no worse than the reference's is then.
    """
    x = draw(2, 4, (128, 256), state=state)
    wide, rounded = {name: t.double() for name, t in x.items()}, clone(x)
    for seed in range(100):
        fresh = draw(2, 4, (128, 256), seed=seed + 1)
        token = {name: fresh[name] for name in TOKENS}
        found = step(x | token, **({"inplace": True} if inplace else {"dtype_state": state}))
        truth = step(wide | {name: t.double() for name, t in token.items()}, "reference")
        baseline = step(rounded | token, "reference", dtype_state=state)
        x, wide, rounded = (
            {name: t for name, t in y.items() if name != "h"} for y in (found, truth, baseline)
        )
        limit = max(4e-3, 1.2 * relative_error(baseline["h"], truth["h"]))
        assert relative_error(found["h"], truth["h"]) <= limit
    if state == torch.float32:
        assert_close(found, truth)


def test_after_prefill(step: Step, draw: Draw) -> None:
    """The state of the chunkwise kernel goes on token by token, as one pass would."""
    seq, batch, heads = 130, 2, 4
    tokens = [draw(batch, heads, (128, 256), seed=seed) for seed in range(seq)]
    rows = {name: torch.stack([t[name] for t in tokens], dim=2) for name in TOKENS}
    rows["i"], rows["f"] = rows["i"][..., 0], rows["f"][..., 0]
    function = getattr(tfla_tk, step.function.replace("step", "chunkwise"))
    options = {**step.options, "return_last_states": True}
    exact, _ = function(**{name: t.double() for name, t in rows.items()}, **options, backend="reference")
    first = {name: t[:, :, :100] for name, t in rows.items()}
    _, state = function(**first, **options, backend="tk")
    state = dict(zip(STATE, state, strict=False))
    for t in range(100, seq):
        found = step({**tokens[t], **state})
        state = {name: found[name] for name in state}
        assert relative_error(found["h"], exact[:, :, t]) <= 6e-3


@pytest.mark.parametrize("sigmoid_gate", [False, True])
def test_opcheck(sigmoid_gate: bool, draw: Draw) -> None:
    x = draw()
    tensors = [x[name] for name in NAMES[:7]] + [None if sigmoid_gate else x["m"]]
    options = (sigmoid_gate, True, 1e-6)
    opcheck(torch.ops.tfla_tk.mlstm_step.default, (*tensors, *options, torch.bfloat16))
    opcheck(torch.ops.tfla_tk.mlstm_step_.default, (*tensors, *options))


@pytest.mark.parametrize("inplace", [False, True])
def test_compile(step: Step, inplace: bool, draw: Draw) -> None:
    x = draw()
    again = clone(x)

    def run(given: Tensors) -> Tensors:
        return step(given, inplace=inplace)

    expected = run(x)
    found = torch.compile(run, fullgraph=True)(again)
    assert all(torch.equal(found[name], t) for name, t in expected.items())


def test_a_large_state(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets beyond 2^31 elements: 16,400 heads of 256 x 512."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("not enough memory")
    monkeypatch.setattr(tk_step, "_lanes", lambda *_: 32)  # one order of the sums
    one = draw(1, 1, (256, 512))
    heads = 16_400
    x = {name: t.expand(1, heads, *t.shape[2:]) for name, t in one.items()}
    x |= {name: x[name].contiguous() for name in STATE}
    x["c"] = x["c"].bfloat16()
    expected = STEPS["exp"]({**clone(one), "c": one["c"].bfloat16()}, inplace=True)
    found = STEPS["exp"](x, inplace=True)
    assert torch.equal(found["h"], expected["h"].expand_as(found["h"]))
    for part in found["c"].split(1000, dim=1):
        assert torch.equal(part, expected["c"].expand_as(part))


@pytest.mark.sanitize
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (256, 512), (17, 31)], ids=str)
def test_small(step: Step, dims: tuple[int, int], inplace: bool, draw: Draw) -> None:
    """For compute-sanitizer: drawn and judged on the CPU."""
    x = draw(1, 2, dims, device="cpu")
    found = step({name: t.cuda() for name, t in x.items()}, inplace=inplace)
    assert_close({name: t.cpu() for name, t in found.items()}, step.truth(x))
