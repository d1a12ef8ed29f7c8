"""The database schema, one step after the other: `python -m migrations upgrade`.

Plain SQL for Postgres 15 and newer, because what matters here (partitions, grants, triggers) is SQL. A step that has been
released is never changed.
"""
