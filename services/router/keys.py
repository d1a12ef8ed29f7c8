"""Who asks: API keys and the tenants that they belong to.

One key a line: `KEY`, or `TENANT KEY`; in the place of the key may stand `sha256:` and the hex digest of it, so that the file
need not hold what it protects. A key of `*` is that of a gateway which names the tenant of each request itself.
"""

import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import NamedTuple

from shared.contracts.ids import TenantId
from shared.model.tenants import OTHERS

DEFAULT = TenantId("default")
"""Whose requests are that belong to nobody else."""

DIGEST_PREFIX = b"sha256:"
TENANT = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


class Keys(NamedTuple):
    """Tenants by the digests of their keys: to look one up tells nobody how much of a guess was right."""

    tenant_of: Mapping[bytes, TenantId]

    def __bool__(self) -> bool:
        return bool(self.tenant_of)

    def tenant(self, key: bytes) -> TenantId | None:
        """Whose key it is; None if nobody's."""
        return self.tenant_of.get(sha256(key).digest())


NO_KEYS = Keys({})


def read_keys(lines: Iterable[bytes]) -> Keys:
    """Errors: ValueError names the line, and nothing of what is in it."""
    found: dict[bytes, TenantId] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            continue
        if len(words) > 2:
            raise ValueError(f"line {number} has {len(words)} words; a tenant and a key are two")
        tenant = TenantId(words[0].decode("latin-1")) if len(words) == 2 else DEFAULT
        if tenant != OTHERS and not TENANT.fullmatch(tenant):
            raise ValueError(f"line {number}: a tenant has 1-64 letters, digits or any of '_.@-', or is '*'")
        digest = _digest(words[-1])
        if digest is None:
            raise ValueError(f"line {number}: 64 hexadecimal digits are needed behind 'sha256:'")
        if found.setdefault(digest, tenant) != tenant:
            raise ValueError(f"line {number}: the key is another tenant's already")
    return Keys(found)


def _digest(key: bytes) -> bytes | None:
    if not key.startswith(DIGEST_PREFIX):
        return sha256(key).digest()
    digits = key.removeprefix(DIGEST_PREFIX).decode("latin-1")
    return bytes.fromhex(digits) if re.fullmatch(r"[0-9a-fA-F]{64}", digits) else None
