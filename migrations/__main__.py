"""`python -m migrations upgrade`"""

import argparse
import sys

from pydantic import ValidationError

from migrations.settings import MigrationSettings
from migrations.steps import NotMigrated, upgrade


def main() -> None:
    """Exit status 1 and one line on stderr if the database cannot be migrated."""
    parser = argparse.ArgumentParser(prog="python -m migrations", description="Migrate VERTUMNUS_DATABASE_URL.")
    parser.add_argument("command", choices=["upgrade"], help="upgrade: bring the schema to the newest version")
    parser.parse_args()
    try:
        settings = MigrationSettings()
        upgrade(settings.database_url.get_secret_value())
    except ValidationError as error:
        sys.exit(f"VERTUMNUS_DATABASE_URL: {error.errors()[0]['msg']}")
    except NotMigrated as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
