"""`python -m tests.contracts.golden` writes the golden files that are missing. It never changes one: stored events are for
ever.

`<type>-v<version>.json` is an event as it is written today. Before a field is added to a version, its file is kept as
`<type>-v<version>-<what-is-added>.json`, then written anew; the old form must always be read.
"""

from pathlib import Path

from shared.contracts.codec import encode
from shared.contracts.envelope import EventData
from tests.contracts.examples import ALL, example

FOLDER = Path(__file__).parent / "golden"


def path_of(cls: type[EventData]) -> Path:
    return FOLDER / f"{cls.TYPE}-v{cls.VERSION}.json"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for _, event_class in ALL:
        if not path_of(event_class).exists():
            path_of(event_class).write_bytes(encode(example(event_class)))
