"""Builds the plans of sandboxes for the egress process: the policy, and the values that only the proxy may have.

The certificate authority of an inspected sandbox is made when it is first needed. It is stored in the server's run
directory as long as the sandbox exists, so that a restarted server does not change what the sandbox trusts.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from carrel.egress.index.host import host_index, host_registries
from carrel.egress.plan import EgressPlan, HostRegistry, Injected, PackageIndex, Upstream, placeholder
from carrel.errors import CarrelError, InvalidRequest, PlatformError
from carrel.models import Network
from carrel.models.base import ShortName
from carrel.policy.documents.sources import Credential, Sources, WebAccess
from carrel.policy.rules.layers import Layer, Policy
from carrel.primitives.atomic import write_file
from carrel.store import SessionRecord

CA_FILE = "carrel-ca.pem"
"""The name, among a sandbox's secrets, of the file of roots that it trusts when its TLS is inspected."""

PolicyOf = Callable[[SessionRecord], Awaitable[Policy]]
Values = Callable[[SessionRecord], Awaitable[Mapping[str, bytes]]]
"""Returns the secrets of a session by name."""


class UpstreamSetting(BaseModel):
    """One proxy in the operator's file."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, defer_build=True)

    name: ShortName
    url: str = Field(pattern=r"^(https?|socks5h?)://\S+$", max_length=2048)
    remote_names: bool = Field(default=False, description="whether the proxy looks names up, and not carrel")


def read_upstreams(path: str | None) -> tuple[Upstream, ...]:
    """Read the proxies of a file. Raises `InvalidRequest` when it is not valid. Blocking."""
    if path is None:
        return ()
    from carrel.egress.outbound.upstreams import read_proxy_address

    try:
        with open(path, "rb") as file:
            found = TypeAdapter(list[UpstreamSetting]).validate_json(file.read())
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", field="egress.upstreams_file") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(
            f"{path}: {place}: {first['msg']}",
            field="egress.upstreams_file",
            hint='write [{"name": "eu", "url": "http://user:password@host:3128"}]',
        ) from None
    if len({each.name for each in found}) < len(found):
        raise InvalidRequest(f"{path} has a name twice", field="egress.upstreams_file")
    upstreams = tuple(Upstream(each.name, each.url, each.remote_names) for each in found)
    for upstream in upstreams:
        read_proxy_address(upstream)  # fail now, not when the first sandbox starts
    return upstreams


def web_access(policy: Policy) -> list[WebAccess]:
    """Return the web access rules of a policy's layers, the highest first."""
    return [sources.web_access for _, sources in policy.sources if sources.web_access is not None]


def credentials(policy: Policy) -> list[Credential]:
    """Return the credentials that the proxy injects into requests."""
    return [each for web in web_access(policy) for each in web.credentials]


def withheld(policy: Policy) -> frozenset[str]:
    """Return the names of the secrets of which a sandbox gets only placeholders."""
    return frozenset(each.secret for each in credentials(policy))


def inspects(policy: Policy) -> bool:
    """Whether the TLS of any host is inspected, so that sandboxes must trust the proxy's certificates."""
    return any(web.inspected_domains or web.credentials or web.requests for web in web_access(policy))


def _make(sandbox: str, made: Future[str]) -> None:
    try:
        from carrel.egress.http.authority import host_roots, make_authority  # few sandboxes have one; it takes long

        host_roots()  # they are kept
        made.set_result(make_authority(sandbox))
    except BaseException as error:
        made.set_exception(error)


class Plans:
    """Builds plans."""

    def __init__(self, run_dir: str, upstreams: Sequence[Upstream], policy_of: PolicyOf, values: Values):
        self._run_dir = run_dir
        self._upstreams = tuple(upstreams)
        self._policy_of = policy_of
        self._values = values
        self._indexes: tuple[PackageIndex, ...] | None = None
        self._registries: tuple[HostRegistry, ...] = ()
        self._making: dict[str, Future[str]] = {}

    def prepare(self, sandbox: str) -> None:
        """Begin to make the authority of a sandbox that is about to start: that takes as long as its start."""
        self._making[sandbox] = made = Future[str]()
        threading.Thread(target=_make, args=(sandbox, made), daemon=True).start()

    async def of(self, record: SessionRecord) -> EgressPlan:
        """Build the plan of a sandbox from its context's current policy."""
        return await self.make(record, *await self.read(record))

    async def read(self, record: SessionRecord) -> tuple[Policy, Mapping[str, bytes]]:
        """Read the current policy of a sandbox's context, and the values that it needs."""
        policy = await self._policy_of(record)
        return policy, await self._values(record) if credentials(policy) else {}

    async def make(self, record: SessionRecord, policy: Policy, values: Mapping[str, bytes]) -> EgressPlan:
        """Build a plan from a policy. Raises `CarrelError` and `OSError` when the policy cannot be carried out here."""
        if self._indexes is None:
            self._registries = await asyncio.to_thread(host_registries)
            self._indexes = tuple(await asyncio.to_thread(host_index))
        wanted = credentials(policy)
        upstreams, internet = self._chosen(policy), record.network is Network.INTERNET
        if internet and any(each.remote_names for each in upstreams):
            raise InvalidRequest(
                "the network 'internet' needs carrel to look names up, and an upstream proxy of this server does so",
                field="network",
                hint="choose 'allowlist', or let the operator set remote_names to false in egress.upstreams_file",
            )
        return EgressPlan(
            sandbox=record.id,
            context=record.context_id,
            layers=policy.layers,
            injected=tuple(_injected(each, values[each.secret]) for each in wanted if each.secret in values),
            upstreams=upstreams,
            indexes=self._indexes,
            authority=await asyncio.to_thread(self._authority, record.id) if inspects(policy) else None,
            internet=internet,
            registries=self._registries,
        )

    async def sandbox_secrets(self, record: SessionRecord, values: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the secrets for the sandbox: placeholders if only the proxy may have the value, and the roots to trust
        if TLS is inspected.
        """
        policy = await self._policy_of(record)
        hidden = withheld(policy)
        files = {name: placeholder(name).encode() if name in hidden else value for name, value in values.items()}
        if inspects(policy):
            from carrel.egress.http.authority import bundle

            authority = await asyncio.to_thread(self._authority, record.id)
            files[CA_FILE] = (await asyncio.to_thread(bundle, authority)).encode()
        return files

    def forget(self, sandbox: str) -> None:
        """Remove the authority of a sandbox that has ended, or whose start failed."""
        self._making.pop(sandbox, None)
        with suppress(FileNotFoundError):
            os.unlink(self._path(sandbox))

    def _path(self, sandbox: str) -> str:
        return os.path.join(self._run_dir, f"ca-{sandbox}.pem")

    def _authority(self, sandbox: str) -> str:
        path = self._path(sandbox)
        with suppress(FileNotFoundError), open(path, encoding="ascii") as file:
            return file.read()
        made = self._making.pop(sandbox, None)
        if made is None:
            made = Future[str]()
            _make(sandbox, made)
        pem = made.result()
        try:
            write_file(path, pem.encode("ascii"), replace=False)
        except FileExistsError:  # another thread was faster, and the sandbox may trust that authority already
            return self._authority(sandbox)
        return pem

    def _chosen(self, policy: Policy) -> tuple[Upstream, ...]:
        """Return the proxies that a policy names: those in the lists of all layers, in the order of the highest."""
        named = [web.upstreams for web in web_access(policy) if web.upstreams is not None]
        if not named:
            return self._upstreams
        known = {each.name: each for each in self._upstreams}
        names = [name for name in named[0] if all(name in layer for layer in named[1:])]
        missing = [name for name in names if name not in known]
        if missing or not names:
            raise PlatformError(
                f"the policy names upstream proxies this server does not have: {', '.join(missing) or 'none are left'}",
                field="web_access.upstreams",
                hint="let the operator add them to the file of egress.upstreams_file",
            )
        return tuple(known[name] for name in names)


def shut(plan: EgressPlan, error: Exception) -> EgressPlan:
    """Return a plan that allows nothing, because the policy cannot be carried out. Refusals name the reason."""
    why = error.detail if isinstance(error, CarrelError) else type(error).__name__
    nothing = Sources.model_validate(
        {"web_access": {"enabled": False}, "package_managers": {"pip": {"enabled": False}}}
    )
    layer = Layer("carrel", None, nothing, f"carrel, because {why}")
    return replace(plan, layers=(layer,), injected=(), upstreams=())


def _injected(credential: Credential, value: bytes) -> Injected:
    try:
        secret = value.decode("ascii").strip()
    except UnicodeDecodeError:
        secret = ""
    if not secret or not secret.isprintable():
        raise InvalidRequest(
            f"the secret '{credential.secret}' cannot be put into a header",
            field="credentials",
            hint="a header takes printable ASCII in one line",
        )
    return Injected(
        host=credential.host,
        header=credential.header,
        value=credential.format.replace("{secret}", secret),
        secret=secret,
        name=credential.secret,
        methods=None if credential.methods is None else tuple(each.upper() for each in credential.methods),
        paths=credential.paths,
    )
