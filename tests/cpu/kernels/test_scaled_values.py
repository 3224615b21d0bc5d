"""What rounding costs the forward at K = 256, whose state is fed with scaled values in place of scaled keys.

An emulation in fp64 of `kernels/scalar_gate/forward/transposed/`: the state rounds what it is fed with
and what is read of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tfla_tk.reference import mlstm_recurrent, mlstm_siging_recurrent

CHUNK = 64
LANES = 8  # tokens whose roundings are independent: a lane has two of every eight, even and odd

Inputs = dict[str, Tensor]


class Units:
    """C in its true scale, or relative to its stabiliser.

    Attributes:
        log2: C is 2^log2 times what the state holds.
    """

    log2 = 0.0

    def add(self, decay: float, largest: float) -> float:
        """What the state is multiplied with: for a chunk's decay and the largest weight it adds, log2."""
        return 2.0**decay

    def look(self, chunk: int, k: Tensor, v: Tensor, weights: Tensor) -> None:
        """Looks at a chunk and what its keys and values were scaled with."""


class Ahead(Units):
    """Those of fp16, `state_exponent.cuh`: with the exponential gate PrescaledDecay.

    Args:
        run_ahead: whether it does, whatever looks find.

    Attributes:
        found: by looks, of chunks whose gates are still to come.
        paid: times that the state was multiplied.
    """

    AHEAD, AHEAD_OF_SLOW = 10.0, 4.0
    LEAST_RATIO, LEAST_KEY, EVERY, LAG = 0.25, 0.25, 16, 3

    def __init__(self, run_ahead: bool | None = None) -> None:
        self.always = run_ahead
        self.found = [False] * self.LAG
        self.ratio = 0.0
        self.paid = 0

    def ahead(self) -> float:
        return self.log2

    def most(self, decay: float) -> tuple[float, float]:
        """How far the state may be ahead, and how far it is when it was multiplied."""
        found = self.found.pop(0)
        if not (found if self.always is None else self.always):
            return 0.0, 0.0
        return self.AHEAD, self.AHEAD_OF_SLOW if decay > -1 else self.AHEAD

    def add(self, decay: float, largest: float) -> float:
        self.log2 += decay
        most, then = self.most(decay)
        return 1.0 if 0 <= self.log2 <= most else self.multiplied(then)

    def multiplied(self, log2: float) -> float:
        self.paid += 1
        before, self.log2 = self.log2, log2
        return 2.0 ** min(before - log2, 15.0)

    def look(self, chunk: int, k: Tensor, v: Tensor, weights: Tensor) -> None:
        if chunk % self.EVERY == 0:
            lane = torch.arange(32)
            tokens, four = 2 * lane + chunk % 2, torch.arange(4)
            keys = k[tokens[:, None], (4 * ((5 * lane + chunk) % 32))[:, None] + four].square().mean(1)
            values = v[tokens[:, None], (lane * v.shape[1] // 128 * 4)[:, None] + four].square().mean(1)
            relative = weights[tokens] * 2.0 ** self.ahead()
            state = float((relative.square() * keys).max() * values.max())
            self.ratio = max(state / max(float(keys.max()), self.LEAST_KEY), self.ratio / 4)
        self.found.append(self.ratio >= self.LEAST_RATIO)


class FollowedWeights(Ahead):
    """With the sigmoid gate."""

    largest_weight = -1e30

    def ahead(self) -> float:
        return self.log2 - self.largest_weight

    def add(self, decay: float, largest: float) -> float:
        self.log2 += decay
        self.largest_weight = max(self.largest_weight + decay, largest)
        most, then = self.most(decay)
        return (
            1.0 if 0 <= self.ahead() <= most + 1 else self.multiplied(math.ceil(self.largest_weight) + then)
        )


class Added(ABC):
    """What a chunk adds to C.

    Attributes:
        dtype: of the operands.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def rounded(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).double()

    @abstractmethod
    def __call__(self, k: Tensor, v: Tensor, weights: Tensor, decay: Tensor) -> Tensor: ...


class ScaledKeys(Added):
    """In the narrow kernels."""

    def __call__(self, k: Tensor, v: Tensor, weights: Tensor, decay: Tensor) -> Tensor:
        return self.rounded(k * weights[:, None]).T @ v


class ScaledValues(Added):
    """With values that are rounded one by one."""

    def __call__(self, k: Tensor, v: Tensor, weights: Tensor, decay: Tensor) -> Tensor:
        return k.T @ self.rounded(v * weights[:, None])


class GivenOn(Added):
    """With values rounded together with what those of the tokens eight later have lost, where their weight is
    not far less; exactly.
    """

    LEAST = 1 / 16

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.lost: Tensor | float = 0.0
        self.giving = torch.full([LANES], torch.inf, dtype=torch.float64)  # weights of the tokens that gave

    def __call__(self, k: Tensor, v: Tensor, weights: Tensor, decay: Tensor) -> Tensor:
        self.lost, self.giving = self.decayed(self.lost, decay), self.giving * decay
        scaled = torch.empty_like(v)
        for first in range(CHUNK - LANES, -1, -LANES):
            tokens = slice(first, first + LANES)
            take = weights[tokens] >= self.LEAST * self.giving
            scaled[tokens], self.lost = self.scaled(v[tokens], weights[tokens, None], take[:, None])
            self.giving = weights[tokens]
        return k.T @ scaled

    def scaled(self, v: Tensor, weights: Tensor, take: Tensor) -> tuple[Tensor, Tensor]:
        exact = v * weights + take * self.lost
        rounded = self.rounded(exact)
        return rounded, exact - rounded

    def decayed(self, lost: Tensor | float, decay: Tensor) -> Tensor:
        return lost * decay


class GivenOnByPairs(GivenOn):
    """The same by pairs of the operands' dtype, `value_rounding.cuh`; `lost` is negated."""

    def scaled(self, v: Tensor, weights: Tensor, take: Tensor) -> tuple[Tensor, Tensor]:
        high = self.rounded(weights)
        low = self.rounded(weights - high)
        rest = self.rounded(-self.lost * take + self.rounded(v * low))
        rounded = self.rounded(v * high + rest)
        return rounded, self.rounded(self.rounded(rounded - v * high) - rest)

    def decayed(self, lost: Tensor | float, decay: Tensor) -> Tensor:
        return self.rounded(lost * self.rounded(decay))


def held_larger(unit: Tensor, dtype: torch.dtype, *, sigmoid: bool) -> Tensor:
    """By how much rows are, until h has been stored, `fp16_row_scaling.cuh`. unit: that of GateStage."""
    if dtype == torch.bfloat16:
        return torch.ones_like(unit)
    exponent = unit.log2().floor()
    return torch.exp2(-exponent if sigmoid else exponent).div(512).clamp(1, 2.0**24)


def hidden(x: Inputs, added: Added, units: Units, *, sigmoid: bool) -> Tensor:
    """h of one head, [S, V], of mLSTMexp or of mLSTMsig without normaliser, with the roundings of C, P and h,
    and of what `added` rounds.
    """
    rounded, scale, log2e = added.rounded, x["q"].shape[-1] ** -0.5, 1 / math.log(2)
    c = torch.zeros(x["q"].shape[-1], x["v"].shape[-1], dtype=torch.float64)
    n, m = torch.zeros_like(c[:, 0]), torch.tensor(0.0, dtype=torch.float64)
    found = []
    for start in range(0, x["q"].shape[0], CHUNK):
        q, k, v, i, f = (x[name][start : start + CHUNK] for name in "qkvif")
        b = torch.nn.functional.logsigmoid(f).cumsum(0) * log2e
        a = (torch.nn.functional.logsigmoid(i) if sigmoid else i) * log2e - b
        row = a.cummax(0).values.maximum(m)
        p = ((q @ k.T) * scale * torch.exp2(a[None] - row[:, None]).nan_to_num(posinf=0.0)).tril()
        inter = scale * torch.exp2(m - row + units.log2)
        unit = torch.exp2(b + row if sigmoid else -(b + row))
        if sigmoid:
            factor, end = unit, b[-1]
        else:
            factor, end = 1 / (p.sum(1) + inter * (q @ n)).abs().maximum(unit), -row[-1]
        larger = held_larger(unit, added.dtype, sigmoid=sigmoid)[:, None]
        held = factor[:, None] * larger
        out = rounded(p * held) @ v + inter[:, None] * held * (q @ rounded(c))
        found.append(rounded(rounded(out) / larger))
        decay = torch.tensor(units.add(float(m + end), float(a.max() + end)), dtype=torch.float64)
        weights = torch.exp2(a + end - units.log2)
        units.look(start // CHUNK, k, v, weights)
        c = decay * c + added(k, v, weights, decay)
        n = decay * n + weights @ k
        if not sigmoid:
            m = b[-1] + row[-1]
    return torch.cat(found)


def error(x: Inputs, added: Added, units: Units | None = None, *, sigmoid: bool = False) -> float:
    x = x | {name: added.rounded(x[name]) for name in "qkv"}
    batched = {name: t[None, None] for name, t in x.items()}
    if sigmoid:
        truth = mlstm_siging_recurrent(**batched, normalize=False)
    else:
        truth = mlstm_recurrent(**batched, eps=0.0)
    truth = (truth if isinstance(truth, Tensor) else truth[0])[0, 0]
    return float((hidden(x, added, units or Units(), sigmoid=sigmoid) - truth).norm() / truth.norm())


def draw(*, alike: bool = True, forget_bias: float = 3.0, seq: int = 512) -> Inputs:
    """Of one head. Keys are alike for all queries where no element of either is negative."""
    generator = torch.Generator().manual_seed(0)
    dims = {"q": 256, "k": 256, "v": 32}
    x = {name: torch.randn(seq, dim, generator=generator).double() for name, dim in dims.items()}
    x |= {name: torch.randn(seq, generator=generator).double() for name in "if"}
    x["f"] += forget_bias
    if alike:
        x["q"], x["k"] = x["q"].abs(), x["k"].abs()
    return x


def random() -> Inputs:
    return draw(alike=False)


def alike() -> Inputs:
    return draw()


def nothing_forgotten() -> Inputs:
    return draw(forget_bias=12.0)


def closed() -> Inputs:
    """What is read later is what was there when the input gates closed, in the middle of a chunk."""
    x = draw()
    x["i"][:236], x["i"][236:] = 80.0, -80.0
    return x


def large_keys(closed_by: float) -> Inputs:
    """One token of four has a key a hundred times as large, and its input gate makes up for it at least."""
    x = draw()
    large = torch.arange(len(x["i"])) * 7 % 11 < 3
    x["i"][large] -= closed_by
    x["k"][large] *= 100
    return x


def masked() -> Inputs:
    return large_keys(1e4)


def made_up_for() -> Inputs:
    return large_keys(math.log(100))


def closed_at_start() -> Inputs:
    """Input gates of a model before training."""
    x = draw()
    x["i"] -= 10
    return x


def scaled(name: str, by: float) -> Inputs:
    x = random()
    x[name] *= by
    return x


def small_values() -> Inputs:
    return scaled("v", 0.01)


def small_keys() -> Inputs:
    return scaled("k", 0.01)


Case = Callable[[], Inputs]
CASES = [random, alike, nothing_forgotten, closed, masked, made_up_for, closed_at_start]
CASES += [small_values, small_keys]


@pytest.mark.parametrize("sigmoid", [False, True], ids=["exp", "sig"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES)
def test_scaled_values_are_as_good_as_scaled_keys(case: Case, dtype: torch.dtype, sigmoid: bool) -> None:
    x = case()
    units = Units() if dtype == torch.bfloat16 else FollowedWeights() if sigmoid else Ahead()
    found = error(x, GivenOnByPairs(dtype), units, sigmoid=sigmoid)
    assert found <= 1.05 * error(x, ScaledKeys(dtype), sigmoid=sigmoid)


@pytest.mark.parametrize("case", [nothing_forgotten, closed])
def test_values_rounded_one_by_one_are_not(case: Case) -> None:
    """Keys that are alike let the errors of values add up where those of keys do not."""
    x, dtype = case(), torch.bfloat16
    assert error(x, ScaledValues(dtype)) > 1.05 * error(x, ScaledKeys(dtype))


def test_pairs_of_fp16_are_not_in_the_true_scale_of_the_sigmoid_gate() -> None:
    """Weights below 2^-14, and what is lost of their values, have few digits in fp16."""
    x, dtype = closed_at_start(), torch.float16
    assert error(x, GivenOnByPairs(dtype), sigmoid=True) > 1.05 * error(x, ScaledKeys(dtype), sigmoid=True)


def test_pairs_round_as_fp32_does_in_units_of_the_largest_weight() -> None:
    x, dtype = closed_at_start(), torch.float16
    by_pairs = error(x, GivenOnByPairs(dtype), FollowedWeights(), sigmoid=True)
    assert by_pairs <= 1.01 * error(x, GivenOn(dtype), sigmoid=True)


@pytest.mark.parametrize("sigmoid", [False, True], ids=["exp", "sig"])
def test_rows_of_fp16_that_are_not_held_larger_lose_digits(
    sigmoid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where gates are nearly closed, more than h itself has to."""
    x, units = draw(alike=False, forget_bias=-1.0), FollowedWeights if sigmoid else Ahead
    x["i"] -= 12
    held = error(x, GivenOnByPairs(torch.float16), units(), sigmoid=sigmoid)
    monkeypatch.setitem(globals(), "held_larger", lambda unit, dtype, sigmoid: torch.ones_like(unit))
    assert error(x, GivenOnByPairs(torch.float16), units(), sigmoid=sigmoid) > 1.5 * held


UNITS = [pytest.param(Ahead, id="exp"), pytest.param(FollowedWeights, id="sig")]


@pytest.mark.parametrize("kind", UNITS)
@pytest.mark.parametrize("case", [random, alike])
def test_a_state_of_fp16_runs_ahead_of_its_decay(case: Case, kind: type[Ahead]) -> None:
    """It pays in fewer chunks then."""
    paid = []
    for run_ahead in (None, False):
        units = kind(run_ahead)
        error(case(), GivenOnByPairs(torch.float16), units, sigmoid=kind is FollowedWeights)
        paid.append(units.paid)
    assert paid[0] < paid[1]


@pytest.mark.parametrize("kind", UNITS)
@pytest.mark.parametrize("case", [small_values, made_up_for])
def test_a_state_that_ran_ahead_without_looking_would_lose_digits(case: Case, kind: type[Ahead]) -> None:
    x, dtype = case(), torch.float16
    always, as_found = (
        error(x, GivenOnByPairs(dtype), kind(run_ahead), sigmoid=kind is FollowedWeights)
        for run_ahead in (True, None)
    )
    assert always > 1.02 * as_found


@pytest.mark.parametrize("kind", UNITS)
def test_a_state_stops_running_ahead_where_values_get_small(kind: type[Ahead]) -> None:
    """Within two looks after the first that sees it."""
    x = draw(alike=False, seq=CHUNK * (3 * Ahead.EVERY + 1))
    x["v"][CHUNK * Ahead.EVERY :] *= 1e-3
    units = kind()
    error(x, GivenOnByPairs(torch.float16), units, sigmoid=kind is FollowedWeights)
    assert not units.found[-1]
