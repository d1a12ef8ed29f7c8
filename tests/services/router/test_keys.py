"""Whose key is whose."""

from hashlib import sha256

import pytest
from starlette.requests import Request

from services.router import headers
from services.router.keys import DEFAULT, read_keys


def test_a_key_belongs_to_its_tenant() -> None:
    digest = sha256(b"hidden").hexdigest().encode()
    keys = read_keys([b"plain", b"acme  s3cret", b"", b"corp sha256:" + digest, b"* gateway"])
    found = [keys.tenant(key) for key in (b"plain", b"s3cret", b"hidden", b"gateway", b"other", b"", digest)]
    assert found == [DEFAULT, "acme", "corp", "*", None, None, None]


def test_a_key_is_bytes_whatever_alphabet_it_is_in() -> None:
    key = "schlüssel".encode()
    scope = {"type": "http", "headers": [(b"authorization", b"Bearer " + key)]}
    assert headers.tenant(Request(scope), read_keys([b"acme " + key])) == "acme"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([b"a b k3y"], "line 1 has 3 words"),
        ([b"one", b"sl/ash k3y"], "line 2: a tenant has"),
        ([b"acme sha256:12"], "line 1: 64 hexadecimal digits"),
        ([b"acme k3y", b"corp k3y"], "line 2: the key is another tenant's"),
    ],
)
def test_a_bad_line_is_named_and_not_shown(lines: list[bytes], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        read_keys(lines)
    assert "k3y" not in str(refused.value)
