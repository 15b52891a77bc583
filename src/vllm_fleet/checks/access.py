"""Who reaches engines: the fence, the controllers, and what the front lets through."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from vllm_fleet import fence, profile, rules
from vllm_fleet.front import CONTROL_PATHS
from vllm_fleet.inventory import Fleet
from vllm_fleet.placement import Engine

WIDEST = 8
"""The shortest prefix of a network that somebody may have to themselves: 10.0.0.0/8, fd00::/8."""


def check_access(fleet: Fleet, engines: Sequence[Engine]) -> None:
    """Nobody but the fleet and its controllers commands engines; what clients send is theirs."""
    v = fleet.vars
    for index, path in enumerate(v.client_paths):
        if path in CONTROL_PATHS:
            where = ("fleet_client_paths", index)
            fleet.report(rules.CLIENT_PATH, "it controls engines or the router", where, value=path)
    for index, source in enumerate(v.controllers):
        if ipaddress.ip_network(source).prefixlen < WIDEST:
            where = ("fleet_controllers", index)
            fleet.report(rules.CONTROLLERS, f"it is wider than /{WIDEST}", where, value=source)
    for name in ("tls_ca", "tls_name"):
        if getattr(v, name) and not v.tls_certificate:
            what = "fleet_tls_certificate is not set"
            fleet.report(rules.TLS_CERTIFICATE, what, (f"fleet_{name}",), value=getattr(v, name))
    if v.client_keys and not v.tls_certificate:
        what = "fleet_tls_certificate is not set"
        fleet.report(rules.CLIENT_KEYS_TLS, what, ("fleet_client_keys",), value=v.client_keys)
    if v.fence:
        _check_external_names(fleet, engines)
        return
    of_profile = profile.ENVIRONMENT[v.profile]
    if open_one := next((one for one in engines if fence.in_dev_mode({**one.env, **of_profile})), None):
        what = f"{open_one.name} is in dev mode"
        fleet.report(rules.DEV_MODE_FENCE, what, ("fleet_fence",), value=False)


def _check_external_names(fleet: Fleet, engines: Sequence[Engine]) -> None:
    if not any(engine.role == "prefill" for engine in engines):
        return
    for name, engine in fleet.vars.external_engines.items():
        if engine.role == "decode" and not fence.is_address(urlsplit(engine.url).hostname):
            where = ("fleet_external_engines", name, "url")
            fleet.report(rules.EXTERNAL_NAME, "its host is a name", where, value=engine.url)
