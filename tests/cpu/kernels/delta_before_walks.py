"""What the delta rule's kernels launch before a walk: the chunk matrices, and the launches of a split."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .addresses import CHUNK
from .delta_arguments import Arguments, Piece, chunks_of, matrices_at, matrices_of, pieces_of, sequences_in
from .stand_in import Kernels

FORGOTTEN = -100  # log2 of a bound on what is left of a state
CARRIED = -1  # in the place of leads


def lead_of(ahead: Tensor, stretch: float, whole: int) -> int:
    """Chunks that a walk begins ahead, a multiple of `whole` or all that there are. Of each chunk that is
    left out, and of the state behind them all, next to nothing is left then in any chunk of the segment.

    Args:
        ahead: [chunks, 2], the nearest one first: log2 of what a chunk lets through of a state, and of what
            any stretch of it does.
        stretch: the latter of all chunks of the segment.
    """
    available = lead = len(ahead)
    ends = torch.cat([ahead[:, 1], torch.zeros(1, dtype=ahead.dtype)])
    for count in range(available, -1, -1):  # of chunks in between
        through = stretch + ahead[:count, 0].sum().item() + ends[count].item()
        if not through < FORGOTTEN:  # NaN is not forgotten
            break
        lead = count
    return min(math.ceil(lead / whole) * whole, available)


class HeadsOfLead(NamedTuple):
    """Heads whose walks of a segment begin alike: `lead` chunks ahead, or where they are carried with it."""

    lead: int
    heads: Any  # an index

    @property
    def are_carried(self) -> bool:
        return self.lead == CARRIED


class BeforeWalks(Kernels):
    """The launches before a walk, and what walks ask about a split.

    Attributes:
        segment: tokens of a segment of the walks over the states.
        made_leads: [2, segments, HV] of every split: before its segments and behind them, 0 where there is
            none.
    """

    def __init__(self, segment: int) -> None:
        super().__init__()
        self.segment = segment
        self.made_leads: list[Tensor] = []
        self._places_of_leads: list[set[int]] = [set(), set()]  # addresses: before segments, behind them

    def slots(self, x: Arguments, number: int, start: int) -> tuple[int, int]:
        """The slot of a sequence's first border, and how many slots there are."""
        if x.cut[0]:
            return start // self.segment, x.seq // self.segment
        own = (x.seq - 1) // self.segment
        return number * own, own * x.cut[2]

    def compute_matrices(self, x: Arguments) -> None:
        assert x.cut[3] == x.cut[2] and x.cut[4] * CHUNK > x.seq
        self.make_matrices(x, *x.of.matrices)
        if x.of.bounds:
            self.leave_bounds(x)

    def leave_bounds(self, x: Arguments) -> None:
        """Of 16 tokens each."""
        k, g, beta = x.keys(x.of.k), x.gate(x.of.g), x.gate(x.of.beta)
        bounds, decay = x.bounds(x.of.bounds), math.log2(math.e) * g
        grown = (1 - beta * k.square().sum(-1)).abs()
        grown = torch.where(grown <= 1, 1.0, grown).log2()
        of_tokens = torch.stack([grown + decay, grown + decay.clamp(min=0).nan_to_num(0)], -1)
        for row, tokens, slot in chunks_of(x):
            own = of_tokens[row, tokens]
            parts = (
                torch.nn.functional.pad(own, (0, 0, 0, 0, 0, CHUNK - len(own))).unflatten(0, (4, -1)).sum(1)
            )
            bounds[row, :, slot] = parts.transpose(0, 1)

    def make_matrices(self, x: Arguments, *addresses: int) -> None:
        for place, matrix in self.places_and_matrices(x, addresses):
            place.copy_(matrix)

    def check_matrices(self, x: Arguments, *addresses: int) -> None:
        """Of a walk: they are those of its q, k and gates."""
        for place, made in self.places_and_matrices(x, addresses):
            assert torch.equal(place.nan_to_num(7), made.to(x.dtype).nan_to_num(7))

    def places_and_matrices(
        self, x: Arguments, addresses: tuple[int, ...]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Those that are given, A or A and P, where they lie and as they should be."""
        given = [at for at in addresses if at]
        for places, made in zip(matrices_at(x, given), matrices_of(x), strict=True):
            yield from zip(places, made, strict=False)

    def check_cut(self, x: Arguments) -> None:
        """Of a walk of the forward or the mirror: segments of a split end at borders."""
        if x.cut[3] == x.cut[2] and x.cut[4] * CHUNK > x.seq:
            assert not x.of.carried
        assert x.cut[4] * CHUNK % self.segment == 0 or x.cut[4] * CHUNK > x.seq
        assert (x.of.carried != 0) == (x.carried > 0)

    @property
    def whole_lead(self) -> int:
        """Leads are multiples of so many chunks, those of a segment of the walks over the states."""
        return self.segment // CHUNK

    def compute_leads(self, x: Arguments) -> None:
        made = self.launches[-2]
        assert made.name == "matrices" and made.bounds == x.of.bounds != 0
        assert x.of.longest >= 0 and x.of.longest % self.whole_lead == 0
        bounds = x.bounds(x.of.bounds).double().sum(3)
        halves = [x.leads(x.of.leads + half * self.bytes_of_leads(x)) for half in range(1 + x.of.both)]
        for places, half in zip(self._places_of_leads, halves, strict=False):
            places.add(half.data_ptr())
        found = torch.zeros(2, *halves[0].shape, dtype=torch.int32)
        for row, number, start, end in sequences_in(x):
            pieces = [piece for piece in pieces_of(x) if piece.sequence == number]
            slot = start // CHUNK + number if x.cut[0] else 0
            of_sequence = bounds[row, :, slot : slot + math.ceil((end - start) / CHUNK)]
            for head, of_head in enumerate(of_sequence):
                leads: list[dict[int, int]] = [{}, {}]  # by the segments' places
                for first, second in itertools.pairwise(pieces):
                    border = (second.tokens.start - start) // CHUNK
                    stretches = [
                        of_head[piece.begun // CHUNK :][: x.cut[4], 1].sum().item()
                        for piece in (second, first)
                    ]
                    aheads = of_head[:border].flip(0), of_head[border:]
                    for own, place, ahead, stretch in zip(
                        leads, (second.place, first.place), aheads, stretches, strict=True
                    ):
                        own[place] = lead_of(ahead, stretch, self.whole_lead)
                for half, own, kept in zip(halves, leads, found, strict=False):
                    are_carried = any(lead > x.of.longest for lead in own.values())
                    for place, lead in own.items():
                        half[place, head] = kept[place, head] = CARRIED if are_carried else lead
        self.made_leads.append(found)

    @staticmethod
    def bytes_of_leads(x: Arguments) -> int:
        """From those before the segments to those behind them."""
        return x.cut[3] * x.heads * torch.int32.itemsize

    def leads_of(self, x: Arguments, *, behind: bool) -> Tensor | None:
        """[segments, HV] that a launch is given, before the segments or behind them; None where nothing is
        cut."""
        if x.carried == 0:
            return None
        leads = x.leads(x.of.leads)
        assert leads.data_ptr() in self._places_of_leads[behind]
        return leads

    def heads_by_lead(self, leads: Tensor | None, piece: Piece, *, behind: bool) -> list[HeadsOfLead]:
        """Of a segment; a walk that begins with its sequence has no lead."""
        if leads is None or (piece.is_last if behind else piece.number == 0):
            return [HeadsOfLead(0, slice(None))]
        available = math.ceil((piece.end - piece.tokens.stop if behind else piece.begun) / CHUNK)
        own = leads[piece.place]
        found = [HeadsOfLead(lead, (own == lead).nonzero()[:, 0]) for lead in own.unique().tolist()]
        for lead, _ in found:
            is_whole = lead == available or (0 < lead < available and lead % self.whole_lead == 0)
            assert lead == CARRIED or is_whole, (lead, available)
            assert behind or lead == CARRIED or lead % self.whole_lead == 0
        return found

    def carried_heads(self, leads: Tensor, piece: Piece) -> Tensor:
        """Those whose state is carried over the border at a segment: [heads]."""
        return (leads[piece.place] == CARRIED).nonzero()[:, 0]

    def compute_maps(self, x: Arguments) -> None:
        """Of heads that are carried, or will be in a backward; the others' places are left as they are."""
        self.check_cut(x)
        self.check_matrices(x, x.of.a)
        k, g, beta, v = x.keys(x.of.k), x.gate(x.of.g), x.gate(x.of.beta), x.operand(x.of.v, x.dim_v)
        initial, carried = x.states(x.of.initial, x.cut[2]), x.states(x.of.carried, x.carried)
        maps, transposed = (x.maps(at) for at in x.of.maps)
        leads = self.leads_of(x, behind=False)
        assert carried is not None and transposed is not None and leads is not None
        behind = leads if maps is None else x.leads(x.of.leads + self.bytes_of_leads(x))
        for piece, following in itertools.pairwise(pieces_of(x)):
            if piece.is_last:
                continue
            are_asked, row = leads[following.place] == CARRIED, piece.row
            if maps is not None:
                are_asked = are_asked | (behind[piece.place] == CARRIED)
            heads = are_asked.nonzero()[:, 0]
            state = torch.zeros(len(heads), x.dim_k, x.dim_v)
            if piece.number == 0 and initial is not None:
                state = initial[piece.sequence, heads]
            of_state = torch.eye(x.dim_k).expand(len(heads), -1, -1)
            for t in piece.tokens:
                key, by = k[row, t, heads], beta[row, t, heads, None]
                state, of_state = (y * g[row, t, heads, None, None].exp() for y in (state, of_state))
                write = v[row, t, heads] - torch.einsum("hkv,hk->hv", state, key)
                erased = torch.einsum("hkv,hk->hv", of_state, key)
                state = state + torch.einsum("hk,hv->hkv", key, by * write)
                of_state = of_state - torch.einsum("hk,hv->hkv", key, by * erased)
            slot = piece.slot + piece.number
            carried[slot, heads] = state
            if piece.number > 0:
                transposed[slot, heads] = of_state.mT
                if maps is not None:
                    maps[slot, heads] = of_state

    def compute_carry(self, x: Arguments) -> None:
        """After the walks of the mirror backward in time; of heads that are carried."""
        self.check_cut(x)
        backward = x.of.backward
        carried, maps = x.states(x.of.carried, x.carried), x.maps(x.of.maps)
        leads = self.leads_of(x, behind=backward)
        assert carried is not None and maps is not None and leads is not None
        borders_between = [pair for pair in itertools.pairwise(pieces_of(x)) if pair[1].number > 0]
        for first_piece, piece in reversed(borders_between) if backward else borders_between:
            heads = self.carried_heads(leads, first_piece if backward else piece)
            slot = piece.slot + piece.number - 1
            if not (piece.is_last if backward else piece.number == 1):
                before = slot + 1 if backward else slot - 1
                carried[slot, heads] += maps[slot + backward, heads].mT @ carried[before, heads]
