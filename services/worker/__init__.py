"""One agent per node: it owns the node's ranks, their queues and their KV index, and drives an engine.

What it promises:

- An accepted assignment has exactly one of `prefill-completed` and `prefill-aborted` in the log, unless its node is lost.
- A repeated or late command does no harm, whatever order commands arrive in.
- Geometry changes at step boundaries only, on a leader's order, for all ranks or for none.
- What its cache events add up to is what its workers hold; a full report says it from scratch.
- A dead or hung engine costs the node an incarnation, not the agent: routers are told at once, and the node comes back.
- It never chooses which worker serves a request, and it never starts work that it was not sent.
"""
