"""Secrets in files: made once, readable by their owner only, never in an argument list."""

import os
import secrets
from pathlib import Path


def secret(file: Path) -> str:
    """The 256-bit secret in `file` as 64 hex digits, made at first use."""
    if not file.exists():
        write_private(file, secrets.token_hex(32))
    return file.read_text()


def write_private(file: Path, text: str) -> None:
    """Write a file that only its owner may read, whole or not at all."""
    partial = file.with_name(file.name + ".partial")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as output:
        output.write(text)
    partial.replace(file)
