"""A fault from its begin to its end."""

import asyncio

from simulation.faults.place import Place
from simulation.faults.scenario import Fault
from simulation.faults.scene import Scene


async def befall(scene: Scene, fault: Fault) -> None:
    """Returns when it is over."""
    targets = [scene.places[fault.target]] if fault.target else list(scene.places.values())
    await asyncio.sleep(fault.at_s)
    _begin(scene, fault, targets)
    await asyncio.sleep(fault.lasts_s)
    _end(scene, fault, targets)


def _begin(scene: Scene, fault: Fault, targets: list[Place]) -> None:
    match fault.kind:
        case "kill" | "stop":
            for place in targets:
                place.take_down(orderly=fault.kind == "stop")
        case "cut" | "outage":
            for place in targets:
                place.cut()
        case "engine-death":
            for place in targets:
                place.kill_engine()
        case "straggler":
            for place in targets:
                place.slow_down(fault.strength)
        case "lost-copy":
            for place in targets:
                place.lose_copies(lost=True)
        case "database-away":
            scene.record.away += 1
        case _:
            (targets[0] if fault.target else scene.outside).weather.begin(fault.kind, fault.strength)


def _end(scene: Scene, fault: Fault, targets: list[Place]) -> None:
    match fault.kind:
        case "kill" | "stop":
            for place in targets:
                place.bring_up()
        case "cut" | "outage":
            for place in targets:
                place.mend()
        case "engine-death":
            pass  # the agent has begun the next life by itself
        case "straggler":
            for place in targets:
                place.slow_down(1.0)
        case "lost-copy":
            for place in targets:
                place.lose_copies(lost=False)
        case "database-away":
            scene.record.away -= 1
        case _:
            (targets[0] if fault.target else scene.outside).weather.end(fault.kind)
