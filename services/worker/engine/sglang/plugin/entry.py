"""Entry point of `sglang.srt.plugins`: SGLang calls `register` once in each of its processes, before it builds anything."""


def register() -> None:
    """Put the hooks in. Nothing happens unless the server was started with VERTUMNUS_SGLANG=1."""
