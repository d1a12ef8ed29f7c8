"""The placement rule as it is written down, one worker after the other: what the columns of a decision are held against."""

from dataclasses import dataclass, replace

from services.router.decider import State
from services.router.lines import Load
from services.router.outlook import weights
from services.router.placement import Question
from services.router.roster import serving
from shared.contracts.copy_commands import FETCHES_PER_SOURCE_MAX
from shared.contracts.events import Exclusion, NodeRegistered
from shared.contracts.ids import WorkerId, node_of
from shared.model.blocks import reusable_tokens
from shared.model.calibration import PPM
from shared.model.pool import Node, Worker


@dataclass(frozen=True)
class Way:
    """How one worker could serve the request."""

    worker: WorkerId
    degree: int
    cached_tokens: int
    queue_us: int
    ratio_ppm: int = PPM
    fetch_us: int = 0
    fetch_from: WorkerId | None = None
    in_flight_tokens: int = 0
    behind_us: int = 0
    delayed_jobs: int = 0
    service_us: int = 0
    price_us: int = 0


def cheapest(state: State, question: Question) -> tuple[list[Way], dict[WorkerId, Exclusion]]:
    """Each worker in its best way, the cheapest first, and why each of the others may not have the request."""
    spec, excluded, able = serving(state.pool), dict[WorkerId, Exclusion](), list[Worker]()
    for node in state.pool.nodes.values():
        for worker in node.workers:
            if (reason := why_not(state, node, worker, spec, question)) is not None:
                excluded[worker.id] = reason
            else:
                able.append(worker)
    if heard := [worker for worker in able if worker.node not in question.silent]:
        excluded |= {worker.id: "silent" for worker in able if worker not in heard}
        able = heard
    if fresh := [worker for worker in able if worker.id not in question.refused_by]:
        excluded |= {worker.id: "refused" for worker in able if worker not in fresh}
        able = fresh
    if not able:
        return [], excluded
    smallest = min(worker.degree for worker in able)
    own = [own_way(state, worker, question) for worker in able]
    best = [
        min(
            (priced(state, way, smallest, question) for way in ways(state, way, own, question)),
            key=lambda e: e.price_us,
        )
        for way in own
    ]
    tie = "service_us" if weights(state.parameters).policy == "least-work" else "queue_us"
    return sorted(best, key=lambda each: (each.price_us, getattr(each, tie), each.worker)), excluded


def why_not(
    state: State, node: Node, worker: Worker, spec: NodeRegistered | None, question: Question
) -> Exclusion | None:
    if not node.alive or node.spec is None or spec is None or node.spec.model != spec.model:
        return "not-schedulable"
    if node.cordoned:
        return "cordoned"
    if question.prompt_tokens > node.spec.prompt_tokens_max:
        return "too-long"
    if worker.id in state.loads.of_worker and state.loads.of_worker[worker.id].at(question.now_ns)[1]:
        return "hung"
    if worker.id in node.draining:
        return "draining"
    if not node.has_adopted(worker):
        return "stale-epoch"
    room_tokens = node.spec.blocks_per_rank * node.spec.block_tokens * worker.degree
    return "full" if question.prompt_tokens > room_tokens else None


def own_way(state: State, worker: Worker, question: Question) -> Way:
    spec = serving(state.pool)
    assert spec is not None
    blocks = state.holders.matched(question.chain).get(worker.id, 0)
    cached_tokens = reusable_tokens(blocks, spec.block_tokens, question.prompt_tokens)
    queue_us, _ = state.loads.of_worker.get(worker.id, Load()).at(question.now_ns)
    calibrated = weights(state.parameters).policy == "vertumnus" and state.parameters.calibration
    ratio_ppm = state.calibration.ratio_ppm(worker.id) if calibrated else PPM
    return Way(worker.id, worker.degree, cached_tokens, queue_us, ratio_ppm)


def ways(state: State, own: Way, everybody: list[Way], question: Question) -> list[Way]:
    spec, parameters, loads = serving(state.pool), state.parameters, state.loads
    assert spec is not None
    found, node = [own], node_of(own.worker)
    pending = []
    if loads.specs[node].fetches and loads.fetching.get(node, 0) < FETCHES_PER_SOURCE_MAX:
        blocks = state.holders.pending.reaches(own.worker, question.chain, own.cached_tokens // spec.block_tokens)
        tokens = reusable_tokens(blocks, spec.block_tokens, question.prompt_tokens)
        if tokens > own.cached_tokens:
            read_bytes = (tokens - own.cached_tokens) * spec.kv_bytes_per_token
            fetch_us = state.calibration.link(node, parameters, question.now_ns).fetch_us(read_bytes)
            pending = [replace(own, cached_tokens=tokens, fetch_us=fetch_us, fetch_from=own.worker)]
    if weights(parameters).policy != "vertumnus":
        return found + pending
    coming = loads.in_flight.matches(question.chain).get(own.worker)
    if parameters.in_flight_prefixes and coming is not None and state.holders.trust(own.worker) != "blind":
        tokens = reusable_tokens(coming.blocks, spec.block_tokens, question.prompt_tokens)
        before = [loads.open[request].assignment for request in coming.providers]
        behind_us = min(0 if each is None or each.started else each.service_us for each in before)
        if tokens > own.cached_tokens:
            more = tokens - own.cached_tokens
            found.append(replace(own, cached_tokens=tokens, in_flight_tokens=more, behind_us=behind_us))
    sources = [
        each
        for each in everybody
        if loads.specs[node_of(each.worker)].fetches
        and loads.fetching.get(node_of(each.worker), 0) < FETCHES_PER_SOURCE_MAX
    ]
    source = min(sources, key=lambda each: (-each.cached_tokens, each.worker), default=own)
    tokens = source.cached_tokens - own.cached_tokens
    if parameters.prefix_fetch and tokens > 0 and loads.specs[node_of(own.worker)].fetches:
        read_bytes = tokens * spec.kv_bytes_per_token
        link = state.calibration.link(node_of(source.worker), parameters, question.now_ns)
        fetch_us = link.fetch_us(read_bytes)
        found.append(replace(own, cached_tokens=source.cached_tokens, fetch_us=fetch_us, fetch_from=source.worker))
    return found + pending


def priced(state: State, way: Way, smallest: int, question: Question) -> Way:
    parameters = state.parameters
    load_ppm = state.rate.load_ppm(
        question.now_ns,
        sum(len(node.workers) for node in state.pool.nodes.values() if node.alive and not node.cordoned),
    )
    by = weights(parameters, load_ppm)

    def service_us(degree: int, ratio_ppm: int) -> int:
        uncached_tokens = question.prompt_tokens - way.cached_tokens
        predicted_us = max(1, state.coefficients.prefill_us(degree, uncached_tokens, way.cached_tokens))
        return max(1, predicted_us * ratio_ppm // PPM) + way.fetch_us

    own_us = service_us(way.degree, way.ratio_ppm)
    load = state.loads.of_worker.get(way.worker)
    queue_us, delayed_jobs = way.queue_us, 0
    ordered = parameters.ordered_queue and parameters.worker_order == "shortest-first"
    if load is not None and ordered and by.policy == "vertumnus":
        queue_us, delayed_jobs = load.ahead(max(own_us, way.behind_us), question.now_ns)
    others_ppm = PPM if parameters.ratio_in_own_time else way.ratio_ppm
    taken_us = service_us(way.degree, others_ppm)
    weighed_us = own_us + round((by.beta - 1) * taken_us) if by.ratio_in_own_time else round(by.beta * own_us)
    occupancy_us = round(by.lam * (way.degree * taken_us - smallest * service_us(smallest, others_ppm)))
    price_us = queue_us + delayed_jobs * own_us + weighed_us + occupancy_us
    if by.policy == "least-work":
        price_us = queue_us
    return replace(way, queue_us=queue_us, delayed_jobs=delayed_jobs, service_us=own_us, price_us=price_us)
