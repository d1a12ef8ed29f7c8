"""What a placement rule of another system is asked and told. Pure: nothing of ours but ids."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from shared.contracts.ids import BlockId, RequestId, WorkerId


class Prompt(NamedTuple):
    """What is to be placed. `chain` names the prompt's whole blocks of `block_tokens` tokens, first block first."""

    tokens: int
    chain: Sequence[BlockId]
    block_tokens: int
    now_ns: int


class WorkerView(NamedTuple):
    """One worker that may take the prompt, as an observer with an exact index and no delay sees it.

    What is outstanding was placed here and has not had its first token. `cached_blocks` is the longest prefix of the prompt
    that the worker holds, `uncached_tokens` what the outstanding requests have to compute, and `running_blocks` the KV that
    belongs to running ones; the rest of `capacity_blocks` is free or can be evicted.
    """

    worker: WorkerId
    degree: int
    cached_blocks: int
    queued_requests: int
    running_requests: int
    uncached_tokens: int
    running_blocks: int
    capacity_blocks: int

    @property
    def outstanding_requests(self) -> int:
        return self.queued_requests + self.running_requests


class Rule(Protocol):
    """Somebody else's placement. Where one leaves something to chance, it is given a `random.Random` when it is made."""

    name: str
    """As it stands in `request-assigned.policy`."""

    def choose(self, prompt: Prompt, workers: Sequence[WorkerView]) -> WorkerId | None:
        """Which of `workers` (at least one, in a stable order) gets the prompt. None: it waits at the router, in order of
        arrival, and the rule is asked again when something changes. Choosing changes nothing but a turn or a draw."""
        ...

    def placed(self, request: RequestId, prompt: Prompt, worker: WorkerId) -> None:
        """A choice, perhaps of another router, was carried out."""
        ...

    def ended(self, request: RequestId, worker: WorkerId) -> None:
        """What was placed there is outstanding no longer: it has its first token, or failed, or goes elsewhere."""
        ...


class Forgetful:
    """A rule that needs no state of its own: everything is in the views."""

    def placed(self, request: RequestId, prompt: Prompt, worker: WorkerId) -> None:
        """Nothing to remember."""

    def ended(self, request: RequestId, worker: WorkerId) -> None:
        """Nothing to forget."""
