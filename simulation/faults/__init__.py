"""The real services in one process and in virtual time, over a network and a log that fail as a seed says.

    scenario.py    what a seed stands for: the pool, the requests, the faults, all drawn before anything runs
    network.py     a process's way to everybody else: latency, loss, repetition, partitions, outages
    distant.py     the ports of `shared.runtime.ports` over it, in front of the in-memory log, bus and cells
    process.py     a service's process: started, stopped, killed without a farewell, started again
    roles.py       the services themselves, hosted as their `__main__` does
    clients.py     requests, and what their clients were given
    operating.py   what operators and policies ask for in a scenario: reconfigurations, copies, freezes
    world.py       one run: a scenario from its first instant to a quiet point
    checkers.py    what must hold at every instant, and of every event
    quiet.py       what must hold once everything has healed
    running.py     a seed's verdict; many seeds; the command that repeats a failure
    shrinking.py   the smallest scenario that still fails
    planted.py     bugs that were planted to see them caught

Nothing here decides anything a service decides: `tests/simulation` holds it to that.
"""
