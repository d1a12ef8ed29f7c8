"""Prompts out of hash ids: equal ids give equal tokens, so whatever rows share, their prompts share.

The tokens mean nothing. They are a function of (id, position in block) alone: no state, no seed, the same on every
machine, so two clients that send parts of one trace hit each other's prefixes.
"""

import numpy as np
import numpy.typing as npt

from simulation.workloads.rows import Row

TOKEN_FIRST, TOKEN_END = 256, 32_000
"""Ids every current model has as ordinary tokens: below lie control and byte tokens, above is beyond small vocabularies."""

# Short, common, lower-case: each is one token in the vocabularies of the Llama, Qwen, GPT and SmolLM families.
_COMMON = (
    "the of and to in is that for it was on are as with be this have from or by one had not but what all were when we "
    "there can an your which their said if do will each about how up out them then she many some so these would other "
    "into has more her two like him see time could no make than first been its who now people my made over did down "
    "only way find use may water long little very after words called just where most know get through back much "
    "before go good new write our used me man too any day same right look think also around another came come work "
    "three word must because does part even place well such here take why things help put years"
)
WORDS = tuple(_COMMON.split())

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def prompt_tokens(row: Row, first: int = TOKEN_FIRST, end: int = TOKEN_END) -> npt.NDArray[np.uint32]:
    """The row's prompt as token ids in [first, end), shape (row.prompt_tokens,). 10 ns a token."""
    mixed = _mixed(row) % np.uint64(end - first) + np.uint64(first)
    return mixed.astype(np.uint32)


def prompt_text(row: Row) -> str:
    """The row's prompt as that many common words, about as many tokens; the system's `usage` says how many."""
    return " ".join(WORDS[i] for i in (_mixed(row) % np.uint64(len(WORDS))).tolist())


def _mixed(row: Row) -> npt.NDArray[np.uint64]:
    """64 well-mixed bits for each token of the prompt: splitmix64 (Steele, Lea, Flood 2014) of (id, position)."""
    ids = np.array(row.hash_ids, dtype=np.uint64)
    positions = np.arange(row.block_tokens, dtype=np.uint64)
    seeds = _splitmix(ids)[:, None] + positions[None, :] * _GOLDEN
    return _splitmix(seeds).reshape(-1)[: row.prompt_tokens]


def _splitmix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = state + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX[0]
    z = (z ^ (z >> np.uint64(27))) * _MIX[1]
    mixed: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed
