"""Figures of policies, out of the simulator: `python -m bench.policies --help`."""
