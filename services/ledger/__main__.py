"""`python -m services.ledger`"""

from services.ledger import database, http
from services.ledger.copier import Copier
from services.ledger.metrics import LedgerMetrics
from services.ledger.notary import Notary
from services.ledger.settings import LedgerSettings
from services.ledger.voice import Voice
from shared.runtime.service import open_runtime, probes, run, serve


async def main() -> None:
    settings = LedgerSettings()
    url = settings.database_url.get_secret_value()
    async with (
        open_runtime(settings, "ledger") as runtime,
        database.pool(url, settings.database_connections_max) as pool,
    ):
        voice = Voice(runtime)
        copier = Copier(runtime, url, voice, LedgerMetrics(runtime.metrics))
        notary = Notary(copier, voice, settings, runtime.clock)
        health = probes(lambda: copier.trouble, runtime.metrics)
        app = http.app(pool, health, settings.operator_key())
        await serve(app, settings, [copier.run(), copier.watch_lag(), notary.run()])


if __name__ == "__main__":
    run(main)
