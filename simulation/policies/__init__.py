"""Policies in virtual time: the services' own deciders on a heap of events, for figures over many hours and many GPUs.

Nothing is decided here. Routers, controller, cache manager and agents are the production code: `services.*.decider`, the
worker's queue, composer and KV index, the cost model. What is simulated is what lies between them: time, steps, messages.
Events go from decider to fold as they are, so neither JSON nor an event loop is in the way.
"""
