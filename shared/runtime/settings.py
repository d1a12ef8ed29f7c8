"""What every service reads from its environment, once, at start. Each service's own settings extend this."""

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, FilePath, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.contracts.ids import check_token

STREAM_BYTES_MAX = 2**50
STREAM_AGE_MAX_S = 10 * 365 * 86_400
"""A petabyte and ten years: beyond what anybody means, and within what a server takes."""


def _holds_a_secret(path: Path) -> Path:
    """ValueError says what is wrong with the file, and nothing of what it holds."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} holds no text") from None
    if not text.strip():
        raise ValueError(f"{path} holds no key")
    return path


SecretFile = Annotated[FilePath, AfterValidator(_holds_a_secret)]
"""A file whose text is a key, several keys, or a password."""


class ServiceSettings(BaseSettings):
    """`VERTUMNUS_*`. Bad values end the process with the name of the variable and its limit."""

    model_config = SettingsConfigDict(env_prefix="VERTUMNUS_", frozen=True, extra="ignore")

    nats_url: str = "nats://127.0.0.1:4222"
    nats_user: str | None = None
    nats_password_file: SecretFile | None = None
    pool: str = "main"
    instance: str = Field(default="1", description="name of this replica, unique per service in the pool")
    http_host: str = "127.0.0.1"
    http_port: int = Field(default=0, ge=0, le=65535, description="0 picks a free port")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    stream_bytes_max: int = Field(default=4 * 2**30, ge=2**20, le=STREAM_BYTES_MAX)
    stream_age_max_s: int = Field(default=48 * 3600, ge=60, le=STREAM_AGE_MAX_S)
    stream_replicas: int = Field(default=1, ge=1, le=5)

    def nats_password(self) -> str | None:
        """What the password file holds, without the line's end."""
        return self.nats_password_file.read_text().rstrip("\n") if self.nats_password_file else None

    @field_validator("nats_url")
    @classmethod
    def _servers(cls, value: str) -> str:
        if not all(map(_is_nats_server, value.split(","))):
            raise ValueError("nats://HOST:PORT is needed, or several of them with commas between")
        return value

    @field_validator("pool", "instance")
    @classmethod
    def _subject_token(cls, value: str) -> str:
        return check_token("pool and instance", value)


def _is_nats_server(url: str) -> bool:
    try:
        parts = urlsplit(url.strip())
        return parts.scheme in ("nats", "tls") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
