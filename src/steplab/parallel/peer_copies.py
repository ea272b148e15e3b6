"""Buckets of gradients that travel by copies into other ranks' memory, without collectives.

A bucket travels in chunks, and each rank owns a part of every chunk (sizes.py). Copies and means are each on a *line*,
a CUDA stream of their own (peer_memory.py). A chunk takes three steps:

1. *out*, on the line of copies: each rank copies gradients to the parts' owners, and signals them.
2. on the line of means: after all signals, the owner writes the mean into its part.
3. *home*, on the line of copies: the owner copies its part to all ranks, and signals them. If parameters have owners,
   means stay.

One line has all copies, because one copy engine sends to all peers over an NVSwitch. The order out(1), out(2), home(1),
out(3), home(2), ... sends one chunk while the means of another are computed. In turn s rank r copies to rank r + s,
once the next rank has ended the turn before; else two ranks would share a link. If parameters have owners, parts are
too uneven for turns.

For B bytes each of n ranks sends 2 (n-1)/n B, as in a ring, or half if parameters have owners. One rank makes each
mean, so all have the same bits.

No memory is overwritten while it is read. A peer writes its part of my bucket only after my gradients of that part have
arrived, thus after the optimizer that read the last averages. A bucket counts as home only after my own signal too: it
follows my copies, so they no longer read the bucket.
"""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from .buckets import Owners, dense, layout_of, views_of
from .peer_memory import PeerMemory, Piece
from .sizes import NUM_COUNTERS, Division, Places, divided, largest_part_bytes, placed

COPIES, MEANS = range(2)
Copies = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Copies to one peer: target addresses, source addresses and sizes in bytes."""


def peer_buckets(
    groups: Sequence[Sequence[nn.Parameter]], memory: PeerMemory, owners: Owners | None = None
) -> list["PeerBucket"]:
    """Create one module's buckets; a collective call. They share `memory`, which is freed with the last bucket."""
    divisions = [
        divided([p.nbytes for p in group], memory.size, None if owners is None else [owners[p] for p in group])
        for group in groups
    ]
    places = placed(divisions, memory.size)
    copies = PeerCopies(memory, places, go_home=owners is None)
    starts = zip(*(of_rank[:-1] for of_rank in places.starts), strict=True)
    return [PeerBucket(copies, *of_bucket) for of_bucket in zip(groups, divisions, starts, strict=True)]


class PeerCopies:
    """Memory and counters that one module's buckets share. It holds no reference to finished buckets, so dropping them
    frees it at once.
    """

    def __init__(self, memory: PeerMemory, places: Places, *, go_home: bool) -> None:
        self.memory = memory
        self.peers = [(memory.rank + step) % memory.size for step in range(1, memory.size)]
        self.go_home = go_home
        self.num_launched = 0
        self._num_awaited = 0
        self._num_turns = 0
        self.under_way: deque[PeerBucket] = deque()
        self._unreturned: Chunk | None = None
        self.ring_bytes = places.ring_bytes
        self._rings_start, self._cursor = places.rings_start, 0
        self.own, self.bases = memory.allocate(places.num_bytes, NUM_COUNTERS * memory.size)
        everyone = range(memory.size)
        self._gradients_told = tuple(map(_gradients_told_by, self.peers))
        self._means_told = tuple(map(_means_told_by, everyone))
        self._tell_of_gradients = tuple((peer, _gradients_told_by(memory.rank)) for peer in self.peers)
        self._tell_of_means = tuple((rank, _means_told_by(memory.rank)) for rank in everyone)
        # No rank signals gradients to itself, so its own counter of them counts the next rank's turns.
        previous = (memory.rank - 1) % memory.size
        self._turns_told, self._tell_of_turns = (
            (_gradients_told_by(memory.rank),),
            ((previous, _gradients_told_by(previous)),),
        )

    def landing(self, on_rank: int, of_rank: int) -> int:
        """Address, on rank `on_rank`, of the ring buffer that receives rank `of_rank`'s gradients."""
        ring = (of_rank - on_rank - 1) % self.memory.size
        return self.bases[on_rank] + self._rings_start + ring * self.ring_bytes

    def make_room(self, num_bytes: int) -> int:
        """Reserve `num_bytes` in every ring buffer and return the offset, equal on all ranks. Waits for buckets that
        still use these bytes.
        """
        if self._cursor + num_bytes > self.ring_bytes:
            self._cursor = 0
        start, self._cursor = self._cursor, self._cursor + num_bytes
        home: list[PeerBucket] = []
        while self._are_met(start, self._cursor):
            home.append(self.under_way.popleft())
        if home:
            latest = max(bucket.number for bucket in home)
            if latest == self.num_launched:
                self.return_last()
            self.memory.current_awaits(self._means_told, latest)  # counters only grow: all of them are home then
        for bucket in home:
            bucket.drop()
        return start

    def _are_met(self, start: int, end: int) -> bool:
        return any(first < end and start < last for first, last in (bucket.landing for bucket in self.under_way))

    def start(self, chunk: "Chunk", addresses: Sequence[int], room: int) -> None:
        """Send a chunk's gradients to owners, start averaging, and send the previous chunk's averages home."""
        memory, before = self.memory, self._unreturned
        returned = self.num_launched
        self.num_launched += 1
        self.copy(chunk.outward(addresses, room))
        memory.signal(COPIES, self._tell_of_gradients, self.num_launched)
        if before is not None:
            memory.follow_line(COPIES, MEANS)
        # After the copies, so that a counter is polled while the ranks are apart, and not from the launch on: a whole
        # step's launches may come before its forward pass.
        memory.follow_line(MEANS, COPIES)
        memory.await_signals(MEANS, self._gradients_told, self.num_launched)
        pieces = chunk.pieces(addresses)
        if pieces:
            memory.mean(MEANS, pieces, chunk.mine, chunk.landed + room, self.ring_bytes, chunk.dtype)
        if before is not None:
            self._send_home(before, returned)
        if self.go_home:
            self._unreturned = chunk
        else:
            memory.signal(MEANS, self._tell_of_means, self.num_launched)

    def _send_home(self, chunk: "Chunk", number: int) -> None:
        self.copy(chunk.home)
        self.memory.signal(COPIES, self._tell_of_means, number)

    def return_last(self) -> None:
        if self._unreturned is not None:
            self.memory.follow_line(COPIES, MEANS)
            self._send_home(self._unreturned, self.num_launched)
            self._unreturned = None

    def copy(self, copies: Sequence[Copies]) -> None:
        """Start copies to each peer. Copies to several peers go in turns: a rank waits until the next rank has ended
        the previous turn.
        """
        if not self.go_home or len(self.peers) == 1:
            targets, sources, sizes = (list(chain.from_iterable(part)) for part in zip(*copies, strict=True))
            if targets:
                self.memory.copy(COPIES, targets, sources, sizes)
            return
        for in_turn in copies:
            if self._num_turns:
                self.memory.await_signals(COPIES, self._turns_told, self._num_turns)
            if in_turn[0]:
                self.memory.copy(COPIES, *in_turn)
            self._num_turns += 1
            self.memory.signal(COPIES, self._tell_of_turns, self._num_turns)

    def await_launch(self, number: int) -> None:
        """Let the current stream wait until chunks up to this number are averaged on this rank."""
        self.return_last()
        if self._num_awaited < number:
            self.memory.current_awaits(self._means_told, number)
            self._num_awaited = number


class Chunk:
    """Addresses and sizes of a chunk that are equal in all launches."""

    def __init__(
        self,
        copies: PeerCopies,
        division: Division,
        number: int,
        starts: Sequence[int],
        landing: int,
        dtype: torch.dtype,
    ) -> None:
        """`landing`: offset of the chunk within the bucket's landing area."""
        rank, borders = copies.memory.rank, division.chunks[number]
        overlaps = [division.overlaps(number, peer) for peer in copies.peers]
        self._sent = [
            [
                (copies.landing(peer, rank) + landing + found.in_part, found.gradient, found.in_gradient)
                for found in those
            ]
            for peer, those in zip(copies.peers, overlaps, strict=True)
        ]
        self._sizes = [[found.num_bytes for found in those] for those in overlaps]
        self._kept = division.overlaps(number, rank)
        self.dtype = dtype
        self.landed = copies.landing(rank, copies.peers[0]) + landing
        begin = borders[rank] if division.owners is None else 0
        parts = [base + start + begin for base, start in zip(copies.bases, starts, strict=True)]
        self.mine = parts[rank]
        size = borders[rank + 1] - borders[rank]
        self.home: list[Copies] = [
            ([parts[peer]], [self.mine], [size]) if self._kept else ([], [], []) for peer in copies.peers
        ]

    def outward(self, addresses: Sequence[int], room: int) -> list[Copies]:
        found: list[Copies] = []
        for sent, sizes in zip(self._sent, self._sizes, strict=True):
            targets = [landing + room for landing, _, _ in sent]
            found.append((targets, [addresses[index] + skipped for _, index, skipped in sent], sizes))
        return found

    def pieces(self, addresses: Sequence[int]) -> list[Piece]:
        return [Piece(addresses[index] + skipped, place, size) for index, skipped, place, size in self._kept]


class PeerBucket:
    def __init__(
        self, copies: PeerCopies, parameters: Sequence[nn.Parameter], division: Division, starts: Sequence[int]
    ) -> None:
        """`starts`: for each rank, offset of the bucket in its shared memory."""
        self._copies = copies
        self._parameters = tuple(parameters)
        self._strides = [layout_of(parameter) for parameter in self._parameters]
        self._landing_bytes = division.landing_bytes
        rank = copies.memory.rank
        self._averages = self._places(division, copies.own[starts[rank] :][: division.kept_bytes(rank)])
        landings = [0, *accumulate(map(largest_part_bytes, division.chunks))]
        self._chunks = [
            Chunk(copies, division, number, starts, landing, parameters[0].dtype)
            for number, landing in enumerate(landings[:-1])
        ]
        self._sources: list[Tensor] = []
        self.number = 0
        """Number of the last chunk in the latest launch, from 1; 0 before any."""
        self.landing = (0, 0)

    def _places(self, division: Division, kept: Tensor) -> list[Tensor | None]:
        numbers = kept.view(self._parameters[0].dtype)
        if division.owners is None:
            return list(views_of(numbers, self._parameters))
        mine = [index for index in division.order if division.owners[index] == self._copies.memory.rank]
        found: list[Tensor | None] = [None] * len(self._parameters)
        for index, view in zip(mine, views_of(numbers, [self._parameters[index] for index in mine]), strict=True):
            found[index] = view
        return found

    @property
    def shared_bytes(self) -> int:
        return self._copies.own.untyped_storage().nbytes()  # buckets and rings, and counters if they are there too

    def launch(self, gradients: Sequence[Tensor | None]) -> None:
        copies = self._copies
        room = copies.make_room(self._landing_bytes)
        self.landing = room, room + self._landing_bytes
        given = zip(gradients, self._averages, self._parameters, self._strides, strict=True)
        self._sources = [
            average.zero_() if g is None and average is not None else dense(g, parameter, strides)
            for g, average, parameter, strides in given
        ]
        addresses = [source.data_ptr() for source in self._sources]
        copies.memory.follow_current(COPIES)
        for chunk in self._chunks:
            copies.start(chunk, addresses, room)
        if len(copies.peers) == 1:
            copies.return_last()
        self.number = copies.num_launched
        copies.under_way.append(self)

    def wait(self) -> Sequence[Tensor | None]:
        if self.number:
            self._copies.await_launch(self.number)
        return self._averages

    def release(self) -> None:
        while self in self._copies.under_way:
            self._copies.under_way.remove(self)
        self.drop()

    def drop(self) -> None:
        self._sources = []


def _gradients_told_by(rank: int) -> int:
    """Counter of `rank`'s chunks that arrived here; the own rank's counts turns."""
    return 2 * rank


def _means_told_by(rank: int) -> int:
    """Counter of chunks whose averages `rank` has delivered here."""
    return 2 * rank + 1


BLOCK = 4096
PIECES = 8
UNIT_BYTES = 16
"""Alignment of pieces and unit of their offsets in bytes, so that the compiler knows the alignment."""
_WIDE = (1 << 40) + 3


class Means:
    def __init__(self, device: torch.device, num_others: int) -> None:
        self._device, self._num_others = device, num_others
        self._compiled: dict[Any, Any] = {}

    def start(
        self, stream: int, pieces: Sequence[Piece], target: int, others: int, distance_bytes: int, dtype: torch.dtype
    ) -> None:
        places = target, others, distance_bytes, *[piece.own for piece in pieces]
        kind = dtype, not any(place % UNIT_BYTES for place in places)
        compiled = self._compiled.get(kind) or self._compile(*kind)
        distance = distance_bytes // dtype.itemsize
        for begin in range(0, len(pieces), PIECES):
            arguments, programs = mean_arguments(pieces[begin : begin + PIECES], dtype)
            compiled[(programs, 1, 1)](target, others, distance, *arguments, self._num_others, BLOCK, stream=stream)

    def _compile(self, dtype: torch.dtype, aligned: bool) -> Any:
        # Triton's own launch decides what to compile for: places and sizes of 64 bits, and numbers that are multiples
        # of nothing. With negative counts the kernel does no work.
        numbers = torch.zeros(32, dtype=dtype, device=self._device)[0 if aligned else 1 :]
        arguments = (numbers,) * PIECES, (_WIDE,) * PIECES, (-_WIDE,) * PIECES
        compiled = mean_kernel[(1,)](
            numbers, numbers, 1 << 40, *arguments, OTHERS=self._num_others, BLOCK=BLOCK, enable_fp_fusion=True
        )
        self._compiled[dtype, aligned] = compiled
        return compiled


def mean_arguments(pieces: Sequence[Piece], dtype: torch.dtype) -> tuple[tuple[tuple[int, ...], ...], int]:
    missing = [0] * (PIECES - len(pieces))
    owns = (*[piece.own for piece in pieces], *missing)
    starts = (*[piece.start_bytes // UNIT_BYTES for piece in pieces], *missing)
    counts = (*[piece.num_bytes // dtype.itemsize for piece in pieces], *missing)
    return (owns, starts, counts), sum(-(-count // BLOCK) for count in counts)


@triton.jit(do_not_specialize=["distance", "starts", "counts"])
def mean_kernel(target_ptr, others_ptr, distance, own_ptrs, starts, counts, OTHERS: tl.constexpr, BLOCK: tl.constexpr):
    """target = (own + each of OTHERS rows, `distance` numbers apart) / (OTHERS + 1), summed in float32 at least. Starts
    are in units of 16 bytes; a program makes a block of one piece. Places are in 64 bits: a piece may have more than
    2^31 numbers, and one slightly smaller would exceed them when rounded up."""
    block, own_ptr = tl.program_id(0).to(tl.int64), own_ptrs[0]
    start, count = starts[0].to(tl.int64), counts[0].to(tl.int64)
    blocks = tl.cdiv(count, BLOCK)
    for i in tl.static_range(1, len(own_ptrs)):
        further = block >= blocks
        block -= tl.where(further, blocks, 0)
        own_ptr, start, count = (
            tl.where(further, own_ptrs[i], own_ptr),
            tl.where(further, starts[i], start),
            tl.where(further, counts[i], count),
        )
        blocks = tl.cdiv(count, BLOCK)
    first = block * BLOCK
    unit: tl.constexpr = 16 // (target_ptr.dtype.element_ty.primitive_bitwidth // 8)
    skipped = start * unit + first
    if first + BLOCK <= count:
        _mean(target_ptr + skipped, own_ptr + first, others_ptr + skipped, distance, BLOCK, OTHERS, BLOCK)
    else:
        _mean(target_ptr + skipped, own_ptr + first, others_ptr + skipped, distance, count - first, OTHERS, BLOCK)


@triton.jit
def _mean(target_ptr, own_ptr, others_ptr, distance, count, OTHERS: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    inside = places < count
    total = tl.load(own_ptr + places, mask=inside, other=0.0)
    if total.dtype != tl.float64:
        total = total.to(tl.float32)
    for row in tl.static_range(OTHERS):
        total += tl.load(others_ptr + row * distance.to(tl.int64) + places, mask=inside, other=0.0).to(total.dtype)
    tl.store(target_ptr + places, (total / (OTHERS + 1)).to(target_ptr.dtype.element_ty), mask=inside)
