"""How the servers of an engine come to serve a composition. Those of a fixed degree serve one, whoever asks."""

from collections.abc import Sequence
from typing import Protocol

from services.worker.engine.protocol import EngineError, RankAdopted, RolledBack
from services.worker.engine.sglang.page_hashes import PageHash
from services.worker.engine.sglang.settings import SglangSettings
from shared.model.lattice import Composition, Group


class Geometry(Protocol):
    """What an engine asks of its servers beyond requests."""

    async def start(self) -> None:
        """Once the servers have joined. Errors: EngineError."""

    async def adopt(self, composition: Composition) -> tuple[RankAdopted, ...]:
        """Serve the composition from now on; safe to repeat. Errors: RolledBack with the reason; EngineDied."""

    async def take_out(self, group: Group, pages: Sequence[PageHash]) -> bool:
        """Remove pages and everything below them from a worker's cache. Whether something went. Errors: EngineError."""


class FixedGeometry:
    """Servers of one degree serve one composition: each of them is a worker."""

    def __init__(self, settings: SglangSettings) -> None:
        self._composition: Composition = tuple(server.degree for server in settings.servers)

    async def start(self) -> None:
        """Nothing is to be prepared."""

    async def adopt(self, composition: Composition) -> tuple[RankAdopted, ...]:
        """Errors: RolledBack with the reason."""
        if composition != self._composition:
            raise RolledBack(
                f"composition {composition}: these SGLang servers run without the Vertumnus plug-in and have fixed degrees, so"
                f" this node serves {self._composition} only"
            )
        return tuple(RankAdopted(rank, 0.0) for rank in range(sum(composition)))

    async def take_out(self, group: Group, pages: Sequence[PageHash]) -> bool:  # noqa: ARG002
        """Errors: EngineError, as SGLang by itself empties a cache whole or not at all."""
        raise EngineError("evict: SGLang servers without the Vertumnus plug-in take out no single blocks")
