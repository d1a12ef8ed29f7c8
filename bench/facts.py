"""Facts as a log would store them, for benches that fold without one."""

from itertools import count
from random import Random

from shared.contracts.envelope import Envelope, EventData, Stored
from shared.contracts.ids import Source
from shared.runtime.clock import Ids, SystemClock


class Facts:
    """One source's events, in order. `seq` gives the log's next sequence."""

    def __init__(self) -> None:
        self._ids, self.seq = Ids(SystemClock(), Random(1)), count(1)

    def stored(self, fact: EventData, time_ns: int) -> Stored:
        """The next event."""
        seq = next(self.seq)
        event = Envelope(
            id=self._ids.next(),
            type=fact.TYPE,
            version=fact.VERSION,
            pool="main",
            source=Source("bench-1-00000000"),
            source_seq=seq,
            time_ns=time_ns,
            data=fact,
        )
        return Stored("log", seq, event)
