"""The past out of the record: the states that services decided on, and their decisions made again from them.

This package knows every decider, so that nothing is written twice: what is run again is the very code that decided (ADR 0015).
It reads, and it is imported by nobody but the command line.

- `routers.py`, `leaders.py`: the states of router processes and of leaders, rebuilt event by event, and what they decide there.
- `verifying.py`, `verification.py`: every decision of a log and of the record, derived again and compared; `parts.py`: by whom.
- `instants.py`: the whole state as of an instant.
- `explaining.py`: one request's decisions and what became of them.
"""
