"""Entry point of `sglang.srt.plugins`: SGLang calls `register` once in each of its processes, before it builds anything."""

from services.worker.engine.sglang.plugin import settings


def register() -> None:
    """Put the hooks in, if the server was started with VERTUMNUS_SGLANG=1. SGLang logs an `Exception` of a plug-in and
    goes on without it, so a plug-in that does not fit ends the process."""
    try:
        if settings.active():
            from services.worker.engine.sglang.plugin.hooks import install

            install()
    except Exception as error:
        raise SystemExit(f"vertumnus: the plug-in cannot be loaded: {type(error).__name__}: {error}") from error
