"""Reads an inventory with Ansible's own loader, so that it means what it means to ansible-playbook."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible import constants, context
from ansible._internal import setup as ansible_setup
from ansible._internal._datatag._tags import Origin, TrustedAsTemplate
from ansible.errors import AnsibleError
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible.parsing.vault import VaultSecretsContext, get_file_vault_secret
from ansible.plugins.loader import init_plugin_loader
from ansible.template import Templar
from ansible.utils.collection_loader import AnsibleCollectionConfig
from ansible.utils.context_objects import CLIArgs
from ansible.utils.display import Display
from ansible.utils.vars import load_extra_vars
from ansible.vars.hostvars import HostVars
from ansible.vars.manager import VariableManager
from jinja2 import UndefinedError

from vllm_fleet import rules
from vllm_fleet.inventory import PREFIX
from vllm_fleet.problems import Problem, Problems, origin, plain

ansible_setup()  # marks this process as a controller, as ansible's own commands do

TEMPLATE_MARKS = ("{{", "{%", "{#")
PLAYBOOKS = Path(__file__).parents[2] / "playbooks"


@dataclass(frozen=True, slots=True)
class Loaded:
    """An inventory as Ansible sees it: `fleet_*` and `ansible_host` of each host, and the groups.

    A value that could not be computed is a problem, and missing from `hosts`.
    """

    hosts: dict[str, dict[str, Any]]
    groups: dict[str, list[str]]
    problems: Problems

    def all_problems(self, found: Iterable[Problem]) -> list[Problem]:
        """Loading's problems, then those `found` by judging what could be loaded.

        A value that could not be computed is not also reported as missing.
        """
        unread = {(host, str(p.place.path[0])) for p in self.problems.all() for host in p.place.hosts}
        names = {name for _, name in unread}
        return [
            *self.problems.all(),
            *(
                p
                for p in found
                if p.rule not in SAY_MISSING
                or not p.place.path
                or not (
                    all((host, p.place.path[0]) in unread for host in p.place.hosts)
                    if p.place.hosts
                    else p.place.path[0] in names
                )
            ),
        ]


SAY_MISSING = (rules.MISSING, rules.DIFFERS, rules.ADDRESS_MISSING)


class UnreadableError(Exception):
    """The inventory as a whole cannot be read. `problems` says why."""

    def __init__(self, message: str, place: str | None = None) -> None:
        super().__init__(message)
        self.problems = Problems()
        self.problems.add(rules.INVENTORY_UNREADABLE, message, origin=place)


class OptionError(Exception):
    """An `-e` option cannot be read."""


def load(
    sources: Sequence[str],
    extra_vars: Sequence[str] = (),
    vault_password_files: Sequence[str] = (),
) -> Loaded:
    """Read inventory sources (files, directories) with `-e` options as ansible-playbook takes them.

    Raises:
        OptionError: an `-e` option cannot be read.
        UnreadableError: an inventory source, a variables file or a vault password cannot be read.

    """
    if AnsibleCollectionConfig.collection_finder is None:
        init_plugin_loader()
    loader = DataLoader()
    # ansible-playbook reads group_vars beside the playbook; the working directory's have no say.
    loader.set_basedir(str(PLAYBOOKS if PLAYBOOKS.is_dir() else Path(sources[0]).resolve().parent))
    try:
        _set_vault_secrets(loader, vault_password_files)
        _set_extra_vars(loader, extra_vars)
        with _failures() as failures:
            inventory = InventoryManager(loader, [str(Path(source).resolve()) for source in sources])
        if failures:
            raise _error(failures)
        if not inventory.hosts:
            raise UnreadableError(f"no hosts in {', '.join(sources)}")
        manager = VariableManager(loader, inventory)
        HostVars(inventory, manager, loader)  # lets templates use hostvars
        problems = Problems()
        hosts = {
            name: values(name, manager.get_vars(host=host), loader, problems)
            for name, host in inventory.hosts.items()
        }
    except AnsibleError as error:
        raise _error([error]) from error
    groups = {name: [str(host) for host in hosts] for name, hosts in inventory.get_groups_dict().items()}
    return Loaded(hosts, groups, problems)


def values(host: str, variables: Mapping[str, Any], loader: DataLoader, problems: Problems) -> dict[str, Any]:
    """The host's `fleet_*` variables and `ansible_host`, computed; what fails is reported and left out."""
    found: dict[str, Any] = {}
    templar: Templar | None = None
    for name, value in variables.items():
        if not name.startswith(PREFIX) and name != "ansible_host":
            continue
        if _is_constant(value):
            found[name] = value
            continue
        templar = templar or Templar(loader=loader, variables=dict(variables))
        compute(host, name, lambda: templar.template(value), origin(value), found, problems)  # noqa: B023  called at once
    return found


def compute(
    host: str,
    name: str,
    value: Callable[[], Any],
    place: str | None,
    found: dict[str, Any],
    problems: Problems,
) -> None:
    """Store what `value()` gives, or report why Ansible cannot compute it."""
    try:
        result = value()
        plain(result)  # a vaulted value is only decrypted when it is read
    except (AnsibleError, UndefinedError) as error:  # in a filter, undefined values raise Jinja's
        problems.add(
            rules.VALUE_UNREADABLE,
            " ".join(str(error).split()),
            path=(str(name),),
            host=host,
            origin=place or _place(error),
        )
    else:
        found[name] = result


def _is_constant(value: Any) -> bool:
    """Whether a value is what it says: templating 1,000 hosts' constants would take longer than all else."""
    if isinstance(value, str):
        return not any(mark in value for mark in TEMPLATE_MARKS)
    if isinstance(value, Mapping):
        return all(map(_is_constant, value.values())) and all(map(_is_constant, value))
    if isinstance(value, list | tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, int | float)


@contextlib.contextmanager
def _failures() -> Iterator[list[BaseException]]:
    """Collect why sources cannot be parsed; Ansible only prints that as warnings and goes on without them."""
    display, failures = Display(), list[BaseException]()

    def collect(msg: str | None, exception: BaseException, **_: Any) -> None:  # noqa: ARG001  Ansible's signature
        failures.append(exception)

    names = {"error_as_warning": collect, "warning": lambda *_, **__: None}
    for name, replacement in names.items():
        setattr(display, name, replacement)
    try:
        yield failures
    finally:
        for name in names:
            delattr(display, name)


def _error(failures: Sequence[BaseException]) -> UnreadableError:
    """The first failure that knows its line: each inventory plugin that tried the file had its own."""
    known = next((error for error in failures if _place(error)), failures[0])
    return UnreadableError(" ".join(str(known).split()), _place(known))


def _place(error: BaseException | None) -> str | None:
    """`file:line` that an Ansible error, or one of its causes, is about."""
    found = None
    while error is not None:
        found = origin(getattr(error, "obj", None)) or found
        error = error.__cause__ or error.__context__
    return found


def _set_vault_secrets(loader: DataLoader, files: Sequence[str]) -> None:
    """Vault passwords from the files given, else from Ansible's configuration. Nothing is asked for."""
    configured = [constants.DEFAULT_VAULT_PASSWORD_FILE] if constants.DEFAULT_VAULT_PASSWORD_FILE else []
    identities = [entry.rpartition("@") for entry in constants.DEFAULT_VAULT_IDENTITY_LIST]
    secrets = []
    for name, file in [(name, file) for name, _, file in identities] + [
        ("", file) for file in [*files, *configured]
    ]:
        secret = get_file_vault_secret(
            filename=str(Path(file).expanduser().resolve()), vault_id=name or None, loader=loader
        )
        secret.load()
        secrets.append((name or constants.DEFAULT_VAULT_IDENTITY, secret))
    loader.set_vault_secrets(secrets)
    current = VaultSecretsContext.current(optional=True)
    if current is None:
        VaultSecretsContext.initialize(VaultSecretsContext(secrets))
    else:
        current.secrets = secrets


def _set_extra_vars(loader: DataLoader, options: Sequence[str]) -> None:
    """Hand `-e` options to Ansible's parser, which reads them from its command line and remembers them."""
    tags = (TrustedAsTemplate(), Origin(description="option -e"))
    resolved = [
        f"@{Path(option[1:]).expanduser().resolve()}" if option.startswith("@") else option
        for option in options
    ]
    context.CLIARGS = CLIArgs({"extra_vars": tuple(_tagged(option, tags) for option in resolved)})
    load_extra_vars.extra_vars = None
    try:
        load_extra_vars(loader)
    except AnsibleError as error:
        raise OptionError(" ".join(str(error).split())) from error


def _tagged(option: str, tags: Sequence[Any]) -> str:
    for tag in tags:
        option = tag.tag(option)
    return option
