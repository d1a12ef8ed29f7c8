"""The prefixes that a unit's tree was given, by SGLang's own block hashes, and what several units have in common.

A page's digest is SHA-256 over the digest before it and the page's tokens as 32-bit little-endian numbers, as in
SGLang's KV events, whose block hash is its first eight bytes as a signed big-endian number. A namespace (LoRA, cache
salt) begins the chain: a salt by itself as in events, so that its blocks can be named from outside, as agents do; of any
other namespace the blocks have other hashes in events, and are not evicted by hash.
"""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OFFER_BYTES = 16
"""Of a page's digest, told to other units: 128 bits, and half as much to send."""

PATHS_MAX = 1 << 16
POOLS_LOGGED = 4
"""Tokens of all logged paths, in pools of the unit: paths share prefixes, and some are gone from the tree. A path that is
forgotten is not kept by the next merge, which costs its prefix and no more."""

Namespace = tuple[str | None, str | None]
"""Extra key and cache salt."""

NOWHERE: Namespace = (None, None)
SALT_TAG = b"sglang-cache-salt-v1\0"
"""What SGLang 0.5.23 puts before a salt (`mem_cache/utils.py`)."""


@dataclass(frozen=True, slots=True)
class Path:
    """A prefix of whole pages. `digests` has one for each page."""

    namespace: Namespace
    tokens: "array[int]"
    digests: tuple[bytes, ...]

    def cut(self, pages: int, page: int) -> "Path":
        """Its first `pages` pages."""
        return Path(self.namespace, self.tokens[: pages * page], self.digests[:pages])


def path_of(namespace: Namespace, tokens: "array[int]", page: int) -> Path:
    """The path of the whole pages of `tokens`."""
    pages = len(tokens) // page
    digest = _beginning(namespace)
    digests = []
    octets = memoryview(tokens).cast("B")
    size = page * tokens.itemsize
    for index in range(pages):
        digest = hashlib.sha256(digest + octets[index * size : (index + 1) * size]).digest()
        digests.append(digest)
    return Path(namespace, tokens[: pages * page], tuple(digests))


def _beginning(namespace: Namespace) -> bytes:
    extra_key, salt = namespace
    if namespace == NOWHERE:
        return b""
    if extra_key is None and salt is not None:
        return hashlib.sha256(SALT_TAG + salt.encode()).digest()
    return hashlib.sha256(repr(namespace).encode()).digest()


def block_hash(digest: bytes) -> int:
    """As a KV event names the block."""
    return int.from_bytes(digest[:8], "big", signed=True)


class PathLog:
    """Paths in the order of their last insertion. One that extends another takes its place."""

    def __init__(self, page: int, tokens_max: int, paths_max: int = PATHS_MAX) -> None:
        self.page = page
        self._paths: dict[bytes, Path] = {}
        self._tokens = 0
        self._paths_max = paths_max
        self._tokens_max = tokens_max

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Oldest first."""
        return tuple(self._paths.values())

    def add(self, namespace: Namespace, tokens: "array[int]") -> None:
        """A key was inserted into the tree."""
        path = path_of(namespace, tokens, self.page)
        if not path.digests:
            return
        for digest in path.digests:
            if (shorter := self._paths.pop(digest, None)) is not None:
                self._tokens -= len(shorter.tokens)
        self._paths[path.digests[-1]] = path
        self._tokens += len(path.tokens)
        while len(self._paths) > self._paths_max or (self._tokens > self._tokens_max and len(self._paths) > 1):
            oldest = self._paths.pop(next(iter(self._paths)))
            self._tokens -= len(oldest.tokens)

    def replace(self, paths: Sequence[Path]) -> None:
        """The tree was rebuilt from exactly these."""
        self._paths = {path.digests[-1]: path for path in paths if path.digests}
        self._tokens = sum(len(path.tokens) for path in self._paths.values())


def offer(paths: Sequence[Path]) -> list[bytes]:
    """What a unit has, for its mates to be: page digests path by path, in the order of the log."""
    return [b"".join(digest[:OFFER_BYTES] for digest in path.digests) for path in paths]


def agree(offers: Mapping[int, Sequence[bytes]], leader: int) -> list[bytes]:
    """The paths that every unit has, each by the digest of its last page, in the leader's order. Equal for equal
    offers, so every unit of a group comes to the same list by itself."""
    common = set.intersection(*({page for path in paths for page in _pages(path)} for paths in offers.values()))
    kept: dict[bytes, None] = {}
    for path in offers[leader]:
        last = None
        for page in _pages(path):
            if page not in common:
                break
            last = page
        if last is not None:
            kept.setdefault(last)
    return list(kept)


def _pages(path: bytes) -> list[bytes]:
    return [path[at : at + OFFER_BYTES] for at in range(0, len(path), OFFER_BYTES)]
