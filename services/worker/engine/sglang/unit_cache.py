"""Which pages one unit of a server holds: its KV events, folded in order. Pure.

A unit is what publishes one stream of events: a whole server of fixed degree, or one rank of a server with our plug-in (each
of them publishes its own, also while it is part of a wider group).

1.  Messages are numbered. One that is expected is folded, an older one was folded before, and a newer one shows a *gap*, which
    the caller fills from the server's replay buffer. What cannot be filled makes the unit forget everything: a removal may
    be among what was lost, and a page that is believed to be there and is not costs more than one that is not known of.
2.  `AllBlocksCleared` empties the unit; the stores behind it say what there is. So a merge that keeps pages is a resync.
3.  A finished prefill proves that its pages are there, whether or not its events have come: `confirm` adds those that no event
    has removed since the request was sent.
"""

from collections.abc import Iterable, Sequence

from services.worker.engine.sglang.kv_messages import (
    DEVICE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Message,
)
from services.worker.engine.sglang.page_hashes import PageHash


class Watcher:
    """What has left a unit since a request was sent. `blind` if that may be more than is known."""

    def __init__(self) -> None:
        self.removed: set[PageHash] = set()
        self.blind = False


class UnitCache:
    """`gone` collects pages that were held and are not: whoever reads it empties it. `clears` counts `AllBlocksCleared`."""

    def __init__(self) -> None:
        self.next_sequence: int | None = None
        self.held: set[PageHash] = set()
        self.gone: set[PageHash] = set()
        self.clears = 0
        self.gaps = 0
        self._watchers: set[Watcher] = set()

    def missing(self, message: Message) -> int | None:
        """The sequence number from which on messages are lacking before this one, or None if there is no gap."""
        expected = 0 if self.next_sequence is None else self.next_sequence
        return expected if message.sequence > expected else None

    def fold(self, message: Message) -> None:
        """The next message. One that was folded before is passed over; one behind a gap that nobody could fill makes the unit
        forget what it had."""
        if self.next_sequence is not None and message.sequence < self.next_sequence:
            return
        if self.missing(message) is not None and self.next_sequence is not None:
            self.forget()
        self.next_sequence = message.sequence + 1
        for event in message.events:
            self._apply(event)

    def forget(self) -> None:
        """Nothing is known any more of what the unit holds."""
        self.gaps += 1
        self._remove(list(self.held))
        for watcher in self._watchers:
            watcher.blind = True

    def _apply(self, event: Event) -> None:
        match event:
            case BlockStored() if event.medium in DEVICE:
                self.held.update(event.block_hashes)
            case BlockRemoved() if event.medium in DEVICE:
                self._remove(event.block_hashes)
            case AllBlocksCleared():
                self.clears += 1
                self._remove(list(self.held))
            case _:
                pass

    def _remove(self, pages: Sequence[PageHash]) -> None:
        self.held.difference_update(pages)
        self.gone.update(pages)
        for watcher in self._watchers:
            watcher.removed.update(pages)

    # --- what a prefill proves

    def watch(self) -> Watcher:
        """From now on, until `confirm` or `unwatch`."""
        watcher = Watcher()
        self._watchers.add(watcher)
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        """The request proved nothing."""
        self._watchers.discard(watcher)

    def confirm(self, watcher: Watcher, pages: Iterable[PageHash]) -> None:
        """A request that was sent when `watcher` began has computed or reused `pages`, and they are in the cache but for those
        that were removed meanwhile. It proves nothing if removals of that time were lost."""
        self._watchers.discard(watcher)
        if not watcher.blind:
            self.held.update(page for page in pages if page not in watcher.removed)
