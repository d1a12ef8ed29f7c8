"""What the controller holds for units under a switch: one line for all of them, in the order of arrival.

One line, because units that are merged have one socket from then on, and an abort stands in it behind the work that it may be
about and before what came later: `abort_all` ends nothing that was sent after it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

WAITING_MAX = 1 << 14
"""Messages; more of them end the lease. SGLang itself puts no bound on what waits."""


class _Sent(NamedTuple):
    unit: int
    method: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


class Waiting:
    """The line. `keeper` gives what stands in for a unit's socket."""

    def __init__(self) -> None:
        self._line: list[_Sent] = []

    @property
    def full(self) -> bool:
        """Whether nothing more should be held."""
        return len(self._line) >= WAITING_MAX

    def keeper(self, unit: int) -> "Keeper":
        """Takes what is sent to the unit."""
        return Keeper(self, unit)

    def keep(self, unit: int, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """A call of a socket's method, for later."""
        self._line.append(_Sent(unit, method, arguments, keywords))

    def flush(self, sockets: Mapping[int, Any]) -> None:
        """Send what waits for these units into the socket that each has now, in order. What waits for others stays."""
        line, self._line = self._line, []
        for each in line:
            if (socket := sockets.get(each.unit)) is None:
                self._line.append(each)
            else:
                getattr(socket, each.method)(*each.arguments, **each.keywords)


class Keeper:
    """Has the two methods by which SGLang sends."""

    def __init__(self, waiting: Waiting, unit: int) -> None:
        self._waiting, self._unit = waiting, unit

    def send(self, *arguments: Any, **keywords: Any) -> None:
        """msgpack, with `SGLANG_USE_PICKLE_IPC=0`."""
        self._waiting.keep(self._unit, "send", arguments, keywords)

    def send_pyobj(self, *arguments: Any, **keywords: Any) -> None:
        """Pickled, by default."""
        self._waiting.keep(self._unit, "send_pyobj", arguments, keywords)
