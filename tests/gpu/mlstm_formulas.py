"""What the small kernels of the mLSTM backward compute, formula by formula as they have it, in fp64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

CHUNK = 64
ANCHOR_CHUNKS = 8  # kAnchorChunks
FORGOTTEN, FORGOTTEN_STABILISED = 12.0, 24.0  # kForgotten, in log2
LEAST_LOG_GATE = -2e5  # kLeastLogGate


class RowSums(NamedTuple):
    """q_t.dq_t or k_t.dk_t.

    Attributes:
        whole: of every token, [B, NH, S].
        inter: of every chunk the part through the state that entered it: the sum of its summands and of their
            squares, [B, NH, slots, 2]; where that is inf (kNotSummed) the squares of some of them.
    """

    whole: Tensor
    inter: Tensor


def gate_gradients(
    q_dq: Sequence[Tensor],
    k_dk: Sequence[Tensor],
    anchors: Tensor | None,
    i: Tensor,
    f: Tensor,
    chunk_m: Tensor | None,
    flows: Sequence[Tensor],
    bounds: list[tuple[int, int]],
    before: Tensor | None = None,
    every: int = ANCHOR_CHUNKS,
) -> tuple[Tensor, Tensor]:
    """di and df.

    Args:
        q_dq, k_dk: whole and inter of RowSums.
        anchors: [B, NH, slots, parts], to be summed over the parts: the flow before chunks that are multiples
            of `every`; None to do without.
        chunk_m: [B, NH, slots], the sum of the parts that the forward op returns; None with the sigmoid gate.
        flows: <dC, C> + <dn, n> [N, NH] before the first and after the last token.
        bounds: (start, end) of every packed sequence; [(0, S)] for a batch.
        before: like `anchors`, for the chunks before an anchor, where that is another.
    """
    i, f = i.double(), f.double()
    q, k = (RowSums(*(x.double() for x in sums)) for sums in (q_dq, k_dk))
    dlog_f = torch.zeros_like(f)
    for sequence, (start, end) in enumerate(bounds):
        rows = slice(None) if len(bounds) == 1 else slice(sequence, sequence + 1)
        own = slice(start, end)
        slot = start // CHUNK + (sequence if len(bounds) > 1 else 0)
        behind = [] if anchors is None else range(every, -(-(end - start) // CHUNK), every)
        dlog_f[:, :, own] = _dlog_f(
            *(RowSums(sums.whole[:, :, own], sums.inter[:, :, slot:]) for sums in (q, k)),
            (logsigmoid(i) if chunk_m is None else i)[:, :, own].clamp(min=LEAST_LOG_GATE),
            logsigmoid(f)[:, :, own].clamp(min=LEAST_LOG_GATE),
            None if chunk_m is None else chunk_m[:, :, slot:].double(),
            *(
                {c: given[:, :, (slot + c) // every].double().sum(-1) for c in behind}
                for given in (anchors, anchors if before is None else before)
            ),
            *(x[rows].double() for x in flows),
        )
    di = k.whole if chunk_m is not None else k.whole * torch.sigmoid(-i)
    return di, dlog_f * torch.sigmoid(-f)


def _dlog_f(
    q_dq: RowSums,
    k_dk: RowSums,
    log_i: Tensor,
    log_f: Tensor,
    chunk_m: Tensor | None,
    after: dict[int, Tensor],
    before: dict[int, Tensor],
    flow_start: Tensor,
    flow_end: Tensor,
) -> Tensor:
    """The gradient of the log forget gates of one sequence.

    Args:
        after, before: the flow before some of its chunks, from which those after it and before it follow.
    """
    pieces = [slice(t, t + CHUNK) for t in range(0, log_f.shape[-1], CHUNK)]
    if not pieces:
        return torch.zeros_like(log_f)
    received, sent = ([sums.inter[:, :, chunk] for chunk in range(len(pieces))] for sums in (q_dq, k_dk))
    forgets = []
    for number, x in enumerate(pieces):
        weight = (log_i[:, :, x] - log_f[:, :, x].cumsum(-1)).amax(-1) / math.log(2)
        summed = (received[number][..., 0] != math.inf) & (sent[number][..., 0] != math.inf)
        for sums, own in ((q_dq, received), (k_dk, sent)):  # else the sums of all rows serve as well
            value, squares = own[number].unbind(-1)
            value = torch.where(summed, value, sums.whole[:, :, x].sum(-1))
            own[number] = torch.stack([value, squares], dim=-1)
        if chunk_m is None:
            forgets.append(summed & (weight > FORGOTTEN))
        else:
            forgets.append(summed & (weight - chunk_m[:, :, number] > FORGOTTEN_STABILISED))

    inside = range(1, len(pieces))
    known_left = [flow_start, *(after.get(c) for c in inside)]
    known_right = [flow_end, *(before.get(c) for c in reversed(inside))]
    from_left = _followed(received, sent, forgets, known_left)
    from_right = _followed(sent[::-1], received[::-1], forgets[::-1], known_right)[::-1]

    found = []
    for x, left, right, sends in zip(pieces, from_left, from_right, sent, strict=True):
        variance = left[1] + right[1]
        of_left = torch.where(variance > 0, right[1] / variance, 0.0)
        flow = right[0] + of_left * (left[0] - right[0]) + sends[..., 0]
        of_tokens = (q_dq.whole - k_dk.whole)[:, :, x]
        found.append(flow[..., None] + of_tokens.flip(-1).cumsum(-1).flip(-1))
    return torch.cat(found, dim=-1)


def _followed(
    ends_in: list[Tensor], starts_in: list[Tensor], forgets: list[Tensor], known: list[Tensor | None]
) -> list[tuple[Tensor, Tensor]]:
    """The flow through every chunk and the variance of its noise, as followed from chunk to chunk.

    Args:
        ends_in, starts_in: what leaves and joins the flow in every chunk, and the squares of its summands.
        known: the flow that comes to every chunk; None where it is known from the chunk before alone.
    """
    found = []
    for ends, starts, forgotten, start in zip(ends_in, starts_in, forgets, known, strict=True):
        if start is not None:
            value, variance = start, torch.zeros_like(start)
        value = torch.where(forgotten, 0.0, value - ends[..., 0])
        variance = torch.where(forgotten, 0.0, variance + ends[..., 1])
        found.append((value, variance))
        value, variance = value + starts[..., 0], variance + starts[..., 1]
    return found
