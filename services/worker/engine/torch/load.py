"""How far a node's ranks are with reading their weights, for whoever waits: a large model takes minutes."""

import structlog

from services.worker.engine.torch.messages import Loading

LARGE_BYTES = 5 * 10**9
"""A disk of 500 MB/s needs ten seconds."""


class Load:
    """The rank that is furthest behind says how far the node is."""

    def __init__(self, ranks: int) -> None:
        self._percent = dict.fromkeys(range(ranks), 0)
        self._logged_percent = 0
        self._logger = structlog.get_logger(component="torch-engine")
        self.text = "the ranks are starting"

    def note(self, rank: int, progress: Loading) -> None:
        """Every tenth part of a large model is logged, and that a small one is read."""
        self._percent[rank] = 100 * progress.read_bytes // max(1, progress.total_bytes)
        percent = min(self._percent.values())
        self.text = (
            f"{percent} % of {progress.total_bytes / 1e9:.1f} GB of weights are read; rank {rank} is at {progress.file}"
        )
        part = 10 if progress.total_bytes >= LARGE_BYTES else 100
        if percent >= self._logged_percent + part:
            self._logged_percent = percent - percent % part
            self._logger.info("loading", percent=percent, gigabytes=progress.total_bytes / 1e9, file=progress.file)
