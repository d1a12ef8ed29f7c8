"""Run alembic out of the package: no alembic.ini, so that an installed distribution migrates like a checkout."""

from pathlib import Path

from alembic import command
from alembic.config import Config


def upgrade(database_url: str, revision: str = "head") -> None:
    """Bring the database to `revision`. What has been done already is left alone.

    Errors: sqlalchemy.exc.DBAPIError, with the server's words; a failed step is undone as a whole.
    """
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.attributes["database_url"] = database_url
    command.upgrade(config, revision)
