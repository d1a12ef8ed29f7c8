"""Workloads: what was asked of a serving system, when, and which prompts began alike; or might have been.

The form is Mooncake's (https://github.com/kvcache-ai/Mooncake, FAST '25): one JSON object a line, no text. Everything here is
pure: rows in, rows out, one at a time, so a trace of any length is read in constant memory.
"""
