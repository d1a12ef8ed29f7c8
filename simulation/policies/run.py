"""One simulation from beginning to end: a pool is set up, requests arrive, and it goes on until the last one has ended."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from random import Random

from services.worker.engine.kv_pool import KvPool
from shared.contracts.envelope import Stored
from shared.contracts.events import EpochCommitted
from simulation.policies.agenda import NS_PER_S, Agenda
from simulation.policies.control import Control
from simulation.policies.journal import Journal
from simulation.policies.node import Node
from simulation.policies.outcome import Outcome, Rows, outcome
from simulation.policies.routers import Asked, Routers
from simulation.policies.setup import Setup


class Simulation:
    """`run` once. Everything is a function of the setup, its seed included, and of the requests. `listener` is told every
    event from the first on."""

    def __init__(self, setup: Setup, listener: Callable[[Stored], None] | None = None) -> None:
        self.setup = setup
        self.agenda = Agenda()
        self.journal = Journal(self.agenda)
        if listener is not None:
            self.journal.listen(listener)
        pools = {
            node: KvPool(sum(composition), setup.blocks_per_rank, setup.block_tokens)
            for node, composition in setup.nodes.items()
        }
        self.nodes = {
            node: Node(node, pools, setup, self.agenda, self.journal, Random(f"{setup.seed} {node}")) for node in pools
        }
        self.control = Control(setup, self.agenda, self.journal, self.nodes)
        self.rows = Rows()
        self.routers = Routers(setup, self.agenda, self.journal, self.nodes, self.rows.add)
        self.commits = 0
        self.journal.listen(self._count)
        self._arriving = False

    def run(self, requests: Iterable[Asked], warmup_s: float = 0.0) -> Outcome:
        """Begin, and let `requests` arrive, in order of time.

        Errors: ValueError for one that is before its predecessor, or if none of them counts.
        """
        self.control.start()
        self.routers.register()
        first_commits, self._arriving = self.commits, True
        self._await_next(iter(requests), 0)
        with _without_collections():
            while self._arriving or self.routers.open_requests:
                self.agenda.step()
        virtual_s = self.agenda.now_ns / NS_PER_S
        busy_gpu_s = sum(node.steps.busy_gpu_us for node in self.nodes.values()) / 1e6
        return outcome(
            self.rows,
            busy_gpu_s,
            self.setup.gpus,
            warmup_s,
            self.commits - first_commits,
            virtual_s,
            self.journal.events,
        )

    def check(self) -> None:
        """When nothing is open nothing is reserved, and every structure keeps its own rules."""
        for router in self.routers.routers:
            state = router.view.settle()
            state.loads.check()
            state.holders.check()
            state.board.check(state.pool, state.loads, state.calibration)
            state.usage.check(state.loads)
            if not self.routers.open_requests:
                assert not state.loads.of_worker, "a reservation has outlived its request"
        for node in self.nodes.values():
            node.check()

    def _await_next(self, requests: Iterator[Asked], earliest_ns: int) -> None:
        asked = next(requests, None)
        if asked is None:
            self._arriving = False
            return
        if asked.at_ns < earliest_ns:
            raise ValueError(f"requests: one at {asked.at_ns} ns is before the one ahead of it, at {earliest_ns} ns")

        def arrive() -> None:
            self.routers.arrive(asked)
            self._await_next(requests, asked.at_ns)

        self.agenda.at(asked.at_ns, arrive)

    def _count(self, stored: Stored) -> None:
        self.commits += isinstance(stored.data, EpochCommitted)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Nothing in a run makes a cycle of references, and looking for some among a million blocks takes a quarter of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def simulate(setup: Setup, requests: Iterable[Asked], warmup_s: float = 0.0) -> Outcome:
    """The figures of one run."""
    return Simulation(setup).run(requests, warmup_s)
