"""What the ledger reads from its environment."""

from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from shared.runtime.settings import SecretFile, ServiceSettings


class LedgerSettings(ServiceSettings):
    """`VERTUMNUS_*`, next to what every service reads."""

    database_url: SecretStr
    database_connections_max: int = Field(
        default=4, ge=1, le=100, description="for queries; the copy has one of its own"
    )
    seal_every_s: float = Field(default=3_600, ge=1, le=86_400, description="between two published seals of the record")
    block_days_kept: int | None = Field(
        default=None, ge=8, le=36_500, description="days before today whose block events are kept; all of them if unset"
    )
    operator_key_file: SecretFile | None = Field(
        default=None, description="queries need this key as a bearer token if set"
    )

    @field_validator("database_url")
    @classmethod
    def _postgres(cls, value: SecretStr) -> SecretStr:
        try:
            parts = urlsplit(value.get_secret_value())
            fits = parts.scheme in ("postgresql", "postgresql+asyncpg") and parts.port != 0
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                "postgresql://USER:PASSWORD@HOST:PORT/DATABASE is needed, or the same with postgresql+asyncpg"
            )
        return value

    def operator_key(self) -> str | None:
        """The key in the file, None without one."""
        return self.operator_key_file.read_text().strip() if self.operator_key_file else None
