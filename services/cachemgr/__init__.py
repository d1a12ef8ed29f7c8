"""Knows which prefix is cached where, how much each is demanded at which degree, and what a switch leaves usable.

Promises:

1.  One cache manager decides at a time; a standby folds the same log and takes over in less than five seconds.
2.  The trie is a projection of what agents report; a cache that is in doubt is asked for a full report.
3.  Demand is counted as the paper's Algorithm 1 says, and is the same in every process that folds the log.
4.  Each scan says how many candidates the lists of Algorithm 2 have.
5.  After a switch nothing is credited to a new worker that it may not hold. What a split leaves on other ranks is assigned, and
    priced as a fetch.
6.  Copies and reclamations are decided once, survive the leader, and count when the worker has reported them.
"""
