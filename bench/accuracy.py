"""Errors against the fp64 reference on the same rounded inputs, in slices that bound memory and time.

The Triton mLSTM kernels leave out the gradient through the normaliser: under a random output gradient their
dq, dk and di are far off. They are checked with an output gradient orthogonal to h (each row dh_t.h_t = 0),
under which that part is zero, as it is in a model with a scale-invariant norm behind h. Everything else is
checked with a random one, but that it is zero in rows where the gradient jumps (`Operator.at_kink`): one of
them can be all of the error.

A pair is a batch entry and a head of q and k, with all heads of v that share it. Of many packed sequences a
sample is compared with the truth, as a batch that is padded to the longest.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from .inputs import OFFSETS, Named
from .operators import Operator, parts_of, split_offsets
from .shapes import CHUNK, Shape, cost

# output gradients: zero where the gradient jumps; orthogonal to the output; as it is
RANDOM, ORTHOGONAL, AS_GIVEN = KINDS = ("random", "orthogonal", "as given")
# work and memory that one truth may take
FLOP_LIMIT = {"cuda": 4e12, "cpu": 2e10}
SLICE_BYTES = {"cuda": 16 * 2**30, "cpu": 2**28}
RECURRENT_TOKENS = 1024  # longer ones would take minutes
KEPT_PER_STEP = 4  # matrices [K, V] that autograd keeps per token of the recurrent form
# packed sequences that are compared with the truth: the first, the last and evenly spread ones
SEQUENCES = 1024


def pick_pairs(operator: Operator, shape: Shape, which: str, device: torch.device) -> list[int]:
    """The (batch, head) pairs to check, evenly spread: all of them unless that takes more than FLOP_LIMIT."""
    total = shape.B * shape.H
    flops = cost(operator.name, shape, which).flops
    if shape.N is not None:
        flops *= min(1.0, SEQUENCES / shape.N)
    count = max(1, min(total, int(total * FLOP_LIMIT[device.type] / flops)))
    return [pair * total // count for pair in range(count)]


@dataclass(frozen=True)
class Picks:
    """What of a call is compared with the truth.

    Attributes:
        operator, shape: of the call.
        batch, head: [P] indices of the pairs.
        sequences: [n] indices of the packed sequences; None where none are packed.
        tokens: [n, L] the tokens of each, padded to the longest; n is 1 and L is T where none are packed.
        filled: [n, L] where that is no padding.
        left_out: what is not, in words; empty where nothing was left out.
    """

    operator: Operator
    shape: Shape
    batch: Tensor
    head: Tensor
    sequences: Tensor | None
    tokens: Tensor
    filled: Tensor
    left_out: str

    def split(self, size: int) -> "list[Picks]":
        """The same in parts of so many pairs."""
        parts = zip(self.batch.split(size), self.head.split(size), strict=True)
        return [replace(self, batch=batch, head=head) for batch, head in parts]

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """The picked part of an argument, of a result, or of the gradient "d<name>" of one: tokens [n,
        heads, L, ...] in the operator's layout, a state [n, heads, ...], of a parameter the numbers of the
        heads for each batch entry."""
        operator = self.operator
        if operator.is_parameter(name):
            return tensor.view(self.shape.H, -1)[self.head].flatten()
        is_state, packed = operator.is_state(name), self.sequences is not None
        if is_state and packed:
            return self._grouped(tensor)[self.sequences][:, self.head].flatten(1, 2)
        whole = self._grouped(tensor if is_state else operator.head_first(tensor))
        own = whole[self.batch, self.head].flatten(0, 1)
        if is_state:
            return own[None]
        # packed sequences are taken out of the one row that they are in
        return operator.head_first(own[:, self.tokens].transpose(0, 1) if packed else own[None])

    def rows(self, name: str, taken: Tensor) -> Tensor:
        """What `take` gave head by head, without the padding: [heads, tokens, ...] or [heads, n, ...]."""
        if self.operator.is_parameter(name):
            return taken
        if self.operator.is_state(name):
            return taken.transpose(0, 1)
        first = self.operator.head_first(taken)
        return first[0] if self.sequences is None else first.transpose(0, 1)[:, self.filled]

    def put(self, tensor: Tensor, taken: Tensor) -> None:
        """Write back, in place, what `take` gave of a tensor of all tokens."""
        grouped = self._grouped(self.operator.head_first(tensor))
        members = torch.arange(self.shape.group, device=tensor.device)[:, None]
        rows = self.rows(self.operator.output, taken).unflatten(0, (-1, self.shape.group))
        places = self.batch[:, None, None], self.head[:, None, None], members, self.tokens[self.filled]
        grouped[places] = rows.to(tensor.dtype)

    def _grouped(self, tensor: Tensor) -> Tensor:
        """[B, H, group, ...]: heads of v that share one of q and k are a group, others stand alone."""
        return tensor.unflatten(1, (self.shape.H, -1))

    def decays(self) -> dict[str, Tensor]:
        """g_gamma of the heads that were taken, where the operator's decay is no gate."""
        if self.operator.decay is None:
            return {}
        every = self.operator.decay(self.shape.value_heads, device=self.head.device)
        return {"g_gamma": self._grouped(every[None])[0, self.head].flatten()}


def pick(operator: Operator, shape: Shape, which: str, inputs: Named) -> Picks:
    """What of a call with these inputs is compared with the truth."""
    device = inputs["v"].device
    pairs = torch.tensor(pick_pairs(operator, shape, which, device), device=device)
    chosen, tokens = None, torch.arange(shape.T, device=device)[None]
    filled = torch.ones_like(tokens).bool()
    missing = ["heads"] * (len(pairs) < shape.B * shape.H)
    if OFFSETS in inputs:
        starts, ends = inputs[OFFSETS][:-1].long(), inputs[OFFSETS][1:].long()
        total = starts.numel()
        count = min(total, SEQUENCES)
        chosen = torch.arange(count, device=device) * (total - 1) // max(count - 1, 1)
        lengths = (ends - starts)[chosen]
        steps = torch.arange(int(lengths.max()), device=device)
        filled = steps < lengths[:, None]
        tokens = starts[chosen, None] + torch.where(filled, steps, 0)
        missing += ["sequences"] * (count < total)
    left_out = f"error on a part of the {' and of the '.join(missing)}" if missing else ""
    return Picks(operator, shape, pairs // shape.H, pairs % shape.H, chosen, tokens, filled, left_out)


@dataclass(frozen=True)
class Truth:
    """fp64 results on what was picked.

    Attributes:
        values: the output and the gradients, each [heads, tokens(, D)], those of states [heads, n, ...],
            those of parameters [heads].
        cotangents: as `compute_truth` takes them, that of the output as its kind is.
        kind: of the output's gradient, one of KINDS.
        picks: what they stand for.
        form: of the reference, "recurrent" or "chunkwise".
    """

    values: dict[str, Tensor]
    cotangents: dict[str, Tensor]
    kind: str
    picks: Picks
    form: str

    def errors(self, found: Named) -> dict[str, float]:
        """Relative Frobenius error of each result on what was picked; NaN where any element is not finite.
        A parameter's gradient is left out where not everything was picked."""
        named = {name: x for name, x in found.items() if name in self.values}
        return {name: self._error(name, self.values[name], x) for name, x in named.items()}

    def _error(self, name: str, truth: Tensor, found: Tensor) -> float:
        if not found.isfinite().all():
            return math.nan
        if not self.picks.operator.is_parameter(name):
            found = self.picks.rows(name, self.picks.take(name, found))
        difference = torch.zeros((), dtype=torch.float64, device=truth.device)
        norm = torch.zeros_like(difference)
        # one head at a time: a few fp64 matrices of [T, D] in memory
        for own, row in zip(truth, found, strict=True):
            difference += (row.double() - own).square().sum()
            norm += own.square().sum()
        ratio = (difference / norm).sqrt().item()
        return ratio if math.isfinite(ratio) else math.nan


def slice_size(picks: Picks, which: str) -> int:
    """How many pairs the reference may take at a time, by the fp64 tensors that it keeps: in the forward
    ("fwd") the inputs, h twice and one chunk's states, by autograd ("fwdbwd") all chunks', in the form
    "recurrent" every token's; 0 where that takes too long."""
    shape, (count, length) = picks.shape, picks.tokens.shape
    states, per_token, chunks = shape.K * shape.V, 2 * (shape.K + 1) + 3 * shape.V, 1
    if which == "fwdbwd":
        per_token, chunks = 6 * (shape.K + shape.V) + 6 * CHUNK, length // CHUNK + 1
    if which == "recurrent":
        per_token, chunks = KEPT_PER_STEP * states, 0
    kept = 8 * count * shape.group * (length * per_token + chunks * 4 * states)
    too_long = which == "recurrent" and length > RECURRENT_TOKENS
    return 0 if too_long else SLICE_BYTES[picks.tokens.device.type] // kept


def compute_truth(
    operator: Operator,
    shape: Shape,
    inputs: Named,
    cotangents: Named,
    kind: str = RANDOM,
    *,
    recurrent: bool = False,
) -> Truth:
    """Run the reference in fp64 on the rounded inputs.

    Args:
        inputs: as the backends get them.
        cotangents: gradients of the output and, named as the initial states are, of the last ones; empty
            where the output alone is wanted.
        kind: what is made of the output's gradient, one of KINDS.
        recurrent: take the recurrent form where it takes no more than minutes.
    """
    output, tensors = operator.output, split_offsets(inputs)[0]
    which = "fwdbwd" if cotangents else "fwd"
    picks = pick(operator, shape, which, inputs)
    # the padding of packed sequences changes their last states
    assert picks.sequences is None or len(cotangents) <= 1
    form, function = "chunkwise", partial(operator.truth, chunk_size=CHUNK)
    size = max(1, slice_size(picks, which))
    if recurrent and operator.recurrent and (fits := slice_size(picks, "recurrent")):
        form, function, size = "recurrent", partial(operator.recurrent), fits
    given = {name: x.clone() for name, x in cotangents.items()}
    # a gradient that is a sum over the whole call is told where all of it is picked
    dropped = {f"d{name}" for name in operator.parameters} if picks.left_out else set()
    last = {operator.last: True} if len(cotangents) > 1 else {}
    parts: dict[str, list[Tensor]] = {}
    for part in picks.split(size):
        leaves = {name: part.take(name, tensor).double() for name, tensor in tensors.items()}
        wanted = {f"d{name}": leaf for name, leaf in leaves.items() if name not in operator.constants}
        for leaf in wanted.values():
            leaf.requires_grad_(bool(cotangents))
        result = function(**leaves, **operator.options, **part.decays(), **last)
        found = parts_of(result)[: max(1, len(cotangents))]
        values = {output: found[0].detach()}
        if cotangents:
            _adjust(part, kind, given[output], values[output], leaves)
            exact = {name: part.take(name, x).double() for name, x in given.items()}
            exact[output] = exact[output] * operator.head_first(part.filled[:, None, :, None])
            unused = {"allow_unused": True, "materialize_grads": True}
            grads = torch.autograd.grad(found, list(wanted.values()), list(exact.values()), **unused)
            values |= zip(wanted, grads, strict=True)
        for name, tensor in values.items():
            if name not in dropped:
                parts.setdefault(name, []).append(part.rows(name, tensor))
    joined = {name: torch.cat(rows) for name, rows in parts.items()}
    for name in filter(operator.is_parameter, joined):
        # the pairs come batch entry by batch entry
        joined[name] = joined[name].view(-1, inputs[name.removeprefix("d")].numel()).sum(0)
    return Truth(joined, given, kind, picks, form)


def _adjust(part: Picks, kind: str, cotangent: Tensor, output: Tensor, leaves: Named) -> None:
    """Make of the picked part of an output gradient, in place, what its kind says."""
    operator = part.operator
    if kind == AS_GIVEN or (kind == RANDOM and operator.at_kink is None):
        return
    own = part.take(operator.output, cotangent).double()
    if kind == ORTHOGONAL:  # without its part along the output row
        own -= (own * output).sum(-1, keepdim=True) / output.square().sum(-1, keepdim=True) * output
    elif operator.at_kink is not None:
        own = own.masked_fill(operator.at_kink(*(leaf.detach() for leaf in leaves.values()))[..., None], 0)
    part.put(cotangent, own)


def failures(errors: Mapping[str, float], tolerances: Mapping[str, float]) -> list[str]:
    """What exceeds its tolerance, each as "h 2.1e-02 > 5.0e-03"; NaN exceeds every tolerance."""
    found = []
    for name, error in errors.items():
        limit = tolerances.get(name)
        if error != error:
            found.append(f"{name} is not finite")
        elif limit is not None and not error <= limit:
            found.append(f"{name} {error:.1e} > {limit:.1e}")
    return found
