"""Parameters as an operator writes them."""

from collections.abc import Sequence


def parse_changes(texts: Sequence[str]) -> dict[str, str]:
    """`lam=0` and the like, by name. Errors: ValueError."""
    changes: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{text}: write it as name=value")
        if name in changes:
            raise ValueError(f"{text}: {name} is given twice")
        changes[name] = value
    return changes
