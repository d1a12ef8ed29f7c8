"""Profiles of a machine: measured prefills, the cost model fitted to them, and how much load a worker carries."""
