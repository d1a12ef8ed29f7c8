"""Make the secrets of a Compose pool, once: `python make_secrets.py DIR`. What exists is kept, so a restart changes nothing.

Files are readable by the pool's group only, for Postgres runs under a user of its own. `pgpass` is for its owner alone:
clients of Postgres refuse it otherwise.
"""

import secrets
import sys
from pathlib import Path

NATS_USERS = ("router", "controller", "cachemgr", "worker", "ledger")
SECRET_BYTES = 32


def kept(path: Path, make: str, mode: int) -> str:
    """The content of `path`, which is `make` if there was none. It appears whole or not at all."""
    if not path.exists():
        partial = path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        partial.touch(mode)
        partial.chmod(mode)
        partial.write_text(make)
        partial.replace(path)
    return path.read_text()


def make_secrets(directory: Path) -> None:
    """Every secret that docker-compose.yml names."""
    kept(directory / "block.key", secrets.token_hex(SECRET_BYTES), 0o640)
    kept(directory / "operator.key", secrets.token_hex(SECRET_BYTES), 0o640)
    postgres = kept(directory / "postgres.password", secrets.token_hex(SECRET_BYTES), 0o640)
    kept(directory / "pgpass", f"postgres:5432:*:vertumnus:{postgres}\n", 0o600)
    passwords = {user: kept(directory / f"nats.{user}", secrets.token_hex(SECRET_BYTES), 0o640) for user in NATS_USERS}
    # Read by the include at the head of deploy/nats/nats.conf.
    lines = [f'{user.upper()}_PASSWORD: "{password}"\n' for user, password in passwords.items()]
    kept(directory / "nats-passwords.conf", "".join(lines), 0o640)


if __name__ == "__main__":
    make_secrets(Path(sys.argv[1]))
