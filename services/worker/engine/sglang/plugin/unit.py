"""One unit's part in a switch: what each rank of it does when a verb arrives, between two steps of its scheduler."""

import hashlib
import logging
import os
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from sglang.srt.managers.io_struct import SetInternalStateReqOutput
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import set_random_seed

from services.worker.engine.sglang.plugin import paths, tree, wire
from services.worker.engine.sglang.plugin.ballot import Ballot, Decision, Store
from services.worker.engine.sglang.plugin.mailbox import Mailbox
from services.worker.engine.sglang.plugin.places import Place, merges, place, touched
from services.worker.engine.sglang.plugin.rebinding import Groups, unit, units
from services.worker.engine.sglang.plugin.wire import Commit, Evict, InForce, Prepare, Release
from shared.model.lattice import Composition, Group

logger = logging.getLogger(__name__)


class Unit:
    """This rank's. Hooks of its scheduler; does nothing in other processes."""

    def __init__(self, groups: Groups, mailbox: Mailbox, connect: Callable[[], Store]) -> None:
        self._groups = groups
        self._mailbox = mailbox
        self._connect = connect
        self._store: Store | None = None
        self._prepared: Prepare | None = None
        self._group: Group | None = None
        self._log: paths.PathLog | None = None
        self._epoch = 0
        self._steps = 0
        self._digest = hashlib.sha256()

    def verb(self, original: Callable[..., Any], scheduler: Any, message: Any) -> Any:
        """Around `Scheduler.set_internal_state`. The answer is one truth value."""
        numbers = message.server_args
        if "vertumnus_op" not in numbers:
            return original(scheduler, message)
        answer = False
        try:
            verb, in_force = wire.decode(numbers, units()), wire.told(numbers, units())
        except ValueError as error:
            logger.warning("vertumnus: refused a verb: %s", error)
        else:
            assert verb is not None, "it names an operation"
            if not isinstance(verb, Evict):
                self._epoch = max(self._epoch, verb.epoch)
            answer = self._carry_out(scheduler, verb, in_force)
        if numbers["vertumnus_op"] == wire.Op.COMMIT:
            self._mailbox.handled_commit()
        scheduler.kv_events_publisher.publish_kv_events()  # by itself it would wait for the next batch
        return SetInternalStateReqOutput(updated=answer)

    def state(self, original: Callable[..., Any], scheduler: Any, message: Any) -> Any:
        """Around `Scheduler.get_internal_state`: adds what `verbs.UnitState` has."""
        output = original(scheduler, message)
        group = self._here()
        size = tree.sizes(scheduler.tree_cache, scheduler.token_to_kv_pool_allocator)
        output.internal_state["vertumnus"] = {
            "unit": unit(),
            "first_unit": group.first_rank,
            "degree": group.degree,
            "epoch": self._epoch,
            "pid": os.getpid(),
            "steps": self._steps,
            "digest": self._digest.hexdigest()[:16],
            "total_tokens": size.total,
            "evictable_tokens": size.evictable,
            "free_tokens": size.free,
        }
        return output

    def step(self, original: Callable[..., Any], scheduler: Any, batch: Any, *more: Any, **named: Any) -> Any:
        """Around `Scheduler.run_batch`: what decides the next steps goes into the digest, which mates have alike."""
        extends = batch.forward_mode.is_extend()
        self._steps += 1
        facts = (
            str(batch.forward_mode),
            [request.rid for request in batch.reqs],
            list(batch.prefix_lens or ()) if extends else None,
            tree.sizes(scheduler.tree_cache, scheduler.token_to_kv_pool_allocator),
        )
        self._digest.update(repr(facts).encode())
        return original(scheduler, batch, *more, **named)

    def inserted(self, original: Callable[..., Any], cache: Any, params: Any) -> Any:
        """Around `UnifiedRadixCache.insert`."""
        tree.log_key(self._logged(cache), params.key)
        return original(cache, params)

    def sync(self, original: Callable[..., Any], adapter: Any, batch: Any) -> Any:
        """Around `SchedulerDPAttnAdapter.prepare_mlp_sync_batch`: a unit without work would run empty steps in a tight
        loop, as company for units whose feed-forward layers it shares. Here it shares none."""
        return None if batch is None else original(adapter, batch)

    def _carry_out(self, scheduler: Any, verb: wire.Verb, in_force: InForce) -> bool:
        match verb:
            case Prepare():
                return self._prepare(scheduler, verb, in_force)
            case Commit():
                return self._commit(scheduler, verb, in_force)
            case Release():
                return True  # what was prepared cannot be committed any more: the controller calls it lapsed
            case Evict():
                if not verb.units >> unit() & 1:
                    return False
                return tree.evict(scheduler.tree_cache, self._logged(scheduler.tree_cache), verb.blocks) > 0

    def _prepare(self, scheduler: Any, verb: Prepare, in_force: InForce) -> bool:
        """Whether this unit would switch now. Nothing changes."""
        if in_force.lapsed or place(in_force.composition, unit()).group != self._here():
            return False
        self._prepared = verb
        return unit() not in touched(in_force.composition, verb.composition) or bool(scheduler.is_fully_idle())

    def _commit(self, scheduler: Any, verb: Commit, in_force: InForce) -> bool:
        """Vote, decide, switch. All that can fail or wait comes before the decision; after it there is local work only."""
        if in_force.lapsed:
            return False
        old = in_force.composition
        touching = touched(old, verb.composition)
        if unit() not in touching:
            return True  # serves on, and waits for nobody
        parallel = get_parallel()
        tp = parallel.attn_tp_size
        ballot = Ballot(self._at_store(), verb.epoch, [each * tp + rank for each in touching for rank in range(tp)])
        prepared, self._prepared = self._prepared, None
        willing = (
            prepared is not None
            and (prepared.epoch, prepared.composition) == (verb.epoch, verb.composition)
            and bool(scheduler.is_fully_idle())
        )
        began_s = time.monotonic()
        found = tree.snapshot(scheduler.tree_cache, self._logged(scheduler.tree_cache)) if willing else []
        ballot.vote(parallel.tp_rank, paths.offer([each.path for each in found]) if willing else None)
        offers = ballot.votes(verb.vote_s) if willing else None
        decision = ballot.decide(Decision.ABORT if offers is None else Decision.COMMIT)
        decided_s = time.monotonic()
        if decision is Decision.COMMIT:
            offers = offers or ballot.votes(
                verb.vote_s
            )  # too late to see them, in time to be outvoted: they are all there
            if offers is None:
                _give_up("the store has lost the votes of a decided epoch")
            self._switch(scheduler, verb, old, found, offers)
        ballot.done()
        logger.info(
            "vertumnus: epoch %d: %s; votes %.1f ms, switch %.1f ms",
            verb.epoch,
            decision,
            1e3 * (decided_s - began_s),
            1e3 * (time.monotonic() - decided_s),
        )
        return decision is Decision.COMMIT

    def _switch(
        self, scheduler: Any, verb: Commit, old: Composition, found: list[tree.Resident], offers: dict[int, list[bytes]]
    ) -> None:
        """The others have switched or will: there is no way back, and a rank that cannot follow ends the server."""
        there = place(verb.composition, unit())
        try:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # communicators of two groups must not overlap on one device
            if merges(old, verb.composition, there.group):
                self._merge(scheduler, verb.epoch, there, found, offers)
            self._groups.bind(scheduler, there)
        except Exception:
            logger.exception("vertumnus: epoch %d was decided and cannot be carried out", verb.epoch)
            _give_up("a decided switch failed")
        self._group = there.group
        self._steps, self._digest = 0, hashlib.sha256()

    def _merge(
        self, scheduler: Any, epoch: int, there: Place, found: list[tree.Resident], offers: dict[int, list[bytes]]
    ) -> None:
        """From here on mates see equal requests, so whatever else steers a schedule or a choice must be equal too."""
        parallel = get_parallel()
        mates = {mate: offers[mate * parallel.attn_tp_size + parallel.attn_tp_rank] for mate in there.group.ranks}
        kept, dropped = tree.rebuild(
            scheduler.tree_cache,
            scheduler.token_to_kv_pool_allocator,
            self._logged(scheduler.tree_cache),
            found,
            paths.agree(mates, there.group.first_rank),
        )
        logger.info("vertumnus: epoch %d: %d tokens stay in the tree, %d go", epoch, kept, dropped)
        set_random_seed(scheduler.random_seed + epoch)  # each rank draws by itself
        scheduler.new_token_ratio_tracker.reset()
        scheduler.last_batch = None

    def _here(self) -> Group:
        """The group of this unit, which begins on its own."""
        return self._group or Group(unit(), 1)

    def _logged(self, cache: Any) -> paths.PathLog:
        if self._log is None:
            pool_tokens = int(cache.token_to_kv_pool_allocator.size)
            self._log = paths.PathLog(int(cache.page_size), paths.POOLS_LOGGED * pool_tokens)
        return self._log

    def _at_store(self) -> Store:
        if self._store is None:
            self._store = self._connect()
        return self._store


def _give_up(reason: str) -> NoReturn:
    """SGLang's watchdog ends the server when a scheduler is gone."""
    logger.critical("vertumnus: %s", reason)
    os._exit(71)
