"""`vertumnus status`: what runs, and what the record says the pool is."""

from typing import TYPE_CHECKING, Any

import typer

from cli.commands.events import EXIT_FAILED, Json, run

if TYPE_CHECKING:
    from rich.table import Table


def status(json: Json = False) -> None:
    """Services, nodes and workers, as of the last event that the ledger has copied.

    Exit status 1 if a service is not ready, or no worker can be given work.
    """
    from cli.settings import CommandSettings
    from cli.whereabouts import database_url
    from services.ledger import database, queries

    services = _services(CommandSettings())
    url = database_url()

    async def ask() -> dict[str, Any]:
        connection = await database.connect(url)
        try:
            return await queries.state(connection)
        finally:
            await connection.close()

    state = run(ask)
    if json:
        import orjson

        print(orjson.dumps({"services": services, **state}).decode())
    else:
        from cli.terminal import output

        console = output()
        for table in tables(services, state):
            console.print(table)
        console.print(_standing(state))
    if not all(services.values()) or not any(each["schedulable"] for each in state["workers"]):
        raise typer.Exit(EXIT_FAILED)


def _services(settings: Any) -> dict[str, bool]:
    """Whether each service of the system in the data directory is ready; empty when none runs there."""
    from urllib.parse import urlsplit

    from cli.embedded.data_dir import DataDir
    from cli.embedded.loopback import answers_ok

    system = DataDir(settings.data_dir).running()
    services = system.services if system else {}
    return {name: answers_ok(urlsplit(service.url).port or 0, "/readyz") for name, service in services.items()}


def tables(services: dict[str, bool], state: dict[str, Any]) -> list["Table"]:
    """One table each of services (where they are known), nodes and workers."""
    from rich.table import Table

    nodes = Table("node", "engine", "model", "life", "epoch", "composition", "state")
    for node in state["nodes"]:
        spec, composition = node["spec"] or {}, ",".join(map(str, node["composition"]))
        standing = "lost" if not node["alive"] else "cordoned" if node["cordoned"] else "alive"
        row = (
            node["node"],
            spec.get("engine", ""),
            spec.get("model", ""),
            node["incarnation"],
            node["epoch"],
            composition,
        )
        nodes.add_row(*map(str, row), standing)
    workers = Table("worker", "degree", "takes work", "cache", "blocks")
    for worker in state["workers"]:
        cache = (worker["trust"] or "unknown", worker["blocks"] or 0)
        workers.add_row(
            worker["worker"], str(worker["degree"]), "yes" if worker["schedulable"] else "no", *map(str, cache)
        )
    if not services:
        return [nodes, workers]
    ready = Table("service", "ready")
    for name, is_ready in services.items():
        ready.add_row(name, "yes" if is_ready else "no")
    return [ready, nodes, workers]


def _standing(state: dict[str, Any]) -> str:
    checkpoint = state["checkpoint"]
    copied = f"{checkpoint['stream_seq']:,} events copied" if checkpoint else "nothing copied yet"
    return f"{state['open_requests']} open requests; {copied}"
