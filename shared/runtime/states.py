"""The state of a fold as JSON, and back: whatever lies in it, shared parts and circles included.

States are plain data: numbers, text, bytes, containers, dataclasses, named tuples, pydantic models, and classes that declare by
`__slots__` what they hold, which is nothing but such. Each object is written once and named by its number, so what two places
share they share again. A field of a dataclass that does not count when two are compared is made of the others
(`compare=False`): it is left out, and begins anew with its default.

Reading makes objects and sets their fields; no constructor, and nothing else that is named in the bytes, is called. Only
classes of the packages that the reader names exist for it, so a file from elsewhere can be wrong, but not do anything. A class
whose fields are others now makes the state unreadable: whoever kept it folds the log instead.
"""

import sys
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from math import isfinite
from typing import Any
from uuid import UUID

import orjson
from pydantic import BaseModel, ValidationError

from shared.contracts.codec import BadEvent, decode, encode
from shared.contracts.envelope import Envelope

INTEGER_MAX = 2**63 - 1

_SCALARS = (type(None), bool, str)
_SEQUENCES: dict[str, type[Any]] = {"tuple": tuple, "list": list, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, type[Any]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_KIND_OF = {cls: kind for kind, cls in (_SEQUENCES | _MAPPINGS).items()}
_ENDLESS = -1


class BadState(ValueError):
    """The bytes are no state, or one of other classes than those here. The message names the class or the part."""


def freeze(root: Any) -> bytes:
    """The state as JSON. TypeError names a class that is no plain data."""
    return orjson.dumps(_Freezer().document(root))


def thaw(raw: bytes, packages: Iterable[str]) -> Any:
    """A new copy of the state. `packages`: where its classes may come from, which are imported already. Errors: BadState."""
    try:
        document = orjson.loads(raw)
        return _Thawer(document["classes"], document["objects"], tuple(packages)).root()
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise error if isinstance(error, BadState) else BadState(f"no state: {error}") from error


class _Freezer:
    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._classes: dict[str, list[str] | None] = {}
        self._waiting: deque[Any] = deque()
        self._alive: list[Any] = []
        """Ids are only those of objects that live."""

    def document(self, root: Any) -> dict[str, Any]:
        self._value((root,))
        while self._waiting:
            self._objects.append(self._described(self._waiting.popleft()))
        return {"classes": self._classes, "objects": self._objects}

    def _value(self, value: Any) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind is int or kind is float:
            if not isfinite(value) or abs(value) > INTEGER_MAX:
                raise TypeError(f"{value}: a number of a state is finite and of 64 bits")
            return value
        key = value if kind is bytes else id(value)
        if (number := self._numbers.get(key)) is None:
            number = self._numbers[key] = len(self._numbers)
            self._waiting.append(value)
            self._alive.append(value)
        return [number]

    def _values(self, values: Iterable[Any]) -> list[Any]:
        return [self._value(each) for each in values]

    def _described(self, value: Any) -> list[Any]:
        kind = type(value)
        if kind is bytes:
            return ["bytes", b64encode(value).decode()]
        if (name := _KIND_OF.get(kind)) in _SEQUENCES:
            return [name, self._values(value)]
        if name is not None:
            return [name, self._values(value), self._values(value.values())]
        if kind is deque:
            return ["deque", self._values(value), _ENDLESS if value.maxlen is None else value.maxlen]
        if kind is UUID:
            return ["uuid", str(value)]
        if kind is Envelope:
            return ["event", encode(value).decode()]
        if isinstance(value, Enum):
            return ["enum", self._class(kind, None), value.value]
        if isinstance(value, BaseModel):
            return ["model", self._class(kind, None), value.model_dump_json()]
        if isinstance(value, tuple):
            return ["named", self._class(kind, _layout(kind)), self._values(value)]
        if (names := _layout(kind)) is None:
            raise TypeError(f"{kind.__qualname__} is no plain data, or does not declare what it holds")
        return ["object", self._class(kind, names), names, self._values(getattr(value, each) for each in names)]

    def _class(self, cls: type[Any], layout: list[str] | None) -> str:
        name = f"{cls.__module__}:{cls.__qualname__}"
        self._classes[name] = layout
        return name


class _Thawer:
    """Objects that can be empty are made empty and filled at the end; the others when they are met."""

    def __init__(
        self, classes: dict[str, list[str] | None], objects: list[list[Any]], packages: tuple[str, ...]
    ) -> None:
        self._objects = objects
        self._classes = {name: _class(name, layout, packages) for name, layout in classes.items()}
        self._made: dict[int, Any] = {}
        self._fill: list[Callable[[], None]] = []
        self._fill_last: list[Callable[[], None]] = []

    def root(self) -> Any:
        (root,) = self._at(0)
        # Filling meets further objects. Fields go before containers: a key's hash may be made of them.
        while self._fill or self._fill_last:
            (self._fill or self._fill_last).pop()()
        return root

    def _value(self, value: Any) -> Any:
        return self._at(value[0]) if type(value) is list else value

    def _values(self, values: list[Any]) -> Iterator[Any]:
        return (self._value(each) for each in values)

    def _at(self, number: int) -> Any:
        if number not in self._made:
            self._made[number] = self._make(*self._objects[number])
        return self._made[number]

    def _make(self, kind: str, *parts: Any) -> Any:
        match kind, *parts:
            case "bytes", str(text):
                return b64decode(text, validate=True)
            case "tuple" | "frozenset", [*values]:
                return _SEQUENCES[kind](self._values(values))
            case "list" | "set", [*values]:
                empty = _SEQUENCES[kind]()
                self._fill_last.append(lambda: (empty.extend if kind == "list" else empty.update)(self._values(values)))
                return empty
            case "dict" | "ordered" | "counter", [*keys], [*values]:
                made = _MAPPINGS[kind]()
                self._fill_last.append(lambda: self._fill_mapping(made, keys, values))
                return made
            case "deque", [*values], int(most):
                queue: deque[Any] = deque(maxlen=None if most == _ENDLESS else most)
                self._fill_last.append(lambda: queue.extend(self._values(values)))
                return queue
            case "uuid", str(text):
                return UUID(text)
            case "event", str(text):
                return _event(text)
            case "enum", str(name), value:
                return self._classes[name](value)
            case "model", str(name), str(text):
                return _model(self._classes[name], text)
            case "named", str(name), [*values]:
                return tuple.__new__(self._classes[name], self._values(values))
            case "object", str(name), [*names], [*values]:
                return self._object(self._classes[name], names, values)
            case _:
                raise BadState(f"{kind!r} is no kind of object")

    def _fill_mapping(self, made: Any, keys: list[Any], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            made[self._value(key)] = self._value(value)

    def _object(self, cls: type[Any], names: list[str], values: list[Any]) -> Any:
        if names != _layout(cls):
            raise BadState(f"{cls.__qualname__}: an object of it has the fields {names}")
        made = object.__new__(cls)

        def fill() -> None:
            for name, value in zip(names, values, strict=True):
                object.__setattr__(made, name, self._value(value))
            for each in _derived(cls):
                object.__setattr__(made, each.name, _default(each))

        self._fill.append(fill)
        return made


def _layout(cls: type[Any]) -> list[str] | None:
    """The fields that a class declares and that are not made of others; None where it declares none."""
    if is_dataclass(cls):
        return [each.name for each in fields(cls) if each.compare]
    if hasattr(cls, "_fields"):
        return list(cls._fields)
    return [name for each in cls.__mro__ for name in vars(each).get("__slots__", ())] or None


def _derived(cls: type[Any]) -> Iterator[Field[Any]]:
    return (each for each in fields(cls) if not each.compare) if is_dataclass(cls) else iter(())


def _default(derived: Field[Any]) -> Any:
    return derived.default if derived.default_factory is MISSING else derived.default_factory()


def _class(name: str, layout: list[str] | None, packages: tuple[str, ...]) -> type[Any]:
    module, _, path = name.partition(":")
    if not any(module == each or module.startswith(f"{each}.") for each in packages):
        raise BadState(f"{name}: no class of a state")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or found.__module__ != module:
        raise BadState(f"{name}: there is no such class (any longer)")
    if layout != (None if issubclass(found, (BaseModel, Enum)) else _layout(found)):
        raise BadState(f"{name}: it has the fields {_layout(found)} here, and had {layout}")
    return found


def _event(text: str) -> Envelope:
    try:
        return decode(text.encode())
    except BadEvent as error:
        raise BadState(f"an event of the state: {error}") from error


def _model(cls: type[Any], text: str) -> Any:
    if not issubclass(cls, BaseModel):
        raise BadState(f"{cls.__qualname__} is no model")
    try:
        return cls.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadState(f"{cls.__qualname__}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
