"""Observes the pool and decides its geometry: windows, epochs, who is lost, and what operators ask for.

Promises:

1.  One controller decides at a time; a standby folds the same log and takes over in less than five seconds. A decision
    of an older leader is refused by the log.
2.  Every window is recorded, and anybody can derive it again from the log.
3.  A registered node gets an epoch: its configured composition, or the one that was committed last.
4.  A router or node that is silent for three seconds is declared lost; never because this process itself was deaf.
5.  What an operator asks for is an event with a name to it.

`saga.py` decides one reconfiguration from plan to commit or abort. Nothing plans one yet: the policies that compare
windows with thresholds, and the shell's part in a saga, belong to the reconfiguration policy and are not in this version.
"""
