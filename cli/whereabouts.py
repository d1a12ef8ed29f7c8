"""Where the running system is: what the environment names, else the system that runs in the data directory."""

import typer

from cli.embedded.data_dir import DataDir, RunningSystem
from cli.invocation import command
from cli.settings import CommandSettings

EXIT_REFUSED = 2


def nats_url() -> str:
    """The NATS server's URL. Ends the command if nothing says where it is."""
    settings = CommandSettings()
    return settings.nats_url or _running(settings, "VERTUMNUS_NATS_URL").nats_url


def database_url() -> str:
    """The record's database. Ends the command if nothing says where it is."""
    settings = CommandSettings()
    return settings.database_url or _running(settings, "VERTUMNUS_DATABASE_URL").database_url


def api_url() -> str:
    """Where the OpenAI-compatible API of the system in the data directory answers. Ends the command if none runs there."""
    return _running(CommandSettings(), "--url").api_url


def operator_access() -> tuple[str, str]:
    """Where the controller takes operators' commands, and the key. Ends the command if nothing says where it is."""
    settings = CommandSettings()
    if settings.controller_url is not None:
        key_file = settings.operator_key_file
        return settings.controller_url.rstrip("/"), key_file.read_text().strip() if key_file else ""
    running = _running(settings, "VERTUMNUS_CONTROLLER_URL")
    return running.services["controller"].url, running.operator_key_file.read_text().strip()


def _running(settings: CommandSettings, otherwise: str) -> RunningSystem:
    """`otherwise` names the variable or option that would do instead."""
    system = DataDir(settings.data_dir).running()
    if system is None:
        place = settings.data_dir.resolve()
        typer.echo(
            f"nothing runs in {place}: start it with `{command()} up`, or name its VERTUMNUS_DATA_DIR, or give {otherwise}",
            err=True,
        )
        raise typer.Exit(EXIT_REFUSED)
    return system
