"""A rank process: the loop that carries out the frontend's commands. Forked from the zygote, it lives until its socket closes.

Crash-only: what a rank did not expect, it reports and ends. Its peers' collectives may be half done then, so the frontend
gives up the engine and starts another.
"""

import os
import select
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from services.worker.engine.protocol import EngineError
from services.worker.engine.torch.contexts import Contexts
from services.worker.engine.torch.decode import DecodeRank
from services.worker.engine.torch.devices import device_of
from services.worker.engine.torch.groups import Groups
from services.worker.engine.torch.kv_device import allocate, opened, share
from services.worker.engine.torch.kv_layout import ContextLayout, KvLayout
from services.worker.engine.torch.kv_memory import KvMemory
from services.worker.engine.torch.messages import (
    Abort,
    Allocated,
    Attach,
    Begin,
    Command,
    Commit,
    Decode,
    Done,
    End,
    Failed,
    Loading,
    Prefill,
    Prefilled,
    Prepare,
    Refused,
    Reply,
    frame,
    receive,
)
from services.worker.engine.torch.model import Model
from services.worker.engine.torch.model_config import read_config
from services.worker.engine.torch.move_messages import BeginMoving
from services.worker.engine.torch.mover import serve_moves
from services.worker.engine.torch.prefill import prefill
from services.worker.engine.torch.weights import Weights
from shared.model.lattice import Group


def run_rank(control: socket.socket, files: Sequence[int]) -> NoReturn:
    """The whole life of a rank process. `files` are the descriptors of all ranks' memory, in rank order: pools of KV, then
    decode ranks' contexts. The file behind them is where ranks meet to form their groups; a mover has none."""
    status = 1
    try:
        with torch.inference_mode():
            _serve(control, files)
        status = 0
    except ConnectionError:
        pass  # the frontend is gone, and nobody is left to be told
    except EngineError as error:  # what is wrong with the model or a command, in words that need no trace-back
        _fail(control, str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, the frontend must hear of it before the process ends
        traceback.print_exc()
        _fail(control, f"{type(error).__name__}: {error}")
    finally:
        sys.stderr.flush()
        # Not sys.exit: tearing down a process group waits for peers, which may be gone.
        os._exit(status)


def _fail(control: socket.socket, reason: str) -> None:
    with suppress(ConnectionError):
        control.sendall(frame(Failed(reason)))


def _serve(control: socket.socket, files: Sequence[int]) -> None:
    begin = _command(control)
    if begin is None:
        return
    if isinstance(begin, BeginMoving):
        serve_moves(control, begin, files)
        return
    assert isinstance(begin, Begin), f"a rank's first command is Begin, not {begin.kind}"
    device = torch.device(device_of(begin.rank, begin.gpus))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    config = read_config(Path(begin.model_dir))
    weights = Weights(Path(begin.model_dir), config.dtype, lambda *read: control.sendall(frame(Loading(*read))), device)
    model = Model(config, weights, begin.context_tokens)
    model.check()
    layout = KvLayout.of(config, begin.block_tokens, begin.blocks_per_rank)
    if begin.rank < begin.prefill_ranks:
        groups = Groups(begin.rank, begin.prefill_ranks, files[-1], begin.gpus)
        attached = _attached(control, begin, layout, device)
        if attached is None:
            return
        pools = files[: begin.prefill_ranks]
        prefill_rank = _PrefillRank(begin.rank, model, KvMemory(layout, pools, attached.pools, device), groups)
        control.sendall(frame(Done(attached.n)))
        while (command := _command(control)) is not None:
            control.sendall(frame(prefill_rank.handle(command)))
    else:
        context_layout = ContextLayout.of(layout, begin.context_tokens, begin.sequences)
        pool = allocate(context_layout.file_bytes, device) if begin.gpus else None
        decode_rank = DecodeRank(model, Contexts(context_layout, files[begin.rank], pool))
        control.sendall(frame(Done(begin.n) if pool is None else Allocated(begin.n, share(pool))))
        _serve_decode(control, decode_rank)


class _Attached(NamedTuple):
    """The slots of every rank where they are in GPU memory, and the number of the command that says the rank is ready."""

    n: int
    pools: Sequence[Tensor]


def _attached(control: socket.socket, begin: Begin, layout: KvLayout, device: torch.device) -> _Attached | None:
    """Allocate this prefill rank's pool and open the others'. None if the frontend is gone. Without GPUs there is nothing to
    do."""
    if not begin.gpus:
        return _Attached(begin.n, ())
    own = allocate(layout.slots_bytes, device)
    control.sendall(frame(Allocated(begin.n, share(own))))
    command = _command(control)
    if command is None:
        return None
    assert isinstance(command, Attach), f"a rank with a GPU is attached before anything else, but got {command.kind}"
    pools = [own if rank == begin.rank else opened(shared) for rank, shared in enumerate(command.pools)]
    return _Attached(command.n, pools)


def _command(control: socket.socket) -> Command | None:
    message = receive(control)
    assert not isinstance(message, Reply), f"the frontend sends commands, not {message}"
    return message


class _PrefillRank:
    """One rank of the lattice: which epoch and group it serves, and which it is ready to."""

    def __init__(self, rank: int, model: Model, memory: KvMemory, groups: Groups) -> None:
        self._rank, self._model, self._memory, self._groups = rank, model, memory, groups
        self._epoch, self._group = 0, Group(rank, 1)
        self._prepared: tuple[int, Group] | None = None
        self._prepared_s = 0.0

    def handle(self, command: Command) -> Reply:
        match command:
            case Prepare():
                return self._prepare(command)
            case Commit():
                return self._commit(command)
            case Abort():
                return self._abort(command)
            case Prefill():
                return self._prefill(command)
            case _:
                raise TypeError(f"a prefill rank knows no {command.kind}")

    def _prepare(self, command: Prepare) -> Reply:
        if command.epoch <= self._epoch:
            return self._refused(command)
        if not self._groups.has(command.group):
            return Refused(command.n, f"rank {self._rank}: {command.group} is not one of its groups")
        self._prepared, self._prepared_s = (command.epoch, command.group), time.perf_counter()
        return Done(command.n)

    def _commit(self, command: Commit) -> Reply:
        if self._prepared is None or self._prepared[0] != command.epoch:
            return Refused(command.n, f"rank {self._rank}: epoch {command.epoch} was not prepared")
        (self._epoch, self._group), self._prepared = self._prepared, None
        return Done(command.n, time.perf_counter() - self._prepared_s)

    def _abort(self, command: Abort) -> Reply:
        self._prepared = None
        return Done(command.n)

    def _prefill(self, command: Prefill) -> Reply:
        if command.epoch != self._epoch:
            return self._refused(command)
        tokens = prefill(command, self._group, self._rank, self._model, self._memory, self._groups)
        return Prefilled(command.n, tokens)

    def _refused(self, command: Prepare | Prefill) -> Refused:
        return Refused(
            command.n, f"rank {self._rank}: {command.kind} of epoch {command.epoch}, but {self._epoch} is served"
        )


def _serve_decode(control: socket.socket, rank: DecodeRank) -> None:
    """One decode step between looks at the socket; asleep on the socket when there is nothing to decode."""
    while True:
        if rank.idle or select.select([control], [], [], 0)[0]:
            command = _command(control)
            if command is None:
                return
            reply = _decode_command(command, rank)
            if reply is not None:
                control.sendall(frame(reply))
        else:
            control.sendall(b"".join(map(frame, rank.step())))


def _decode_command(command: Command, rank: DecodeRank) -> Reply | None:
    match command:
        case Decode():
            rank.decode(command)
            return None
        case End():
            rank.end(command.sequence)
            return Done(command.n)
        case _:
            raise TypeError(f"a decode rank knows no {command.kind}")
