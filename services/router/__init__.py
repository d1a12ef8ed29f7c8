"""The way in: an OpenAI-compatible HTTP API that sends each prompt to the worker where it costs least.

What it promises:

- A received request ends exactly once in the log: completed, failed, cancelled, rejected, or its router's `router-lost`.
- No assignment leaves before the decision behind it is acknowledged by the log.
- Two arrivals at one router never see the same load: the work is reserved in the call that decides.
- A node that dies costs a client time, never a token: the request goes on elsewhere, without a gap and without a repeat.
- Everything held for a client is bounded: bodies, prompts, unread tokens, open requests, attempts and waits.
"""
