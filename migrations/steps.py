"""Run alembic out of the package: no alembic.ini, so that an installed distribution migrates like a checkout."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy.exc import SQLAlchemyError


class NotMigrated(Exception):
    """The database is what it was. The message has the server's words."""


def upgrade(database_url: str, revision: str = "head") -> None:
    """Bring the database to `revision`. What has been done already is left alone.

    Errors: NotMigrated; a failed step is undone as a whole.
    """
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.attributes["database_url"] = database_url
    try:
        command.upgrade(config, revision)
    except (SQLAlchemyError, OSError) as error:
        raise NotMigrated(f"the database was not migrated: {error}") from error
