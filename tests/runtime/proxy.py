"""A TCP proxy that can cut a connection, or lose what one side says."""

import asyncio
from contextlib import suppress

CHUNK_BYTES = 65_536


class Proxy:
    """Forwards `127.0.0.1:port` to a server. `cut` ends what is open and refuses what comes, until `heal`."""

    def __init__(self, server_port: int) -> None:
        self.port = 0
        self.answers_lost = False
        """While true, nothing the server says arrives."""
        self._server_port = server_port
        self._listener: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._cut = False

    async def __aenter__(self) -> "Proxy":
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        self._cut = True
        for writer in self._open:
            writer.transport.abort()

    def heal(self) -> None:
        self._cut = self.answers_lost = False

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._cut:
            writer.transport.abort()
            return
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        mine = {writer, server_writer}
        self._open |= mine
        try:
            await asyncio.gather(
                self._forward(reader, server_writer, False), self._forward(server_reader, writer, True)
            )
        finally:
            self._open -= mine
            for each in mine:
                each.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: bool) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(CHUNK_BYTES):
                if not (answers and self.answers_lost):
                    writer.write(data)
                    await writer.drain()
        writer.transport.abort()
