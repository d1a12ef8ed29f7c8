"""Whether a server lives, from what is seen of it. Pure: times are arguments, in nanoseconds of the monotonic clock.

its processes are gone        at once: what a rank held is lost, and SGLang ends the whole server
the port is closed            `REFUSED_MAX` probes in a row: a restart closes it for seconds, a full backlog does not
nobody answers                `UNANSWERED_MAX` probes in a row
another life answers          at once: everything that was known of its cache is void
a scheduler is silent         their load messages come each second, between two batches; none for as long as a step of busy
                              ranks may take means that it hangs.  Where a server publishes none, the agent's own limit on
                              a step finds the same, if a step runs
"""

from dataclasses import dataclass, field
from typing import Literal

REFUSED_MAX = 2
UNANSWERED_MAX = 5
PROBE_S = 1.0
PROBE_LIMIT_S = 2.0

Failure = Literal["refused", "unanswered"]


@dataclass(slots=True)
class Vitals:
    """One server. `silence_ns` is how long one of its schedulers may say nothing; `boot` is what tells its lives apart."""

    name: str
    boot: str
    silence_ns: int
    heard_ns: dict[int, int] = field(default_factory=dict)
    _compared: bool = False
    _failures: int = 0
    _refused: int = 0
    _dead: str | None = None

    def answered(self, boot: str | None = None) -> None:
        """A probe came back, and said whose life it is if it was asked."""
        self._failures = self._refused = 0
        if boot is not None:
            self._compared = True
            if boot != self.boot:
                self._die(f"{self.name} was restarted")

    @property
    def doubtful(self) -> bool:
        """Whether the next answer may be another life's: a probe has failed since one was answered, or the server was joined
        and may have been restarted while others were."""
        return self._failures > 0 or not self._compared

    def failed(self, failure: Failure, detail: str) -> None:
        """A probe did not come back."""
        self._failures += 1
        self._refused = self._refused + 1 if failure == "refused" else 0
        if self._refused >= REFUSED_MAX or self._failures >= UNANSWERED_MAX:
            self._die(f"{self.name} does not answer: {detail}")

    def heard(self, rank: int, now_ns: int) -> None:
        """The scheduler of this rank published its load."""
        self.heard_ns[rank] = now_ns

    def lost_processes(self, pids: list[int]) -> None:
        """Some of its processes are gone."""
        self._die(f"{self.name} has lost its processes {pids}")

    def restarted(self) -> None:
        """Its events began to be numbered anew."""
        self._die(f"{self.name} was restarted")

    def verdict(self, now_ns: int) -> str | None:
        """Why it is given up, or None. Once given up is given up."""
        for rank, heard_ns in self.heard_ns.items():
            if now_ns - heard_ns > self.silence_ns:
                self._die(
                    f"{self.name}: the scheduler of rank {rank} has not run for {(now_ns - heard_ns) / 1e9:.0f} s"
                )
        return self._dead

    def _die(self, reason: str) -> None:
        self._dead = self._dead or reason
