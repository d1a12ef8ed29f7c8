"""Router processes that were declared lost: what one of them still writes opens no request and ends none.

One that was stopped for seconds learns of it only when it runs again, and may have received requests in between.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

LOST_ROUTERS_MAX = 1_000
"""What a lost one could still write arrives within seconds of its loss."""


class LostRouters:
    """Their sources, in the order they were lost, at most `LOST_ROUTERS_MAX` of them."""

    __slots__ = ("_sources",)

    def __init__(self, sources: Iterable[str] = ()) -> None:
        self._sources: OrderedDict[str, None] = OrderedDict()
        for source in sources:
            self.add(source)

    def __contains__(self, source: object) -> bool:
        return source in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LostRouters) and self._sources == other._sources

    __hash__ = None  # type: ignore[assignment]

    def add(self, source: str) -> None:
        """One more; the one lost longest ago is forgotten."""
        self._sources[source] = None
        if len(self._sources) > LOST_ROUTERS_MAX:
            self._sources.popitem(last=False)
