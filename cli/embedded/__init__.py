"""The whole system on one machine without Docker: NATS, Postgres and the five services as child processes.

The servers' binaries come from Python packages (the `embedded` extra). Everything listens on loopback, on ports that were
free, with credentials made at first start; everything written lies under one data directory, and a later start resumes it.
"""
