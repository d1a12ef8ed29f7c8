"""Which files hold a model's weights, and that they are whole: found out before any process is started. Torch-free.

A Hugging Face directory has its weights in `model.safetensors`, or in several files that `model.safetensors.index.json` names.
A file begins with eight bytes, the length of its header, and the header: a JSON object of tensors with their places in the
rest of the file.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from services.worker.engine.protocol import EngineError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LENGTH_BYTES = 8
HEADER_BYTES_MAX = 100_000_000
"""The format's own limit."""

NOT_AS_WRITTEN = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What comes of reading JSON that is none, is something else than we take it for, or is nested without end."""

NAMED_MAX = 3
"""Names in a message; a checkpoint has thousands."""


def weight_files(model_dir: Path) -> tuple[Path, ...]:
    """The files, in name order: others that lie beside them are no part of the model. EngineError names what is missing, cut
    off, or something else than safetensors."""
    index = model_dir / INDEX
    if not index.is_file():
        single = model_dir / SINGLE
        if not single.is_file():
            raise EngineError(f"model_dir {model_dir}: holds neither {SINGLE} nor {INDEX}")
        tensor_names(single)
        return (single,)
    listed: dict[str, set[str]] = defaultdict(set)
    for tensor, name in _weight_map(index).items():
        listed[name].add(tensor)
    files = {name: model_dir / name for name in sorted(listed)}
    if missing := [name for name, file in files.items() if not file.is_file()]:
        raise EngineError(f"model_dir {model_dir}: {INDEX} names {len(files)} files, but {_some(missing)} missing")
    for name, file in files.items():
        if strangers := listed[name] - tensor_names(file):
            raise EngineError(
                f"{file}: {INDEX} says that it holds tensors which it does not: {_some(strangers)} missing"
            )
    return tuple(files.values())


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        weight_map: Mapping[str, str] = json.loads(index.read_bytes())["weight_map"]
        if weight_map and all(Path(name).name == name for name in weight_map.values()):
            return weight_map
    except (OSError, *NOT_AS_WRITTEN) as error:
        raise EngineError(f"{index}: not readable as an index ({error!r})") from error
    raise EngineError(f"{index}: weight_map must name files of its own directory")


def tensor_names(file: Path) -> set[str]:
    """What the header says the file holds. EngineError if it is no safetensors file or does not end where it should."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(LENGTH_BYTES), "little")
        if not 0 < header_bytes <= min(HEADER_BYTES_MAX, size):
            raise EngineError(f"{file}: not a safetensors file (is it a pointer of Git LFS, or cut off?)")
        header = opened.read(header_bytes)
    try:
        tensors: dict[str, Any] = json.loads(header)
        tensors.pop("__metadata__", None)
        end = LENGTH_BYTES + header_bytes + max((each["data_offsets"][1] for each in tensors.values()), default=0)
    except NOT_AS_WRITTEN as error:
        raise EngineError(f"{file}: not a safetensors file: its header cannot be read ({error!r})") from error
    if size != end:
        raise EngineError(f"{file}: has {size} bytes, but its header describes {end}; copy it again")
    return set(tensors)


def _some(names: Iterable[str]) -> str:
    """The first few of them, and a verb that fits."""
    ordered = sorted(names)
    more = f" and {len(ordered) - NAMED_MAX} more" if len(ordered) > NAMED_MAX else ""
    return f"{', '.join(ordered[:NAMED_MAX])}{more} {'is' if len(ordered) == 1 else 'are'}"
