"""The permanent record: every event of the stream in Postgres, once, in stream order.

Promises:
- A row of the record is what was published, byte for byte, and never changes; each table's rows are chained by hash.
- Log rows, read models and checkpoint of a batch are one transaction, so they always say the same.
- Nothing is left out silently: bytes that are no event are rows, repeated events are rows, and a piece that the stream had
  dropped stops the copy until an operator accepts the gap, which is a row too.
- One ledger copies at a time; others wait. While Postgres is away nothing piles up here: the stream keeps the events.
- Nothing here steers the system.
"""
