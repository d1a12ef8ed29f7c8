"""Traces (`simulation.workloads`) for people and for servers: pictures of them, prompts out of them, and sending them."""
