"""The whole system on this machine: which processes it is made of, and in which order they start."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cli.embedded.data_dir import DataDir, RunningService, RunningSystem
from cli.embedded.environment import Servers, SystemChoices, service_environment, services_limit_s
from cli.embedded.loopback import free_port
from cli.embedded.nats import EmbeddedNats
from cli.embedded.postgres import EmbeddedPostgres
from cli.embedded.processes import run_to_end
from cli.embedded.services import ServiceProcess
from cli.embedded.supervisor import Supervisor
from cli.settings import CommandSettings

SERVICES = ("ledger", "controller", "cachemgr", "worker", "router")
"""In the order they are started; the router, which lets requests in, is the last to start and the first to stop."""

MIGRATION_LIMIT_S = 120.0


class EmbeddedSystem:
    """Servers and services of one data directory under one supervisor. Use it with `DataDir.locked` held."""

    def __init__(
        self,
        home: DataDir,
        choices: SystemChoices,
        settings: CommandSettings,
        say: Callable[[str], None],
        interrupted: threading.Event,
    ) -> None:
        self._home = home
        self._say = say
        self.supervisor = Supervisor(say, interrupted)
        self._choices = choices
        self._settings = settings

    @contextmanager
    def running(self) -> Iterator[RunningSystem]:
        """Start everything, announce it in the data directory, and stop it at the end.

        Errors: StartFailed, Interrupted; what had started is stopped.
        """
        try:
            limit_s = services_limit_s(self._choices)
            servers = self._start_servers()
            self._migrate(servers)
            self._say("the database schema is up to date")
            services = self._services(servers)
            self.supervisor.start(services, limit_s)
            system = RunningSystem(
                pid=os.getpid(),
                nats_url=servers.nats_url,
                database_url=servers.database_url,
                operator_key_file=self._home.operator_key_file(),
                tokenizer=self._choices.model_dir is not None,
                services={s.name: RunningService(url=s.url, log=s.log) for s in services},
            )
            self._home.announce(system)
            yield system
        finally:
            self._home.withdraw()
            self.supervisor.stop()

    def _start_servers(self) -> Servers:
        """Start the servers that the settings do not name."""
        nats_url = self._settings.nats_url
        if nats_url is None:
            nats = EmbeddedNats(self._home.nats)
            self.supervisor.start([nats])
            nats_url = nats.url
        database_url = self._settings.database_url
        if database_url is None:
            postgres = EmbeddedPostgres(self._home.postgres)
            if postgres.directory != self._home.postgres:
                self._say(
                    f"postgres may not run as root, and as nobody cannot reach this place: see {postgres.directory}"
                )
            self.supervisor.start([postgres])
            database_url = postgres.url()
        return Servers(nats_url, database_url)

    def _migrate(self, servers: Servers) -> None:
        """Bring the database to the newest schema. StartFailed carries the end of the migration's log."""
        run_to_end(
            [sys.executable, "-P", "-m", "migrations", "upgrade"],
            log=self._home.logs / "migrations.log",
            limit_s=MIGRATION_LIMIT_S,
            env={**os.environ, "VERTUMNUS_DATABASE_URL": servers.database_url},
        )

    def _services(self, servers: Servers) -> list[ServiceProcess]:
        return [
            ServiceProcess(
                name,
                f"services.{name}",
                env=service_environment(name, self._choices, servers, self._home),
                port=(self._choices.router_port if name == "router" else 0) or free_port(),
                log=self._home.logs / f"{name}.log",
            )
            for name in SERVICES
        ]
