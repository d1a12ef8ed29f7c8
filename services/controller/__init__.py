"""Observes the pool and decides its geometry: windows, epochs, who is lost, and what operators ask for.

Promises:

1.  One controller decides at a time; a standby folds the same log and takes over in less than five seconds. A decision
    of an older leader is refused by the log.
2.  Every window is recorded, and anybody can derive it again from the log.
3.  A registered node gets an epoch: its configured composition, or the one that was committed last.
4.  A router or node that is silent for three seconds is declared lost; never because this process itself was deaf.
5.  What an operator asks for is an event with a name to it.
6.  A node changes its composition after a window whose signals call for it (`reconfiguring.py` asks the policy), or when an
    operator says so: always by one saga (`saga.py`), which ends in the new composition or in the old one.
"""
