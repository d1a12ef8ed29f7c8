"""Which parameters say nothing as the others are: each policy reads its own. Pure.

`READ_UNDER` has, for every parameter that some policies do not read, the values of others under which somebody decides by it.
What is missing there is always read. A freeze is left out of account: it passes, and then all is as before.
"""

from collections.abc import Mapping
from typing import Any, Final

from shared.model.parameters import Parameters

Values = Mapping[str, tuple[Any, ...]]
"""Of each of these one of its values: all must hold."""

_PAPER: Final[Values] = {"placement_policy": ("paper",)}
_VERTUMNUS: Final[Values] = {"placement_policy": ("vertumnus",)}
_ORDERED: Final[Values] = {**_VERTUMNUS, "worker_order": ("shortest-first",)}
_SHARED: Final[Values] = {"shared": (True,)}
_COPYING: Final[Values] = {"cache_policy": ("paper", "regret")}
_REGRET: Final[Values] = {"cache_policy": ("regret",)}
_ADAPTING: Final[Values] = {"reconfiguration_policy": ("paper", "forecast")}
_THRESHOLDS: Final[Values] = {"reconfiguration_policy": ("paper",)}

READ_UNDER: Final[Mapping[str, tuple[Values, ...]]] = {
    "beta": (_PAPER, {**_VERTUMNUS, "adaptive_beta": (False,)}, {**_VERTUMNUS, **_SHARED}),
    "lam": (_PAPER,),
    "lam_vertumnus": (_VERTUMNUS,),
    # A forecast replays a β that follows the load, also where tenants share the pool.
    "adaptive_beta": ({**_VERTUMNUS, "shared": (False,)}, {**_VERTUMNUS, "reconfiguration_policy": ("forecast",)}),
    "in_flight_prefixes": (_VERTUMNUS,),
    "ordered_queue": (_ORDERED,),
    "prefix_fetch": (_VERTUMNUS,),
    "stealing": (_ORDERED,),
    "calibration": (_VERTUMNUS,),
    "ratio_in_own_time": ({**_VERTUMNUS, "calibration": (True,)},),
    "share_s": (_SHARED,),
    "held_s_max": (_SHARED,),
    # Without copies the demand for a block still tells which part of a split gets it; a split reads `theta_intra` always.
    "decay": ({"cache_policy": ("lru", "paper")},),
    "theta_inter": ({"cache_policy": ("paper",)},),
    "theta_reclaim": (_COPYING,),
    "cache_operations_max": (_COPYING,),
    "copy_price_s": (_REGRET,),
    "regret_fade_s": (_REGRET,),
    "regret_horizon_s": (_REGRET,),
    "reconfiguration_advisory": (_ADAPTING,),
    "up": (_THRESHOLDS,),
    "down": (_THRESHOLDS,),
    "persistence": (_ADAPTING,),  # `forecast` lets a node rest for as many windows after an abort
    "long_share_by": (_THRESHOLDS,),
    "long_delta": (_THRESHOLDS,),
    "forecast_gain": ({"reconfiguration_policy": ("forecast",)},),
}


def ignored(parameters: Parameters) -> dict[str, str]:
    """The parameters that nobody decides by now, and what would have to hold for that to change."""
    return {
        name: ", or ".join(map(_told, ways))
        for name, ways in READ_UNDER.items()
        if not any(_holds(parameters, values) for values in ways)
    }


def _holds(parameters: Parameters, values: Values) -> bool:
    return all(getattr(parameters, name) in allowed for name, allowed in values.items())


def _told(values: Values) -> str:
    """As an operator would set it."""
    return " and ".join(
        ("two tenants or more" if allowed[0] else "one tenant at most")
        if name == "shared"
        else f"{name}={' or '.join(str(each).lower() for each in allowed)}"
        for name, allowed in values.items()
    )
