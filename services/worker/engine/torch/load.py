"""How far a node's ranks are with reading their weights, for whoever waits: a large model takes minutes."""

import structlog

from services.worker.engine.torch.messages import Loading

LOGGED_PERCENT = 10


class Load:
    """The rank that is furthest behind says how far the node is."""

    def __init__(self, ranks: int) -> None:
        self._percent = dict.fromkeys(range(ranks), 0)
        self._logged_percent = 0
        self._logger = structlog.get_logger(component="torch-engine")
        self.text = "the ranks are starting"

    def note(self, rank: int, progress: Loading) -> None:
        """Every tenth part is logged."""
        self._percent[rank] = 100 * progress.read_bytes // max(1, progress.total_bytes)
        percent = min(self._percent.values())
        self.text = (
            f"{percent} % of {progress.total_bytes / 1e9:.1f} GB of weights are read; rank {rank} is at {progress.file}"
        )
        if percent >= self._logged_percent + LOGGED_PERCENT:
            self._logged_percent = percent - percent % LOGGED_PERCENT
            self._logger.info("loading", percent=percent, gigabytes=progress.total_bytes / 1e9, file=progress.file)
