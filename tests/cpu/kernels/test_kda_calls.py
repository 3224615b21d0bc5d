"""KDA on the tk backend: what its calls alone have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.pairs import pairwise
from tfla_tk import UnsupportedError, build, chunk_kda
from tfla_tk.backends.tk.kda import launch, support
from tfla_tk.calls.kda import KDACore
from tfla_tk.core import dispatch
from tfla_tk.core.layout import Kept

from .calls import MODULES, OPS, Op, Tensors, assert_close, assert_equal, check, draw, results
from .kda import KDA
from .stand_in import at_odd_address, pretend_a_gpu

FLAGS = ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")
# what makes the log decay of g, and the lower bound
GATES = {"given": ((), None), "softplus": (("A_log", "dt_bias"), None), "no bias": (("A_log",), None)}
GATES |= {"bounded": (("A_log", "dt_bias"), -5.0), "no rate": (("dt_bias",), -5.0), "bound alone": ((), -5.0)}


@pytest.fixture
def op() -> Op:
    return OPS["kda"]


# Raw inputs


def raw(x: Tensors, flags: dict[str, Any], parameters: tuple[str, ...] = ("A_log", "dt_bias")) -> Tensors:
    """The inputs that such flags are for."""
    heads, dim_k = x["v"].shape[2], x["q"].shape[3]
    if flags.get("use_qk_l2norm_in_kernel"):
        x |= {"q": 3 * x["q"], "k": 5 * x["k"]}
        x["k"][:, 3] = 0
    if flags.get("use_beta_sigmoid_in_kernel"):
        x["beta"] = 4 * x["beta"] - 2
    if flags.get("use_gate_in_kernel"):
        made = {
            "A_log": torch.linspace(-1, 0.5, 2 * heads)[::2],
            "dt_bias": torch.linspace(0.5, -2, heads * dim_k).bfloat16(),
        }
        x |= {"g": 4 * x["g"] + 2} | {name: made[name] for name in parameters}
    return x


@pytest.mark.parametrize(
    ("norm", "sigmoid", "twice", "gate", "packed", "group", "dims", "of_gates"),
    pairwise(
        *[(False, True)] * 3,
        tuple(GATES),
        *((False, True), (1, 3), ((64, 48), (40, 24), (128, 112)), (torch.float32, torch.bfloat16)),
        where=lambda *x: x[1] or not x[2],
    ),
)
def test_raw_inputs(
    norm: bool,
    sigmoid: bool,
    twice: bool,
    gate: str,
    packed: bool,
    group: int,
    dims: tuple[int, int],
    of_gates: torch.dtype,
    op: Op,
    kernels: KDA,
) -> None:
    """Also of head dims that are padded, dt_bias with them."""
    parameters, lower_bound = GATES[gate]
    flags: dict[str, Any] = dict(zip(FLAGS, (norm, sigmoid, twice), strict=True))
    flags |= {"use_gate_in_kernel": gate != "given", "lower_bound": lower_bound}
    x = raw(draw(op, dims, packed=packed, group=group, of_gates=of_gates), flags, parameters)
    check(op, x, **flags)
    names = ["matrices", "forward", "mirror", "gradients", *["combine"] * (group > 1)]
    assert kernels.names() == names


def test_gates_without_gradients(op: Op, kernels: KDA) -> None:
    """And what makes them."""
    flags = dict.fromkeys((*FLAGS, "use_gate_in_kernel"), True)
    x = raw(draw(op), flags)
    check(op, x, ("g", "A_log", "dt_bias"), **flags)
    assert (kernels.launches[-1].of_bias, kernels.launches[-1].of_rate) == (0, 0)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_states_with_v_first(packed: bool, op: Op, kernels: KDA) -> None:
    x = draw(op, packed=packed)
    turned = x | {"initial_state": x["initial_state"].mT.contiguous()}
    check(op, turned, state_v_first=True)
    check(op, turned | {"initial_state": x["initial_state"].mT}, state_v_first=True)


# What a forward keeps


def core_of(x: Tensors) -> KDACore:
    inputs = [x.get(name) for name in KDACore._fields[:9]]
    return KDACore(*inputs, 0.3, False, False, False, None, False)


def backward(core: KDACore, kept: Kept | None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(core.v.shape, generator=generator).to(core.v.dtype)
    return [x for x in launch.backward(core, kept, do, None, needs_gates=True) if x is not None]


def test_what_is_kept(op: Op, kernels: KDA) -> None:
    """A forward that does not train keeps nothing. What is of another size or layout is made again."""
    core = core_of(draw(op))
    _, _, none = launch.forward(core, output_final_state=True, keep=False)
    assert none is None and kernels.launches[-1].states == 0
    _, _, kept = launch.forward(core, output_final_state=True, keep=True)
    assert kept is not None and kept.layout == launch.kept_layout(core)
    kernels.launches.clear()
    expected = backward(core, kept)
    assert kernels.names() == ["mirror", "gradients"]
    of_other = torch.full((3,), torch.nan)
    for other in (None, Kept((of_other,), (3,)), Kept((of_other,), kept.layout)):
        assert all(map(torch.equal, backward(core, other), expected))
        assert kernels.names() == ["matrices", "forward", "mirror", "gradients"]


@pytest.mark.parametrize(
    "move", [at_odd_address, lambda t: t.repeat_interleave(2)[::2]], ids=["odd", "strided"]
)
def test_what_is_kept_may_lie_elsewhere(move: Any, op: Op, kernels: KDA) -> None:
    """Where torch.compile or a hook on saved tensors has put it."""
    core = core_of(draw(op))
    *_, kept = launch.forward(core, output_final_state=True, keep=True)
    moved = kept._replace(tensors=(move(kept.tensors[0]),))
    assert all(map(torch.equal, backward(core, moved), backward(core, kept)))


def test_the_layout_of_what_is_kept_is_known_of_fake_tensors(op: Op, kernels: KDA) -> None:
    """Of a GPU, on any machine: what torch.compile asks."""
    core = core_of(draw(op, (128, 128), group=2, packed=True))
    with FakeTensorMode():
        fake = [None if x is None else torch.empty(x.shape, dtype=x.dtype, device="cuda:0") for x in core[:9]]
        layout = launch.kept_layout(KDACore._make((*fake, *core[9:])))
        *_, kept = torch.ops.tfla_tk.kda_fwd_kept(*fake, *core[9:], True, layout)
    assert layout == launch.kept_layout(core) and kept.shape == layout[:1]
    assert kept.device.type == "cuda" and kept.dtype == core.v.dtype


# What the kernels take


def verdict_of(x: Tensors, **options: Any) -> Any:
    return support.supports_kda(dispatch.describe("chunk_kda", **x, **options)[2])


def test_v_of_more_than_the_backward_takes(op: Op, kernels: KDA) -> None:
    """Without gradients V may be larger."""
    wide = replace(op, most=(128, 512))
    x = draw(wide, (64, 192))
    with torch.no_grad():
        o, last = chunk_kda(**x, output_final_state=True, backend="tk")
        exact = {name: t.double() for name, t in x.items()}
        of_reference = chunk_kda(**exact, output_final_state=True, backend="reference")
    assert_close({"o": o, "last": last}, dict(zip(("o", "last"), of_reference, strict=True)), 1e-2)
    assert verdict_of(x).ok
    with pytest.raises(UnsupportedError, match="V = 192, of a call with gradients the kernels take 128"):
        results(wide, x)
    core = core_of(x)
    with pytest.raises(UnsupportedError, match="V = 192"):
        launch.forward(core, output_final_state=False, keep=True)
    with pytest.raises(UnsupportedError, match="V = 192"):
        backward(core, None)


def test_states_between_chunks_are_refused(op: Op, kernels: KDA) -> None:
    """ "auto" goes on to the next backend."""
    x, options = draw(op), {"return_intermediate_states": True}
    with torch.inference_mode():
        with pytest.raises(UnsupportedError, match="states between chunks"):
            chunk_kda(**x, **options, backend="tk")
        expected = chunk_kda(**x, **options, backend="reference")
        found = chunk_kda(**x, **options)
    assert kernels.names() == []
    assert_equal({"o": found[0], "states": found[2]}, {"o": expected[0], "states": expected[2]})


def test_more_channels_than_the_kernels_have(op: Op, kernels: KDA) -> None:
    x = draw(replace(op, most=(256, 512)), (144, 64))
    assert "K = 144" in verdict_of(x).reason and not verdict_of(x).ok


def test_what_adds_up_heads_is_loaded_before(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a launcher of its own, in training alone."""
    pretend_a_gpu(monkeypatch, *MODULES)
    loaded: list[str] = []
    monkeypatch.setattr(build, "load", lambda launcher, *kernels: loaded.append(launcher.name))
    for group, trains, expected in (
        (1, True, ["kda"]),
        (3, True, ["kda", "delta_rule"]),
        (3, False, ["kda"]),
    ):
        x = {name: t.requires_grad_(trains) for name, t in draw(op, group=group).items()}
        assert support.load(dispatch.describe("chunk_kda", **x)[2]).ok
        assert loaded == expected
        loaded.clear()
