"""Do our versions of other routers' rules choose as those routers do? Asks the released packages themselves.

They are no dependencies of this project, so they go into an environment of their own, which needs nothing else of it:

    python3 -m venv build/peers
    build/peers/bin/pip install ai-dynamo-runtime==1.6.1 sglang-router==0.3.2 pydantic pyzmq msgpack
    build/peers/bin/python -m bench.peers_agree dynamo
    build/peers/bin/python -m bench.peers_agree sglang

Both see the same prompts, caches and loads, and follow the peer's choice, so one difference does not become many. A choice
agrees when it is ours or, where several workers cost the same, one of those; how many were not decided by chance is said.
Rules whose projects have no package to ask are checked by hand only: llm-d (written in Go), Preble (no release).
"""

import argparse
import asyncio
from random import Random
from typing import NamedTuple

from bench.peers_dynamo import Dynamo
from bench.peers_sglang import SGLang
from bench.peers_world import World

WORKERS, DECISIONS = 4, 1_500
"""Few enough workers for one to be far busier than another, so that every branch of the rules is taken."""


class Agreement(NamedTuple):
    """Decisions, those with one best worker, and how many of each the peer took as we do."""

    decisions: int
    agreed: int
    decided: int
    decided_agreed: int


async def compared(peer: Dynamo | SGLang, world: World, decisions: int) -> Agreement:
    """Let the peer place prompts of `world`, of which now and then one gets its first token."""
    agreed = decided = decided_agreed = 0
    for _ in range(decisions):
        prompt = world.prompt()
        ours = await peer.ours(prompt, world.views(prompt))
        theirs = await peer.place(prompt)
        agreed += theirs in ours
        decided += len(ours) == 1
        decided_agreed += ours == {theirs}
        world.placed(prompt, theirs)
        while world.crowded():
            await peer.finished(world.finish())
    return Agreement(decisions, agreed, decided, decided_agreed)


async def main(name: str, seed: int, decisions: int) -> None:
    async with Dynamo(WORKERS) if name == "dynamo" else SGLang(WORKERS) as asked:
        found = await compared(asked, World(WORKERS, Random(seed)), decisions)
    print(
        f"{name}, seed {seed}: {found.agreed} of {found.decisions} decisions agree ({found.agreed / found.decisions:.1%}); "
        f"{found.decided_agreed} of the {found.decided} that one worker was best for"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=("dynamo", "sglang"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--decisions", type=int, default=DECISIONS)
    options = parser.parse_args()
    asyncio.run(main(options.peer, options.seed, options.decisions))
