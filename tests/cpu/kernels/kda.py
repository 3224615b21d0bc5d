"""KDA's kernels by the recurrence in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from tfla_tk.core.layout import CHUNK

from .delta_rule import DeltaRule, Shape, dtype_of, values_at
from .stand_in import OF_CODE, Kernels, bounds_of, floats_at, gate_at, operand_at, slots_of, tensor_at

FLOAT, HALF, NUMBER = 4, 2, 8  # bytes
OF_INPUTS = (
    *("q", "k", "g", "g_dtype", "beta", "a_log", "dt_bias", "gate", "lower_bound", "scale"),
    *("l2norm", "beta_sigmoid", "beta_double"),
)
OF_WALK = ("shape", "values", "results", "tiles", "entering", "leaving", "states", "walkers")
SOLVED = 1.5  # stands for R'
LOG, SOFTPLUS, SIGMOID = range(3)  # codes of LogDecay


class Options(NamedTuple):
    """What is made of raw inputs."""

    gate: int
    lower_bound: float
    scale: float
    l2norm: bool
    beta_sigmoid: bool
    beta_double: bool


class Inputs(NamedTuple):
    """Of a call, q and k for every head of v. a_log: [B, HV] or None. dt_bias: [B, HV, K] or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    a_log: Tensor | None
    dt_bias: Tensor | None
    initial: Tensor


def outputs(x: Inputs, options: Options, bounds: Sequence[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] and the last states [N, HV, K, V].

    Args:
        bounds: row of the batch, first token and end of every sequence.
    """
    q, k, v, g, beta, a_log, dt_bias, initial = x
    if options.l2norm:
        q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
    if dt_bias is not None:
        g = g + dt_bias[:, None]
    rate = 1.0 if a_log is None else a_log.exp()[:, None, :, None]
    if options.gate == SOFTPLUS:
        g = -rate * softplus(g)
    elif options.gate == SIGMOID:
        g = options.lower_bound * torch.sigmoid(rate * g)
    if options.beta_sigmoid:
        beta = torch.sigmoid(beta) * (2 if options.beta_double else 1)
    rows, last = {}, []
    for (row, first, end), begin in zip(bounds, initial, strict=True):
        state = begin
        for t in range(first, end):
            state = g[row, t].exp()[..., None] * state
            read = torch.einsum("hk,hkv->hv", k[row, t], state)
            written = beta[row, t][:, None] * (v[row, t] - read)
            state = state + k[row, t][..., None] * written[:, None]
            rows[row, t] = options.scale * torch.einsum("hk,hkv->hv", q[row, t], state)
        last.append(state)
    o = [torch.stack([rows[row, t] for t in range(v.shape[1])]) for row in range(len(v))]
    return torch.stack(o), torch.stack(last)


def gradients(
    given: Inputs, options: Options, x: SimpleNamespace, wanted: list[Tensor], of: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Of inputs of a launch x, from those of o and of the last states; also where autograd is off."""
    with torch.enable_grad():
        found = outputs(given, options, bounds_of(x.shape, x.shape.seq))
    return torch.autograd.grad(found, wanted, of, materialize_grads=True)


class KDA(Kernels):
    """Stands for the launchers of a call of KDA."""

    ARGUMENTS: ClassVar = {
        "matrices": ("shape", *OF_INPUTS, "tiles"),
        "forward": OF_WALK,
        "mirror": OF_WALK,
        "gradients": (
            *("shape", *OF_INPUTS, "tiles", "v", "states", "state_gradients", "do", "solved"),
            *("dq", "dk", "dg", "dbeta", "of_bias", "of_rate"),
        ),
        "combine": DeltaRule.ARGUMENTS["combine"],
    }
    SHAPE = Shape
    run_combine = DeltaRule.run_combine

    def __init__(self) -> None:
        super().__init__()
        # what was made of what: the number of an entry stands where that is left for later launches
        self._made: list[Any] = []

    def tiles_bytes(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        of = Shape(*shape)
        return self._chunks(of) * 3 * CHUNK * tile(of) * HALF, self._chunks(of) * FLOAT, self._squares(of)

    def states_bytes(self, shape: tuple[int, ...]) -> int:
        of = Shape(*shape)
        return self._chunks(of) * tile(of) * -(-of.dim_v // CHUNK) * CHUNK * HALF

    def run_matrices(self, x: SimpleNamespace) -> None:
        (what, at, size), *others = self._tiles(x)
        self._leave_made(what, at, size, inputs_of(x))
        for other in others:
            self.leave(*other)

    def run_forward(self, x: SimpleNamespace) -> None:
        inputs, options = self._expect_tiles(x)
        v, entering = values_at(x, x.values).double(), states_at(x, x.entering)
        o, last = outputs(inputs._replace(v=v, initial=entering), options, bounds_of(x.shape, x.shape.seq))
        values_at(x, x.results).copy_(o)
        self._leave_states(x, "states", v, entering, last)

    def run_mirror(self, x: SimpleNamespace) -> None:
        """The gradient of the first states depends neither on these nor on v."""
        inputs, options = self._expect_tiles(x)
        do, d_last = values_at(x, x.values).double(), states_at(x, x.entering)
        initial = torch.zeros_like(d_last).requires_grad_()
        given = inputs._replace(v=torch.zeros_like(do), initial=initial)
        (d_initial,) = gradients(given, options, x, [initial], (do, d_last))
        values_at(x, x.results).fill_(SOLVED)
        self._leave_states(x, "gradients of states", do, d_last, d_initial)

    def run_gradients(self, x: SimpleNamespace) -> None:
        self._expect_tiles(x)
        size = self.states_bytes(x.shape)
        v, initial = self._expect_made("states", x.states, size)
        do, d_last = self._expect_made("gradients of states", x.state_gradients, size)
        assert torch.equal(values_at(x, x.v).double(), v) and torch.equal(values_at(x, x.do).double(), do)
        dv = values_at(x, x.solved)
        assert bool(dv.eq(SOLVED).all())
        inputs, options = inputs_of(x)
        leaves = inputs._replace(v=v, initial=initial)
        leaves = Inputs(*(None if y is None else y.detach().requires_grad_() for y in leaves))
        wanted = [y for y in leaves[:7] if y is not None]
        grads = iter(gradients(leaves, options, x, wanted, (do, d_last)))
        dq, dk, found_dv, dg, dbeta, of_rate, of_bias = (
            None if y is None else next(grads) for y in leaves[:7]
        )
        dv.copy_(found_dv)
        for place, y, dtype in ((x.dq, dq, None), (x.dk, dk, None), (x.dg, dg, OF_CODE[x.g_dtype])):
            keys_at(x, place, x.shape.heads, dtype).copy_(y)
        written = floats_at(x.dbeta, *dbeta.shape)
        assert written is not None
        written.copy_(dbeta)
        _, own = slots_of(x.shape, x.shape.seq, CHUNK)
        for place, total in ((x.of_rate, of_rate), (x.of_bias, of_bias)):
            if place:
                batch, heads, *more = total.shape
                parts = tensor_at(place, torch.float32, (batch, heads, x.shape.slots, *more))
                for (row, *_), slots in zip(bounds_of(x.shape, x.shape.seq), own, strict=True):
                    parts[row, :, slots] = 0
                for row in range(batch):
                    parts[row, :, next(slots.start for slots in own if slots.start < slots.stop)] = total[row]

    def _tiles(self, x: SimpleNamespace) -> list[tuple[str, int, int]]:
        sizes = self.tiles_bytes(x.shape)
        return list(zip(("tiles", "factors", "A", "P"), x.tiles, (*sizes, sizes[2]), strict=True))

    def _expect_tiles(self, x: SimpleNamespace) -> Any:
        first, *others = self._tiles(x)
        for other in others:
            self.expect(*other)
        return self._expect_made(*first)

    def _leave_made(self, what: str, at: int, size: int, made_of: Any) -> None:
        self.leave(what, at + NUMBER, size - NUMBER)
        tensor_at(at, torch.int64, (1,)).fill_(len(self._made))
        self._made.append(made_of)

    def _expect_made(self, what: str, at: int, size: int) -> Any:
        """What it was made of."""
        self.expect(what, at + NUMBER, size - NUMBER)
        return self._made[int(tensor_at(at, torch.int64, (1,)))]

    def _leave_states(
        self, x: SimpleNamespace, what: str, values: Tensor, entering: Tensor, leaving: Tensor
    ) -> None:
        if x.leaving:
            whole = floats_at(x.leaving, *states_size(x))
            assert whole is not None
            whole.copy_(leaving)
        if x.states:
            self._leave_made(what, x.states, self.states_bytes(x.shape), (values, entering))

    def _chunks(self, of: Shape) -> int:
        return of.batch * of.heads * of.slots

    def _squares(self, of: Shape) -> int:
        return self._chunks(of) * CHUNK * CHUNK * HALF


def tile(of: Shape) -> int:
    return 64 if of.dim_k <= 64 else 128


def inputs_of(x: SimpleNamespace) -> tuple[Inputs, Options]:
    """Of a launch, in fp64, but for v and the states."""
    of = x.shape
    q, k = (keys_at(x, at, of.heads // of.group).double().repeat_interleave(of.group, 2) for at in (x.q, x.k))
    g = keys_at(x, x.g, of.heads, OF_CODE[x.g_dtype]).double()
    beta = gate_at(x.beta, (of.batch, of.heads, of.seq)).double().mT
    a_log = gate_at(x.a_log, (1, of.heads, 1)).double() if x.a_log[0] else None
    dt_bias = gate_at(x.dt_bias, (1, of.heads, of.dim_k)).double() if x.dt_bias[0] else None
    of_head = None if a_log is None else a_log[..., 0].expand(of.batch, -1)
    of_channels = None if dt_bias is None else dt_bias.expand(of.batch, -1, -1)
    none = torch.empty(0)
    options = Options(x.gate, x.lower_bound, x.scale, x.l2norm, x.beta_sigmoid, x.beta_double)
    return Inputs(q, k, none, g, beta, of_head, of_channels, none), options


def keys_at(x: SimpleNamespace, at: tuple[int, ...], heads: int, dtype: torch.dtype | None = None) -> Tensor:
    """[B, T, H, K]."""
    of = x.shape
    return operand_at(at, dtype or dtype_of(x), (of.batch, heads, of.seq, of.dim_k)).transpose(1, 2)


def states_size(x: SimpleNamespace) -> tuple[int, int, int, int]:
    of: Any = x.shape
    return of.sequences, of.heads, of.dim_k, of.dim_v


def states_at(x: SimpleNamespace, at: int) -> Tensor:
    """[N, HV, K, V] in fp64; zeros where there are none."""
    found = floats_at(at, *states_size(x))
    return (torch.zeros(states_size(x)) if found is None else found).double()
