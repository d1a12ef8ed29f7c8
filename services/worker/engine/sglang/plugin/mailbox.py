"""Which messages of its own socket a unit reads, drops, or leaves for later, so that it handles each control message once.

SGLang's controller sends every control message to every unit, in one order. A leader reads its socket and tells its
group; what lies in a follower's socket are copies of that. Commits are the only messages after which a unit's part may
change, so they are the marks by which the sockets are kept level:

1. A leader stops reading behind a commit until it has been handled: what follows is read in the new geometry, by
whoever leads.
2. A follower drops its copies, but none behind a commit that it has not handled: those may be its own to read.
3. Who has become leader drops copies up to and including the commit that made it one, which may still be on the way.
"""


class Mailbox:
    """Counts commits: those taken out of the socket, and those handled."""

    def __init__(self) -> None:
        self._taken = 0
        self._handled = 0

    def took_commit(self) -> None:
        """A commit was read or dropped."""
        self._taken += 1

    def handled_commit(self) -> None:
        """A commit was carried out or refused, whoever read it."""
        self._handled += 1

    def may_drop(self, leads: bool) -> bool:
        """Whether the next message is a copy of one that this unit gets, or got, from its leader."""
        return self.behind if leads else self._taken <= self._handled

    @property
    def behind(self) -> bool:
        """Copies of messages that were handled already are still to be dropped."""
        return self._taken < self._handled

    @property
    def must_stop(self) -> bool:
        """A commit was taken that is not handled yet."""
        return self._taken > self._handled
