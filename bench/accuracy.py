"""Errors against the fp64 reference on the same rounded inputs, in slices that bound memory and time.

The Triton mLSTM kernels leave out the gradient through the normaliser: under a random output gradient their
dq, dk and di are far off. They are checked with an output gradient orthogonal to h (each row dh_t.h_t = 0),
under which that part is zero, as it is in a model with a scale-invariant norm behind h. Everything else is
checked with a random one, but that it is zero in rows where the gradient jumps (`Operator.at_kink`): one of
them can be all of the error.

Here tensors of all tokens are head-first [B, H, T(, D)] (`Operator.head_first`), and a pair is a batch entry
and a head of q and k, with all heads of v that share it. Of many packed sequences a sample is compared with
the truth, as a batch that is padded to the longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .inputs import OFFSETS, cotangent_like
from .operators import Operator, output_of, split_offsets
from .shapes import CHUNK, Shape

RANDOM, ORTHOGONAL = "random", "orthogonal"


# work and memory that one truth may take
FLOP_LIMIT = {"cuda": 4e12, "cpu": 2e10}
SLICE_BYTES = {"cuda": 16 * 2**30, "cpu": 2**28}


# packed sequences that are compared with the truth: the first, the last and evenly spread ones
SEQUENCES = 1024


def pick_pairs(operator: Operator, shape: Shape, which: str, device: torch.device) -> list[int]:
    """The (batch, head) pairs to check, evenly spread: all of them unless that takes more than FLOP_LIMIT."""
    total = shape.B * shape.H
    flops = operator.cost(shape, which, 2).flops
    if shape.N is not None:
        flops *= min(1.0, SEQUENCES / shape.N)
    count = max(1, min(total, int(total * FLOP_LIMIT[device.type] / flops)))
    return [pair * total // count for pair in range(count)]


def slice_size(shape: Shape, which: str, device: torch.device, padded: tuple[int, int] | None = None) -> int:
    """How many pairs the reference may take at a time, by the fp64 tensors that it keeps.

    The forward keeps the inputs, h in pieces and as a whole, and one chunk's states; autograd all chunks'.

    Args:
        padded: of packed sequences, how many are taken and the length that they are padded to.
    """
    count, length = padded or (1, shape.T)
    per_token, chunks = 2 * (shape.K + 1) + 3 * shape.V, 1
    if which == "fwdbwd":
        per_token, chunks = 6 * (shape.K + shape.V) + 6 * CHUNK, length // CHUNK + 1
    kept = 8 * count * shape.group * (length * per_token + chunks * 4 * shape.K * shape.V)
    return max(1, SLICE_BYTES[device.type] // kept)


@dataclass(frozen=True)
class Picks:
    """What of a call is compared with the truth.

    Attributes:
        batch, head: [P] indices of the pairs.
        heads: of q and k in all.
        sequences: [n] indices of the packed sequences; None where none are packed.
        tokens: [n, L] their tokens, padded to the longest; filled: [n, L] where that is no padding.
        all_pairs, all_sequences: nothing was left out.
    """

    batch: Tensor
    head: Tensor
    heads: int
    sequences: Tensor | None
    tokens: Tensor | None
    filled: Tensor | None
    all_pairs: bool
    all_sequences: bool

    def split(self, size: int) -> list[Picks]:
        """The same in parts of so many pairs."""
        parts = zip(self.batch.split(size), self.head.split(size), strict=True)
        return [replace(self, batch=batch, head=head) for batch, head in parts]

    @property
    def padded(self) -> tuple[int, int] | None:
        """How many packed sequences there are, and the length that they are padded to."""
        return None if self.tokens is None else (self.tokens.shape[0], self.tokens.shape[1])

    @property
    def left_out(self) -> str:
        """What was not compared, in words."""
        parts = ["heads"] * (not self.all_pairs) + ["sequences"] * (not self.all_sequences)
        return f"error on a part of the {' and of the '.join(parts)}" if parts else ""

    def take(self, tensor: Tensor) -> Tensor:
        """The picked part of a tensor of all tokens: [B, H, T, ...] becomes [n, heads, L, ...].

        n is 1 and L is T where no sequences are packed.
        """
        own = self._grouped(tensor)[self.batch, self.head].flatten(0, 1)
        return own.unsqueeze(0) if self.tokens is None else own[:, self.tokens].transpose(0, 1)

    def take_state(self, tensor: Tensor) -> Tensor:
        """The picked part of a state: [N, H, ...] becomes [n, heads, ...]."""
        grouped = self._grouped(tensor)
        if self.sequences is None:
            return grouped[self.batch, self.head].flatten(0, 1).unsqueeze(0)
        return grouped[self.sequences][:, self.head].flatten(1, 2)

    def take_parameter(self, tensor: Tensor) -> Tensor:
        """The picked part of what is one number per head: [H] becomes [heads], once for each batch entry."""
        return self._grouped(tensor[None])[0, self.head].flatten()

    def rows(self, taken: Tensor) -> Tensor:
        """What `take` gave, without the padding: [n, heads, L, ...] becomes [heads, tokens, ...]."""
        return taken[0] if self.filled is None else taken.transpose(0, 1)[:, self.filled]

    def state_rows(self, taken: Tensor) -> Tensor:
        """What `take_state` gave, heads first."""
        return taken[0] if self.sequences is None else taken.transpose(0, 1)

    def each(self, tensor: Tensor, *, state: bool = False) -> Iterator[Tensor]:
        """The picked part of a tensor head by head, in the order of `rows` or `state_rows`."""
        grouped = self._grouped(tensor)
        for b, h in zip(self.batch.tolist(), self.head.tolist(), strict=True):
            for member in range(grouped.shape[2]):
                if state and self.sequences is not None:
                    yield grouped[self.sequences, h, member]
                elif self.tokens is not None and self.filled is not None and not state:
                    yield grouped[b, h, member, self.tokens[self.filled]]
                else:
                    yield grouped[b, h, member]

    def put(self, tensor: Tensor, taken: Tensor) -> None:
        """Write back, in place, what `take` gave."""
        grouped, rows = self._grouped(tensor), iter(self.rows(taken))
        for b, h in zip(self.batch.tolist(), self.head.tolist(), strict=True):
            for member in range(grouped.shape[2]):
                row = next(rows).to(tensor.dtype)
                if self.tokens is None or self.filled is None:
                    grouped[b, h, member] = row
                else:
                    grouped[b, h, member, self.tokens[self.filled]] = row

    def _grouped(self, tensor: Tensor) -> Tensor:
        """[B, H, group, ...]: heads of v that share one of q and k are a group, others stand alone."""
        return tensor.unflatten(1, (self.heads, tensor.shape[1] // self.heads))

    def decays(self, operator: Operator, value_heads: int) -> dict[str, Tensor]:
        """g_gamma of the heads that were taken, where the operator's decay is no gate."""
        if operator.decay is None:
            return {}
        return {"g_gamma": self.take_parameter(operator.decay(value_heads, self.head.device))}


def pick(operator: Operator, shape: Shape, which: str, inputs: Mapping[str, Tensor]) -> Picks:
    """What of a call with these inputs is compared with the truth."""
    device = inputs["v"].device
    pairs = pick_pairs(operator, shape, which, device)
    indices = torch.tensor(pairs, device=device)
    every = len(pairs) == shape.B * shape.H
    if OFFSETS not in inputs:
        return Picks(indices // shape.H, indices % shape.H, shape.H, None, None, None, every, True)
    starts, ends = inputs[OFFSETS][:-1].long(), inputs[OFFSETS][1:].long()
    total = starts.numel()
    count = min(total, SEQUENCES)
    chosen = torch.arange(count, device=device) * (total - 1) // max(count - 1, 1)
    lengths = (ends - starts)[chosen]
    steps = torch.arange(int(lengths.max()), device=device)
    filled = steps < lengths[:, None]
    tokens = torch.where(filled, starts[chosen, None] + steps, starts[chosen, None])
    return Picks(
        indices // shape.H, indices % shape.H, shape.H, chosen, tokens, filled, every, count == total
    )


@dataclass(frozen=True)
class Truth:
    """fp64 results on what was picked.

    Attributes:
        values: per output gradient kind (RANDOM, ORTHOGONAL): the output and the gradients, each
            [heads, tokens(, D)], those of states [heads, ...].
        cotangents: per kind, the output gradient in the output's layout and the inputs' dtype; empty for
            "fwd".
        picks: what they stand for.
        operator: whose results they are.
    """

    values: dict[str, dict[str, Tensor]]
    cotangents: dict[str, Tensor]
    picks: Picks
    operator: Operator

    @property
    def partial(self) -> bool:
        """Not everything was picked."""
        return bool(self.picks.left_out)

    def errors(self, kind: str, found: Mapping[str, Tensor]) -> dict[str, float]:
        """Relative Frobenius error of each result on what was picked; NaN where any element is not finite.

        A parameter's gradient is left out where not everything was picked.
        """
        values = self.values[kind]
        return {
            name: self._error(name, values[name], tensor) for name, tensor in found.items() if name in values
        }

    def _error(self, name: str, truth: Tensor, found: Tensor) -> float:
        if not found.isfinite().all():
            return float("nan")
        difference = torch.zeros((), dtype=torch.float64, device=truth.device)
        norm = torch.zeros_like(difference)
        if name.removeprefix("d") in self.operator.parameters:
            return ((found.double() - truth).norm() / truth.norm()).item()
        state = name.removeprefix("d") in self.operator.states
        rows = self.picks.each(found if state else self.operator.head_first(found), state=state)
        # one head at a time: a few fp64 matrices of [T, D] in memory
        for own, row in zip(truth, rows, strict=True):
            difference += (row.double() - own).square().sum()
            norm += own.square().sum()
        ratio = (difference / norm).sqrt().item()
        return ratio if ratio == ratio and ratio != float("inf") else float("nan")


def compute_truth(
    operator: Operator,
    inputs: Mapping[str, Tensor],
    shape: Shape,
    which: str,
    *,
    kinds: Sequence[str] = (RANDOM,),
    seed: int = 0,
) -> Truth:
    """Run the reference in fp64 on the rounded inputs.

    Args:
        inputs: as the backends get them.
        which: "fwd", or "fwdbwd" for the gradients of all inputs as well.
        kinds: the output gradients to compute gradients for.
        seed: of the output gradients.
    """
    picks = pick(operator, shape, which, inputs)
    backward = which == "fwdbwd"
    tensors, _ = split_offsets(inputs)
    v = tensors["v"]
    cotangents: dict[str, Tensor] = {}
    if backward:
        base = cotangent_like(v, seed)
        cotangents = {kind: base if kind == RANDOM else base.clone() for kind in kinds}
    parts: dict[str, dict[str, list[Tensor]]] = {kind: {} for kind in kinds}
    turn = operator.head_first
    for part in picks.split(slice_size(shape, which, v.device, picks.padded)):
        leaves = [
            turn(part.take(turn(tensor)).double()).requires_grad_(backward) for tensor in tensors.values()
        ]
        options = {**operator.options, **part.decays(operator, shape.value_heads)}
        with torch.set_grad_enabled(backward):
            output = output_of(operator.truth(*leaves, chunk_size=CHUNK, **options))
        for kind in kinds:
            results = {operator.output: output.detach()}
            if backward:
                given = part.take(turn(cotangents[kind])).double()
                if kind == ORTHOGONAL:
                    given = _orthogonal(given, turn(output.detach()))
                elif operator.at_kink is not None:
                    jumps = turn(operator.at_kink(*(leaf.detach() for leaf in leaves)))
                    given = given.masked_fill(jumps[..., None], 0)
                part.put(turn(cotangents[kind]), given)
                # as the backends get it, and none for the padding
                given = part.take(turn(cotangents[kind])).double()
                if part.filled is not None:
                    given = given * part.filled[:, None, :, None]
                grads = torch.autograd.grad(output, leaves, turn(given), retain_graph=kind != kinds[-1])
                results |= {f"d{name}": grad for name, grad in zip(tensors, grads, strict=True)}
            for name, tensor in results.items():
                parts[kind].setdefault(name, []).append(part.rows(turn(tensor)))
    values = {
        kind: {name: torch.cat(found) for name, found in named.items()} for kind, named in parts.items()
    }
    return Truth(values, cotangents, picks, operator)


def _orthogonal(cotangent: Tensor, output: Tensor) -> Tensor:
    """Each row of the output gradient without its part along the output row."""
    along = (cotangent * output).sum(-1, keepdim=True) / output.square().sum(-1, keepdim=True)
    return cotangent - along * output


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


def poison(nbytes: int, device: torch.device) -> None:
    """Leave NaN in the allocator's free memory: an element that a kernel does not write shows as NaN."""
    if device.type == "cuda":
        torch.full((max(nbytes, 4) // 4,), float("nan"), device=device)
