"""Whether an assignment can be taken: a check of each field, then of the worker it names. Pure."""

from services.worker.decider import State
from services.worker.engine.protocol import EngineDescription
from shared.contracts.commands import Assign, Refused
from shared.contracts.ids import BLOCK_ID_BYTES, WorkerId, decode_worker_id, node_of, unpack_block_ids


def refuse_assign(state: State, engine: EngineDescription, assign: Assign) -> Refused | None:
    """Why a new assignment is not queued. `detail` names the field and its limit."""
    if detail := _bad_field(state, engine, assign):
        return Refused(reason="bad-command", detail=detail)
    if assign.worker not in state.desk.workers:
        reason = "stale-epoch" if node_of(assign.worker) == state.node and state.served.epoch else "unknown-worker"
        return Refused(reason=reason, detail=f"worker: {assign.worker} is none of {list(state.desk.workers)}")
    return state.desk.refusal(assign)


def _bad_field(state: State, engine: EngineDescription, assign: Assign) -> str | None:
    if assign.router_source in state.lost_routers:
        return f"router_source: {assign.router_source} was declared lost"
    if not 1 <= assign.prompt_tokens <= engine.prompt_tokens_max:
        return f"prompt_tokens: {assign.prompt_tokens} is outside [1, {engine.prompt_tokens_max}]"
    # Fewer is right: a request that continues elsewhere ends with generated tokens, whose blocks nobody has named.
    bytes_max = assign.prompt_tokens // engine.block_tokens * BLOCK_ID_BYTES
    if len(assign.block_ids) % BLOCK_ID_BYTES or len(assign.block_ids) > bytes_max:
        return f"block_ids: {len(assign.block_ids)} bytes is no multiple of {BLOCK_ID_BYTES} up to {bytes_max}"
    blocks, different = len(assign.block_ids) // BLOCK_ID_BYTES, len(set(unpack_block_ids(assign.block_ids)))
    if different < blocks:
        return f"block_ids: {blocks}, of them {different} different; a prompt has each once"
    if assign.max_new_tokens < 1:
        return f"max_new_tokens: {assign.max_new_tokens} is below 1"
    if assign.fetch_blocks > blocks or bool(assign.fetch_blocks) != bool(assign.fetch_from):
        return f"fetch_blocks: {assign.fetch_blocks} from {assign.fetch_from}, of {len(assign.block_ids)} bytes of block_ids"
    if assign.decode_worker is None or node_of(assign.decode_worker) != state.node:
        return None  # which ranks another node has, that node knows
    return bad_decode_worker(state, engine, assign.decode_worker)


def bad_decode_worker(state: State, engine: EngineDescription, worker: WorkerId) -> str | None:
    """Why it is no decode rank of this node."""
    known = [decode_worker_id(state.node, rank) for rank in range(engine.decode_ranks)]
    return None if worker in known else f"decode_worker: {worker} is none of {known}"
