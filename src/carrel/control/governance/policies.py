"""The policies of contexts: stored, compiled once, and asked for verdicts.

Three layers: the policy of the server, of the template of a context, and of the context itself. Decides with
`carrel.policy`; enforces nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from carrel.control.governance.deciding import Decider
from carrel.control.operations.call import Call
from carrel.control.operations.caller import Caller
from carrel.control.sessions.masks import unmasked
from carrel.control.sessions.owners import builds_image, discovers, whose
from carrel.control.sessions.templates import Templates
from carrel.errors import AlreadyExists, Conflict, InvalidRequest, PlatformError
from carrel.isolation.inside import WORKSPACE
from carrel.models import Explanation, PolicyDocuments, PolicyInfo, PolicyWarning
from carrel.policy.documents import settings as settings_document
from carrel.policy.documents import sources as sources_document
from carrel.policy.documents.sources import Git, PackageManager, PackageManagers, Registry, Sources, WebAccess
from carrel.policy.rules.decide import decide_environment
from carrel.policy.rules.layers import Layer, Policy
from carrel.policy.verdict import ALLOWED, Verdict, explained
from carrel.primitives.cache import Cache
from carrel.store import SessionRecord
from carrel.store.policies import PolicyRecord, PolicyStore
from carrel.threads import run_to_end

FRESH_S = 5.0
"""How long a change made by another server may go unnoticed."""
MOST_CACHED, MOST_TEMPLATES = 4096, 1024
TRIES = 10
INDEX_LABEL = "index"
"""The label of a sandbox that builds packages; it names the one index that the sandbox may use."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    version: int
    layer: Layer | None
    policy: Policy
    seen_at: float


class Policies:
    """Every policy of this server."""

    def __init__(self, store: PolicyStore, server: Layer | None, templates: Templates):
        self._store = store
        self._templates = templates
        self._server = () if server is None else (server,)
        self._cache: Cache[str, _Compiled] = Cache(MOST_CACHED)
        self._default = self._compile(None, None, None)
        self._shared: Cache[int, tuple[Layer, Policy]] = Cache(MOST_TEMPLATES)
        self._changes = 0
        self._decider = Decider()

    @staticmethod
    def server_layer(settings_file: str | None, sources_file: str | None) -> Layer | None:
        """Read the policy files of the operator; `InvalidRequest` when one cannot be read. Blocking."""
        if settings_file is None and sources_file is None:
            return None
        settings = sources = None
        if settings_file is not None:
            settings = settings_document.load(_text(settings_file), settings_file)
        if sources_file is not None:
            sources = sources_document.load(_text(sources_file), sources_file)
        return Layer(settings_file or "server", settings, sources, sources_file or "server")

    # asking

    async def of(self, context_id: str | None, sandbox_id: str = "") -> Policy:
        """Return the policy of a context, or of an ephemeral sandbox."""
        name = context_id or sandbox_id
        return await self._of(context_id, await self._templates.of(name) if name else None)

    async def of_record(self, record: SessionRecord) -> Policy:
        """Return the policy of a session, also of one that is about to start."""
        if record.acts_for is None or discovers(record):
            return await self._of(whose(record), record.template)
        policy = await self._of(record.acts_for or None, record.template)
        if builds_image(record):
            return policy
        layers = [*policy.layers, building_layer(policy, record.labels.get(INDEX_LABEL))]
        return Policy.of(layers, context_id=record.acts_for or "ephemeral", workspace=WORKSPACE)

    async def of_asker(self, context_id: str | None, template: str | None) -> Policy:
        """Return the policy of a context, or of a sandbox with a template."""
        return await self._of(context_id, template)

    async def _of(self, context_id: str | None, template: str | None) -> Policy:
        layer = await self._templates.layer(template)
        if context_id is None:
            return self._without_documents(layer)
        known = self._cache.get(context_id)
        now = time.monotonic()
        if known is not None and known.layer is layer and now - known.seen_at < FRESH_S:
            return known.policy
        changes = self._changes
        record = await self._store.get(context_id)
        if changes != self._changes:  # the record may have been read before the change
            return await self._of(context_id, template)
        version = 0 if record is None else record.version
        if known is not None and known.layer is layer and known.version == version:
            policy = known.policy
        elif record is None and not _names_context((*self._server, layer)):
            policy = self._without_documents(layer)
        else:
            policy = await run_to_end(lambda: self._compile(context_id, layer, record))
            if changes != self._changes:
                return await self._of(context_id, template)
        self._cache.put(context_id, _Compiled(version, layer, policy, now))
        return policy

    def _without_documents(self, layer: Layer | None) -> Policy:
        """Return the policy of a context without documents of its own: one for all of them."""
        if layer is None:
            return self._default
        known = self._shared.get(id(layer))
        if known is None:
            known = layer, self._compile(None, layer, None)
            self._shared.put(id(layer), known)
        return known[1]

    async def decide(self, call: Call, workspace: str | None = None, own_path: str | None = None) -> Verdict:
        """Return the verdict on a call. `workspace` is the path of its files on this server, `own_path` their second
        path in the sandbox.
        """
        decides = call.operation.decides
        if decides == "nothing":
            return ALLOWED
        if decides == "variables":
            return await self._decide_variables(call)
        policy = await self.of(call.context_id, call.sandbox_id)
        if not policy.governed and not policy.sources:
            return ALLOWED
        return await self._decider.decide(policy, call, workspace, own_path)

    async def _decide_variables(self, call: Call) -> Verdict:
        """Decide the variables of a new sandbox like those of a command: every command in it gets them."""
        env, template = call.arguments.get("env"), call.arguments.get("template")
        if not isinstance(env, Mapping):
            return ALLOWED
        named = await self._templates.meant(call.context_id, template if isinstance(template, str) else None)
        return decide_environment(await self._of(call.context_id, named), env)

    async def longest(self, record: SessionRecord) -> float | None:
        """Return the longest time that the policy allows a command of a session; None for no limit."""
        return (await self.of_record(record)).limits.max_execution_time_seconds

    async def delete_limit(self, record: SessionRecord) -> int | None:
        """Return how many files a session may delete before a person is asked; None for no limit."""
        return (await self.of_record(record)).limits.delete_limit

    async def explain(self, context_id: str | None, command: str | list[str], cwd: str | None) -> Explanation:
        """Explain the verdict on a command, part by part."""
        return explained(await self._decider.explain(await self.of(context_id), command, cwd))

    # keeping

    async def get(self, context_id: str) -> PolicyInfo:
        """Return the documents of a context, with warnings about its rules."""
        record = await self._store.get(context_id)
        layer = await self._layer(context_id)
        return await run_to_end(lambda: self._info(context_id, record, layer))

    async def version(self, context_id: str) -> int:
        """Return the version of a context's policy; 0 if it has none."""
        record = await self._store.get(context_id)
        return 0 if record is None else record.version

    async def write(self, context_id: str, given: PolicyDocuments, by: str) -> PolicyInfo:
        """Write the documents of a context; refuse all of them when a rule cannot be read or would disable the policy.
        `PolicyChanges` updates running sandboxes.
        """
        before = await self._store.get(context_id)
        fields = given.model_fields_set
        settings = given.settings if "settings" in fields else before.settings if before else None
        sources = given.sources if "sources" in fields else before.sources if before else None
        record = PolicyRecord(context_id, settings, sources, 0, time.time(), by)
        layer = await self._layer(context_id)
        await run_to_end(lambda: self._compile(context_id, layer, record))
        expected = given.version if given.version is not None else before.version if before else 0
        await self._store.put(context_id, settings, sources, by=by, at=record.updated_at, expected=expected)
        self._forget(context_id)
        return await self.get(context_id)

    async def erase(self, context_id: str) -> None:
        """Delete the documents of a context. `PolicyChanges` updates running sandboxes."""
        await self._store.delete(context_id)
        self._forget(context_id)

    async def copy(self, caller: Caller, origin: str, context_id: str) -> Callable[[], Awaitable[None]]:
        """Give a fork the policy of its origin; return a function that undoes it. A context may still have a policy
        from before it was deleted: only an administrator may replace that, or a fork could be used to change rules.
        """
        record, own = await self._store.get(origin), await self._store.get(context_id)
        given, has = ((each.settings, each.sources) if each else (None, None) for each in (record, own))
        if own is not None and has != given and not caller.administers:
            raise AlreadyExists(
                f"context '{context_id}' has a policy of its own",
                field="context_id",
                hint="fork to a new context, or let the policy be deleted first",
            )
        put = 0
        if record is not None and has != given:
            at, version = time.time(), 0 if own is None else own.version
            put = await self._store.put(context_id, *given, by=record.updated_by, at=at, expected=version)
            self._forget(context_id)

        async def undo() -> None:
            if not put:
                return
            if own is None:
                await self._store.delete(context_id, version=put)
            else:
                by, at = own.updated_by, time.time()
                with suppress(Conflict):  # it was changed meanwhile
                    await self._store.put(context_id, own.settings, own.sources, by=by, at=at, expected=put)
            self._forget(context_id)

        return undo

    async def check_rule(self, context_id: str, rule: str) -> None:
        """Refuse a rule that cannot be read or would disable the policy."""
        if not (await self.of(context_id)).governed:
            raise InvalidRequest(
                "this context has no settings: with this as its only rule, everything else would need an approval",
                field="rule",
                hint="approve it for the context, or give the context settings first",
            )
        before, layer = await self._store.get(context_id), await self._layer(context_id)
        await run_to_end(lambda: self._compile(context_id, layer, _with_rule(context_id, before, rule)))

    async def add_rule(self, context_id: str, rule: str, by: str) -> None:
        """Allow something in a context from now on."""
        for left in reversed(range(TRIES)):
            record = _with_rule(context_id, await self._store.get(context_id), rule)
            given = PolicyDocuments(settings=dict(record.settings or {}), version=record.version)
            try:
                await self.write(context_id, given, by)
                return
            except Conflict:  # another rule was added at the same moment
                if not left:
                    raise

    def forget_known(self) -> None:
        """Read every policy again: another worker has changed one."""
        self._changes += 1
        self._cache.clear()

    def _forget(self, context_id: str) -> None:
        self._changes += 1
        self._cache.pop(context_id)

    async def _layer(self, context_id: str) -> Layer | None:
        return await self._templates.layer(await self._templates.of(context_id))

    def _info(self, context_id: str, record: PolicyRecord | None, layer: Layer | None) -> PolicyInfo:
        policy = self._compile(context_id, layer, record)
        unmaskable = [PolicyWarning(source=each.source, rule=each.text, text=words) for each, words in unmasked(policy)]
        return PolicyInfo(
            context_id=context_id,
            settings=None if record is None or record.settings is None else dict(record.settings),
            sources=None if record is None or record.sources is None else dict(record.sources),
            version=0 if record is None else record.version,
            updated_at=None if record is None else datetime.fromtimestamp(record.updated_at, UTC),
            updated_by=None if record is None else record.updated_by,
            warnings=[*policy.warnings, *unmaskable],
        )

    def _compile(self, context_id: str | None, layer: Layer | None, record: PolicyRecord | None) -> Policy:
        layers = [*self._server, *(() if layer is None else (layer,))]
        if record is not None:
            settings = sources = None
            if record.settings is not None:
                settings = settings_document.load(json.dumps(record.settings), settings_document.NAME)
            if record.sources is not None:
                sources = sources_document.load(json.dumps(record.sources), sources_document.NAME)
            layers.append(Layer(settings_document.NAME, settings, sources))
        if not layers:
            return Policy.open()
        return Policy.of(layers, context_id=context_id or "ephemeral", workspace=WORKSPACE)


def _names_context(layers: Sequence[Layer | None]) -> bool:
    """Whether a rule differs between contexts."""
    given = [layer.settings.permissions for layer in layers if layer is not None and layer.settings is not None]
    return any("${CONTEXT_ID}" in text for each in given for text in (*each.allow, *each.deny))


def _text(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise PlatformError(
            f"the policy {path} cannot be read: {error.strerror}", field="policy", hint="check the path and its mode"
        ) from None


def _with_rule(context_id: str, before: PolicyRecord | None, rule: str) -> PolicyRecord:
    """Return the documents with one more allow rule."""
    record = before or PolicyRecord(context_id, None, None, 0, 0.0, "")
    settings = json.loads(json.dumps(record.settings or {}))
    allow = settings.setdefault("permissions", {}).setdefault("allow", [])
    if rule not in allow:
        allow.append(rule)
    return replace(record, settings=settings)


def building_layer(policy: Policy, index: str | None) -> Layer:
    """Return the layer for a sandbox that builds an environment: it reaches only the package index, and of that one
    registry when one was chosen.
    """
    registries: tuple[Registry, ...] | None = None
    if index is not None:
        from carrel.egress.outbound.rules import EgressRules

        named = EgressRules(policy).packages.registries
        registries = None if named is None else tuple(each for each in named if each.name == index)
    pip = None if registries is None else PackageManager(registries=registries)
    sources = Sources(
        package_managers=PackageManagers(pip=pip), web_access=WebAccess(allowed_domains=()), git=Git(enabled=False)
    )
    return Layer("environment", None, sources, "environment")
