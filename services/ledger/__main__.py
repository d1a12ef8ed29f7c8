"""`python -m services.ledger`"""

from services.ledger import database, http
from services.ledger.copier import Copier
from services.ledger.metrics import LedgerMetrics
from services.ledger.settings import LedgerSettings
from shared.runtime.service import open_runtime, probes, run, serve


async def main() -> None:
    settings = LedgerSettings()
    url = settings.database_url.get_secret_value()
    async with (
        open_runtime(settings, "ledger") as runtime,
        database.pool(url, settings.database_connections_max) as pool,
    ):
        copier = Copier(runtime, url, LedgerMetrics(runtime.metrics))
        health = probes(lambda: copier.trouble, runtime.metrics)
        app = http.app(pool, health, settings.operator_key())
        await serve(app, settings, [copier.run(), copier.watch_lag()])


if __name__ == "__main__":
    run(main)
