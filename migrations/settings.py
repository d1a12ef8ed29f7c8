"""Which database to migrate."""

from pydantic import SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class MigrationSettings(BaseSettings):
    """`VERTUMNUS_DATABASE_URL`, a `postgresql+asyncpg://` URL. Its user owns the schema and may create roles."""

    model_config = SettingsConfigDict(env_prefix="VERTUMNUS_", frozen=True, extra="ignore")

    database_url: SecretStr
