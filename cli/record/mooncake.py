"""Recorded arrivals as a trace in Mooncake's format: lengths, instants and what prompts share, and nothing else of them."""

from collections.abc import Iterator
from contextlib import aclosing
from hashlib import blake2b
from typing import BinaryIO, NamedTuple

from services.ledger.arrivals import Arrived, Range, arrivals, block_sizes
from shared.contracts.ids import BLOCK_ID_BYTES
from simulation.workloads.rows import Row, write


class NoTrace(ValueError):
    """The arrivals are no trace. The message says why."""


class Traced(NamedTuple):
    """What was written."""

    requests: int
    block_tokens: int


async def export_trace(database_url: str, asked: Range, salt: bytes, file: BinaryIO) -> Traced:
    """Write the arrivals of a range, one line each. `salt` makes the hash ids of this file its own.

    Errors: NoTrace; those of `database.connect`.
    """
    sizes = await block_sizes(database_url)
    if len(sizes) != 1:
        raise NoTrace(f"block_tokens: the record's nodes name {len(sizes)} sizes {sorted(sizes)}; a trace has one")
    [block_tokens] = sizes
    tracing, requests = Tracing(block_tokens, salt), 0
    async with aclosing(arrivals(database_url, asked)) as found:
        async for arrived in found:
            requests += write([tracing.row(arrived)], file)
    if not requests:
        raise NoTrace("no request arrived in that range")
    return Traced(requests, block_tokens)


class Tracing:
    """Makes rows of arrivals, which come in the order of their times.

    A hash id stands for a block and all before it, as a block id does. It is a hash of it under `salt`: the file cannot be
    joined with the record or another file, and nothing of the blocks has to be remembered. A last block that is not whole
    has no id in the record; it gets one of its own, as no worker would have it cached.
    """

    def __init__(self, block_tokens: int, salt: bytes) -> None:
        self._block_tokens = block_tokens
        self._salt = salt
        self._first_ns: int | None = None

    def row(self, arrived: Arrived) -> Row:
        """Asks for as many tokens as the recorded request got, or might have got if it did not complete.

        Errors: NoTrace if its chain does not have one block to each `block_tokens`.
        """
        data = arrived.data
        blocks = data.prompt_tokens // self._block_tokens
        if data.known_blocks or len(data.block_ids) != blocks * BLOCK_ID_BYTES:
            raise NoTrace(
                f"request {data.request}: {len(data.block_ids) // BLOCK_ID_BYTES} block ids for {data.prompt_tokens} tokens; "
                f"must be {blocks}, one per {self._block_tokens} tokens: choose a range in which the size was the same"
            )
        self._first_ns = arrived.time_ns if self._first_ns is None else self._first_ns
        return Row(
            (arrived.time_ns - self._first_ns) / 1e6,
            data.prompt_tokens,
            data.max_tokens if arrived.output_tokens is None else arrived.output_tokens,
            tuple(self._hash_ids(data.block_ids, data.request, partial=bool(data.prompt_tokens % self._block_tokens))),
            self._block_tokens,
        )

    def _hash_ids(self, packed: bytes, request: str, *, partial: bool) -> Iterator[int]:
        for begin in range(0, len(packed), BLOCK_ID_BYTES):
            yield self._hash_id(packed[begin : begin + BLOCK_ID_BYTES])
        if partial:
            yield self._hash_id(request.encode())

    def _hash_id(self, name: bytes) -> int:
        """63 bits, as the format's readers take no more."""
        return int.from_bytes(blake2b(name, key=self._salt, digest_size=8).digest()) >> 1
