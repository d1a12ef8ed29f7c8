"""What the ledger reads from its environment."""

from pydantic import Field, FilePath, SecretStr, field_validator

from shared.runtime.settings import ServiceSettings


class LedgerSettings(ServiceSettings):
    """`VERTUMNUS_*`, next to what every service reads."""

    database_url: SecretStr
    database_connections_max: int = Field(
        default=4, ge=1, le=100, description="for queries; the copy has one of its own"
    )
    operator_key_file: FilePath | None = Field(
        default=None, description="queries need this key as a bearer token if set"
    )

    @field_validator("database_url")
    @classmethod
    def _postgres(cls, value: SecretStr) -> SecretStr:
        if not value.get_secret_value().startswith(("postgresql://", "postgresql+asyncpg://")):
            raise ValueError("must be a postgresql:// or postgresql+asyncpg:// URL")
        return value

    def operator_key(self) -> str | None:
        """The key in the file, None without one."""
        return self.operator_key_file.read_text().strip() if self.operator_key_file else None
