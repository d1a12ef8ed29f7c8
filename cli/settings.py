"""What the command reads from its environment: where the system is, or is to be."""

from pathlib import Path

from pydantic_settings import BaseSettings, SettingsConfigDict


class CommandSettings(BaseSettings):
    """`VERTUMNUS_*`. A server named here is used instead of an embedded one; options of the command win over these."""

    model_config = SettingsConfigDict(env_prefix="VERTUMNUS_", frozen=True, extra="ignore")

    nats_url: str | None = None
    database_url: str | None = None
    controller_url: str | None = None
    operator_key_file: Path | None = None
    data_dir: Path = Path(".vertumnus")
