"""What a router's decision costs: `python -m bench.router match|apply|memory|decision|placements|proxy`.

`match` and `apply` are paired with Dynamo's radix tree where its package is installed. It is no dependency, so it goes into an
environment of its own, which needs little else of this project:

    python3 -m venv build/peers
    build/peers/bin/pip install ai-dynamo-runtime==1.6.1 sglang-router==0.3.2 smg==1.13.0
    build/peers/bin/pip install pydantic numpy orjson numba psutil
    build/peers/bin/python -m bench.router match

`placements --peers build/peers` and `proxy --peers build/peers` start all that they ask, ours and the others.
"""

import argparse
from pathlib import Path

from bench.router import decision, index, placements, proxy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("match", "apply", "memory", "decision", "placements", "proxy"))
    parser.add_argument("--blocks", type=int, default=10_000_000, help="of memory")
    parser.add_argument("--prompt-tokens", type=int, default=65_536, help="of placements")
    parser.add_argument(
        "--peers", type=Path, help="the environment that has the other routers, of placements and proxy"
    )
    options = parser.parse_args()
    match options.what:
        case "match":
            index.match()
        case "apply":
            index.apply()
        case "memory":
            index.memory(options.blocks)
        case "decision":
            decision.decision()
        case "proxy":
            proxy.proxy(options.peers)
        case _:
            placements.placements(options.peers, options.prompt_tokens)


if __name__ == "__main__":
    main()
