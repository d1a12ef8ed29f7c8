"""A pool of any size as the log would describe it, for measuring a router's decisions without servers."""

import random

import numpy as np

from bench.facts import Facts
from services.router import decider
from services.router.decider import Arrival, Moment, State
from shared.contracts.envelope import EventData
from shared.contracts.events import (
    BlockRun,
    BlocksStored,
    CommittedWorker,
    EpochCommitted,
    NodeRegistered,
    ParametersChanged,
)
from shared.contracts.ids import BlockId, NodeId, RequestId, TenantId, WorkerId, worker_id
from shared.model.blocks import Tokens, block_chain
from shared.model.cost import load_coefficients
from shared.model.lattice import groups_of

COEFFICIENTS = "qwen3_30b_a3b_h20"
COMPOSITION = (1, 1, 2, 4)
"""Of every node, so that its eight ranks are four workers."""

PROMPT_TOKENS = 65_536
KEY = b"k" * 32


def prompt(chance: random.Random, tokens: int = PROMPT_TOKENS) -> Tokens:
    """Token ids of no meaning."""
    return np.frombuffer(chance.randbytes(4 * tokens), dtype=np.uint32) % 50_000


def chain_of(tokens: Tokens, block_tokens: int) -> tuple[BlockId, ...]:
    return tuple(block_chain(tokens, block_tokens, KEY))


class BenchPool:
    """A router's folded state of `workers` workers; `load` lets requests wait at them."""

    def __init__(self, workers: int, block_tokens: int, policy: str) -> None:
        self.block_tokens = block_tokens
        self.state: State = decider.initial(load_coefficients(COEFFICIENTS))
        self.workers: list[WorkerId] = []
        self._facts = Facts()
        self._numbers: dict[WorkerId, int] = {}
        self.now_ns = 1_800_000_000 * 10**9
        self.tell(ParametersChanged(parameters_version=1, changes={"placement_policy": policy}, asked_by="bench"))
        for index in range(workers // len(COMPOSITION)):
            self._node(NodeId(f"n{index:04}"))

    def tell(self, *facts: EventData) -> None:
        """Fold facts, in order."""
        for fact in facts:
            decider.evolve(self.state, self._facts.stored(fact, self.now_ns))

    def hold(self, worker: WorkerId, chain: tuple[BlockId, ...]) -> None:
        """The worker stores these blocks."""
        number = self._numbers[worker] = self._numbers.get(worker, 0) + 1
        run = BlockRun(parent=None, block_ids=b"".join(chain))
        self.tell(
            BlocksStored(
                worker=worker, incarnation=1, number=number, cause="replication", blocks=len(chain), runs=(run,)
            )
        )

    def arrival(self, name: str, chain: tuple[BlockId, ...], tokens: int = PROMPT_TOKENS) -> Arrival:
        return Arrival(RequestId(name), TenantId("bench"), "m", tokens, 64, 10**9, True, chain)

    def decide(self, arrival: Arrival) -> list[EventData]:
        """The whole decision."""
        return decider.receive(self.state, arrival, Moment(self.now_ns, next(self._facts.seq)))

    def load(self, chance: random.Random, requests: int) -> None:
        """So many requests are placed, and wait."""
        for index in range(requests):
            tokens = prompt(chance, chance.randrange(500, 20_000))
            chain = chain_of(tokens, self.block_tokens)
            self.tell(*self.decide(self.arrival(f"load-{index}", chain, len(tokens))))

    def _node(self, node: NodeId) -> None:
        ranks = sum(COMPOSITION)
        self.tell(
            NodeRegistered(
                node=node,
                incarnation=1,
                engine="modelled",
                model="m",
                model_revision="r",
                tokenizer_revision="r",
                dtype="bf16",
                kv_layout="cyclic",
                block_tokens=self.block_tokens,
                kv_bytes_per_token=100_000,
                prefill_ranks=ranks,
                decode_ranks=1,
                degrees=(1, 2, 4, 8),
                blocks_per_rank=10**7 // self.block_tokens,
                prompt_tokens_max=1_048_576,
                coefficients_version=COEFFICIENTS,
                epoch=1,
                composition=COMPOSITION,
                fetches=True,
            )
        )
        committed = tuple(
            CommittedWorker(
                worker=worker_id(node, 1, group.first_rank),
                degree=group.degree,
                first_rank=group.first_rank,
                capacity_us=1,
            )
            for group in groups_of(COMPOSITION)
        )
        self.tell(EpochCommitted(node=node, epoch=1, composition=COMPOSITION, workers=committed))
        self.workers += [each.worker for each in committed]
