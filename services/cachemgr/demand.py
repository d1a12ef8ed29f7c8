"""Algorithm 1 of the paper: what each request adds to the demand for the blocks of its prefix.

`access` grows when a prefill has reused blocks of its worker's own cache. `missed` grows once per request, at its first
assignment: for every matched block that no worker of the preferred degree holds, by the seconds that degree would have
saved by reusing this block beyond its parent. Blocks that were fetched from another worker were missed too.
"""

from services.cachemgr.trie import Trie
from shared.contracts.events import PrefillCompleted, RequestAssigned
from shared.contracts.ids import WorkerId, node_of
from shared.model.blocks import reusable_tokens
from shared.model.cost import US_PER_S, Coefficients
from shared.model.holders import Holders
from shared.model.pool import Pool


def count_access(trie: Trie, holders: Holders, pool: Pool, data: PrefillCompleted) -> None:
    """`access[z, C] += 1` for each z that was reused at a degree-C worker."""
    worker, block_tokens = pool.workers.get(data.worker), block_tokens_at(pool, data.worker)
    if worker is None or not block_tokens:
        return
    reused = holders.chains.get(data.request, ())[: data.cached_own_tokens // block_tokens]
    for block in reused:
        if node := trie.nodes.get(block):
            trie.accessed(node, worker.degree)


def count_missed(trie: Trie, holders: Holders, pool: Pool, coefficients: Coefficients, data: RequestAssigned) -> None:
    """`missed[z, C] += E_C(L - P_parent, P_parent) - E_C(L - P_z, P_z)` for each matched z that is absent at C = C_pref."""
    block_tokens = block_tokens_at(pool, data.worker)
    if data.attempt != 1 or not block_tokens:
        return
    prompt_tokens, degree = data.uncached_tokens + data.cached_tokens, data.preferred_degree
    chain = holders.chains.get(data.request, ())
    chain = chain[: reusable_tokens(len(chain), block_tokens, prompt_tokens) // block_tokens]
    matched, present = trie.matched(chain), trie.matched(chain, degree)

    def service_us(blocks: int) -> int:
        cached_tokens = blocks * block_tokens
        return coefficients.prefill_us(degree, prompt_tokens - cached_tokens, cached_tokens)

    with_parent_us = service_us(present)
    for depth in range(present, matched):
        with_block_us = service_us(depth + 1)
        benefit_us = max(with_parent_us - with_block_us, 0)
        trie.missed(trie.nodes[chain[depth]], degree, benefit_us / US_PER_S)
        with_parent_us = with_block_us


def block_tokens_at(pool: Pool, worker: WorkerId) -> int:
    """Tokens of a block there; 0 for a node that the log does not know (any longer)."""
    node = pool.nodes.get(node_of(worker))
    return node.spec.block_tokens if node and node.spec else 0
