"""What every service reads from its environment, once, at start. Each service's own settings extend this."""

from typing import Literal

from pydantic import Field, FilePath, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.contracts.ids import check_token


class ServiceSettings(BaseSettings):
    """`VERTUMNUS_*`. Bad values end the process with the name of the variable and its limit."""

    model_config = SettingsConfigDict(env_prefix="VERTUMNUS_", frozen=True, extra="ignore")

    nats_url: str = "nats://127.0.0.1:4222"
    nats_user: str | None = None
    nats_password_file: FilePath | None = None
    pool: str = "main"
    instance: str = Field(default="1", description="name of this replica, unique per service in the pool")
    http_host: str = "127.0.0.1"
    http_port: int = Field(default=0, ge=0, le=65535, description="0 picks a free port")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    stream_bytes_max: int = Field(default=4 * 2**30, ge=2**20)
    stream_age_max_s: int = Field(default=48 * 3600, ge=60)
    stream_replicas: int = Field(default=1, ge=1, le=5)

    def nats_password(self) -> str | None:
        """What the password file holds, without the line's end."""
        return self.nats_password_file.read_text().rstrip("\n") if self.nats_password_file else None

    @field_validator("pool", "instance")
    @classmethod
    def _subject_token(cls, value: str) -> str:
        return check_token("pool and instance", value)
