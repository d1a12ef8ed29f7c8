"""A log told event by event, and short forms of the events that tests of folds tell most."""

from collections.abc import Callable
from uuid import UUID

from shared.contracts.envelope import Envelope, EventData, Stored
from shared.contracts.events import (
    CommittedWorker,
    EpochCommitted,
    NodeRegistered,
    PrefillCompleted,
    RankAdoptedEpoch,
    RequestAssigned,
    RequestCompleted,
    RequestReceived,
)
from shared.contracts.ids import NodeId, RequestId, Source, TenantId, WorkerId, worker_id
from shared.model.lattice import Composition, groups_of

START_NS = 1_800_000_000 * 10**9
BLOCK_TOKENS = 100


class Story:
    """Events at rising sequences; `fold` is given each as it is told. Time stands still until `wait`."""

    def __init__(self, fold: Callable[[Stored], None] = lambda stored: None) -> None:
        self.events: list[Stored] = []
        self.now_ns = START_NS
        self._fold = fold
        self._source_seq: dict[str, int] = {}

    def wait(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)

    def tell(self, *facts: EventData, source: str = "somebody-1-0000", correlation: str | None = None) -> int:
        """The sequence of the last of `facts`."""
        for fact in facts:
            number = self._source_seq[source] = self._source_seq.get(source, 0) + 1
            envelope = Envelope(
                id=UUID(int=len(self.events) + 1),
                type=fact.TYPE,
                version=fact.VERSION,
                pool="main",
                source=Source(source),
                source_seq=number,
                time_ns=self.now_ns,
                correlation=correlation,
                data=fact,
            )
            self.events.append(Stored("story", len(self.events) + 1, envelope))
            self._fold(self.events[-1])
        return len(self.events)


def registered(
    node: str = "n0", incarnation: int = 1, ranks: int = 8, epoch: int = 0, composition: Composition = ()
) -> NodeRegistered:
    return NodeRegistered(
        node=NodeId(node),
        incarnation=incarnation,
        engine="modelled",
        model="m",
        model_revision="1",
        tokenizer_revision="1",
        dtype="float32",
        kv_layout="cyclic",
        block_tokens=BLOCK_TOKENS,
        kv_bytes_per_token=1,
        prefill_ranks=ranks,
        decode_ranks=1,
        degrees=(1, 2, 4, 8),
        blocks_per_rank=1_000,
        prompt_tokens_max=100_000,
        coefficients_version="c",
        epoch=epoch,
        composition=composition,
    )


def committed(
    node: str = "n0", epoch: int = 1, composition: Composition = (4, 4), capacity_us: int = 1_000
) -> EpochCommitted:
    workers = tuple(
        CommittedWorker(
            worker=worker_id(NodeId(node), epoch, group.first_rank),
            first_rank=group.first_rank,
            degree=group.degree,
            capacity_us=capacity_us,
        )
        for group in groups_of(composition)
    )
    return EpochCommitted(node=NodeId(node), epoch=epoch, composition=composition, workers=workers)


def adopted(
    node: str = "n0", epoch: int = 1, ranks: int = 8, incarnation: int = 1, switch_us: int = 7
) -> list[RankAdoptedEpoch]:
    return [
        RankAdoptedEpoch(node=NodeId(node), incarnation=incarnation, rank=rank, epoch=epoch, switch_us=switch_us)
        for rank in range(ranks)
    ]


def serving(node: str = "n0", composition: Composition = (4, 4), capacity_us: int = 1_000) -> list[EventData]:
    """A node from its registration to its first epoch."""
    ranks = sum(composition)
    return [
        registered(node, ranks=ranks),
        *adopted(node, ranks=ranks),
        committed(node, 1, composition, capacity_us),
    ]


def received(request: str, prompt_tokens: int, slo_us: int = 0, block_ids: bytes = b"") -> RequestReceived:
    return RequestReceived(
        request=RequestId(request),
        tenant=TenantId("t"),
        model="m",
        prompt_tokens=prompt_tokens,
        max_tokens=1,
        slo_us=slo_us,
        stream=False,
        block_ids=block_ids,
        seen_seq=0,
    )


def assigned(
    request: str,
    worker: str,
    uncached_tokens: int,
    cached_tokens: int = 0,
    service_us: int = 0,
    degree: int = 1,
    preferred_degree: int = 1,
    attempt: int = 1,
) -> RequestAssigned:
    return RequestAssigned(
        request=RequestId(request),
        attempt=attempt,
        worker=WorkerId(worker),
        degree=degree,
        policy="paper",
        uncached_tokens=uncached_tokens,
        cached_tokens=cached_tokens,
        service_us=service_us,
        queue_us=0,
        beta=1.0,
        lam=0.0,
        preferred_degree=preferred_degree,
        candidates=(),
        price_digest="",
        parameters_version=0,
        coefficients_version="c",
        seen_seq=0,
        now_ns=0,
    )


def prefilled(
    request: str, worker: str, computed_tokens: int, cached_own_tokens: int = 0, cached_fetched_tokens: int = 0
) -> PrefillCompleted:
    return PrefillCompleted(
        request=RequestId(request),
        attempt=1,
        worker=WorkerId(worker),
        node_epoch=1,
        computed_tokens=computed_tokens,
        cached_own_tokens=cached_own_tokens,
        cached_fetched_tokens=cached_fetched_tokens,
        queue_us=0,
        prefill_us=1,
    )


def completed(request: str, worker: str, ttft_us: int) -> RequestCompleted:
    return RequestCompleted(
        request=RequestId(request),
        worker=WorkerId(worker),
        ttft_us=ttft_us,
        queue_us=0,
        prefill_us=ttft_us,
        handoff_us=0,
        tpot_us=0,
        output_tokens=1,
        cached_tokens=0,
        finish="stop",
    )
