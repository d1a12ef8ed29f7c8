"""`vertumnus demo`: the whole system at work, real and small, then modelled and large. Nothing in it is staged: both halves
are the processes of `vertumnus up`, and every figure is measured from outside, by the client that sends the trace.
"""
