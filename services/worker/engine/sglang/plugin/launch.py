"""Before a server's main process starts any other: what it was launched with is looked at, and its store begins to
serve."""

from typing import Any

from sglang.srt.environ import envs

from services.worker.engine.sglang.plugin import fitness, settings, store


class Launch:
    """Keeps the store for the life of the process."""

    def __init__(self) -> None:
        self._store: Any = None

    def begin(self, _engine: Any, server_args: Any, *_: Any, **__: Any) -> None:
        """Before `Engine._launch_scheduler_processes`. RuntimeError with every setting that does not fit."""
        environment = {name: getattr(envs, name).get() for name in fitness.ENVIRONMENT}
        refused = fitness.refuse_settings({**server_args.resolved_dict(), **environment})
        if refused:
            raise RuntimeError("vertumnus: this server cannot change its geometry:\n  " + "\n  ".join(refused))
        self._store = store.serve(settings.tell_children)
