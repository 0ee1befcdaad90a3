"""Templates: named recipes in a directory of the operator, or shipped with carrel. Reads and checks them, and fills
them into requests.

A template is a folder with the files `template.toml`, `settings.json` and `sources.json`, each of them optional.
`policies` compiles its policy, `template_packages` builds its packages, `template_images` its image. Everybody who may
start a sandbox may use it.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import os
import re
import time
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

import carrel
from carrel.control.operations.caller import Caller, OwnWork
from carrel.control.python.environment_checks import requirements_of
from carrel.control.sessions.attachments import Attachment
from carrel.control.sessions.live import LiveSandboxes
from carrel.errors import CarrelError, Conflict, InvalidRequest, PlatformError
from carrel.isolation.inside import WORKSPACE
from carrel.models import Limits, SandboxRequest, State, TemplateInfo, TemplateList
from carrel.policy.documents import recipes
from carrel.policy.documents import settings as settings_document
from carrel.policy.documents import sources as sources_document
from carrel.policy.documents.documents import MAX_DOCUMENT
from carrel.policy.documents.recipes import Recipe
from carrel.policy.rules.layers import Layer, Policy
from carrel.store import SessionRecord, SessionStore

FRESH_S = 2.0
"""How long a change of the files may go unnoticed."""
SHIPPED = os.path.join(os.path.dirname(carrel.__file__), "templates")
"""The templates shipped with carrel. A template of the operator with the same name replaces one."""
RECIPE, SETTINGS, SOURCES = recipes.NAME, settings_document.NAME, sources_document.NAME
SEARCH_URL = b"https://search.example/search?format=json&q={query}"
SEARCH_HOST = b"search.example"
"""Stand for the search endpoint of the operator in shipped templates."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
Names = list[str]
_Marks = tuple[tuple[int, int, int] | None, ...]


DOCKERFILE = "Dockerfile"
BUILT = "localhost/carrel-template:"
"""The names of images that are built for templates begin with this."""
MOST_BUILD_FILES = 10_000


@dataclass(frozen=True, slots=True)
class BuildFolder:
    """The folder of a template that its image is built from. The name of the image changes with the files."""

    path: str
    image: str


@dataclass(frozen=True, slots=True)
class Template:
    """A usable template. It is immutable: when its files change, a new one is made."""

    name: str
    recipe: Recipe = field(default_factory=Recipe)
    layer: Layer | None = None
    shipped: bool = False
    build: BuildFolder | None = None

    def info(self) -> TemplateInfo:
        recipe, layer = self.recipe, self.layer
        return TemplateInfo(
            name=self.name,
            description=recipe.description,
            provider=recipe.provider,
            image=recipe.image,
            build=self.build is not None,
            network=recipe.network,
            limits=recipe.limits,
            env=sorted(recipe.env),
            labels=recipe.labels,
            packages=recipe.packages,
            shipped=self.shipped,
            settings=layer is not None and layer.settings is not None,
            sources=layer is not None and layer.sources is not None,
        )

    def fill(self, request: SandboxRequest) -> SandboxRequest:
        """Return the request with the values of the template where the request has none."""
        recipe = self.recipe
        limits = recipe.limits.model_dump(exclude_none=True) | request.limits.model_dump(exclude_none=True)
        changes: dict[str, object] = {
            "template": self.name,
            "limits": Limits.model_validate(limits),
            "env": {**recipe.env, **request.env},
            "labels": {**recipe.labels, **request.labels},
        }
        if request.provider == "auto" and recipe.provider is not None:
            changes["provider"] = recipe.provider
        if request.image is None:
            changes["image"] = recipe.image if self.build is None else self.build.image
        if request.network is None:
            changes["network"] = recipe.network
        return request.model_copy(update=changes)


class Templates(Attachment):
    """The templates of one server. `default` is for sandboxes that name none."""

    def __init__(
        self,
        directory: str,
        default: str | None,
        store: SessionStore,
        live: LiveSandboxes,
        *,
        search_url: str | None,
    ):
        self._directory = directory
        self._default = default
        self._search_url = search_url
        self._store = store
        self._live = live
        self._known: dict[str, tuple[Template, _Marks, float]] = {}

    async def get(self, name: str) -> Template:
        """Return a template; `InvalidRequest` suggests the nearest name when there is none, or says why it cannot be
        used.
        """
        known = self._known.get(name)
        now = time.monotonic()
        if known is not None and now - known[2] < FRESH_S:
            return known[0]
        template, marks = await asyncio.to_thread(self._read, name, known)
        self._known[name] = (template, marks, now)
        return template

    async def list(self) -> TemplateList:
        """List every template by name; one that cannot be used says why."""
        items = []
        for name in await asyncio.to_thread(self._names):
            try:
                items.append((await self.get(name)).info())
            except CarrelError as error:
                items.append(TemplateInfo(name=name, error=error.detail))
        return TemplateList(items=items)

    async def of(self, name: str) -> str | None:
        """Return the template of a context or a sandbox; None when it has none, or there is no such session. A
        terminated context still has its template.
        """
        box = self._live.find(name)
        if box is not None:
            return box.record.template
        record = await self._store.newest_of_context(name)
        return None if record is None else record.template

    async def meant(self, context_id: str | None, asked: str | None) -> str | None:
        """Return the template that a requested sandbox would get; `InvalidRequest` as `get`."""
        kept = None if context_id is None else await self.of(context_id)
        name = kept or asked or self._default
        return name if name is None or name == kept else (await self.get(name)).name

    async def layer(self, name: str | None) -> Layer | None:
        """Return the policy of a template that is in use; `PlatformError` when it cannot be read any more."""
        if name is None:
            return None
        try:
            return (await self.get(name)).layer
        except InvalidRequest as error:
            raise PlatformError(
                f"this was made by the template '{name}', which cannot be used any more: {error.detail}",
                field="template",
                hint="let the operator bring the template back",
            ) from None

    async def forget(self, caller: Caller | OwnWork, context_id: str) -> None:
        """Forget the template of a deleted context, so that a new context of that name may have another.

        A template with rules is kept unless an administrator deletes the context: else an agent could drop its rules by
        deleting its context.
        """
        record = await self._store.newest_of_context(context_id)
        if record is None or record.state is not State.TERMINATED:
            return
        if caller.administers or not await self._has_rules(record.template):
            await self._store.forget(context_id)

    async def _has_rules(self, name: str | None) -> bool:
        """Whether a template has rules; True for one that cannot be read, because it may have had some."""
        try:
            return await self.layer(name) is not None
        except PlatformError:
            return True

    async def fill(
        self, caller: Caller | OwnWork, request: SandboxRequest, previous: SessionRecord | None
    ) -> SandboxRequest:
        """Return the request with the values of the template that it names, or that its context already has.

        A context keeps its template until it is deleted (see `forget`). Only an administrator can choose another for a
        terminated context: else an agent could start again without the rules of its template.
        """
        if previous is None or previous.forgotten:
            name = request.template or self._default
            return request if name is None else (await self.get(name)).fill(request)
        kept = previous.template
        ended = previous.state is State.TERMINATED
        if request.template is not None and request.template != kept:
            if not (ended and caller.administers):
                raise Conflict(
                    f"this context was made {'without a template' if kept is None else f'by the template {kept!r}'}",
                    field="template",
                    hint="leave the field out, or take another context",
                )
            return (await self.get(request.template)).fill(request)
        if kept is None:
            return request
        await self.layer(kept)
        if ended:
            return (await self.get(kept)).fill(request)
        return request.model_copy(update={"template": kept})

    # reading; blocking

    def _names(self) -> Names:
        found: set[str] = set()
        for directory in (SHIPPED, self._directory):
            try:
                found.update(entry.name for entry in os.scandir(directory) if entry.is_dir())
            except FileNotFoundError:
                continue
            except OSError as error:
                raise PlatformError(
                    f"the templates in {directory} cannot be read: {error.strerror}", field="templates_dir"
                ) from None
        return sorted(name for name in found if _NAME.fullmatch(name))

    def _read(self, name: str, known: tuple[Template, _Marks, float] | None) -> tuple[Template, _Marks]:
        folders = [os.path.join(each, name) for each in (self._directory, SHIPPED)]
        folder = next((each for each in folders if os.path.isdir(each)), None)
        if not _NAME.fullmatch(name) or folder is None:
            raise self._unknown(name)
        marks = tuple(_mark(os.path.join(folder, each)) for each in (".", RECIPE, SETTINGS, SOURCES))
        if known is not None and known[1] == marks:
            build = _build_folder(name, folder, known[0].recipe)
            return known[0] if build == known[0].build else replace(known[0], build=build), marks
        recipe, settings, sources = (_text(folder, each) for each in (RECIPE, SETTINGS, SOURCES))
        if folder == folders[1]:
            recipe, sources = self._named_search(name, recipe), self._named_search(name, sources)
        layer = None
        if settings is not None or sources is not None:
            where = {each: f"{name}/{each}" for each in (SETTINGS, SOURCES)}
            layer = Layer(
                where[SETTINGS],
                None if settings is None else settings_document.load(settings, where[SETTINGS]),
                None if sources is None else sources_document.load(sources, where[SOURCES]),
                where[SOURCES],
            )
            Policy.of([layer], context_id="example", workspace=WORKSPACE)  # raises for a rule that cannot be read
        read = Recipe() if recipe is None else recipes.load(recipe, f"{name}/{RECIPE}")
        try:
            requirements_of(read.packages)
        except InvalidRequest as error:
            raise InvalidRequest(f"{name}/{RECIPE}: {error.detail}", field="packages", hint=error.hint) from None
        build = _build_folder(name, folder, read)
        return Template(name, read, layer, shipped=folder == folders[1], build=build), marks

    def _named_search(self, name: str, text: bytes | None) -> bytes | None:
        """Put the search endpoint of the operator into a document of a shipped template."""
        if text is None or SEARCH_HOST not in text:
            return text
        if self._search_url is None:
            raise InvalidRequest(
                f"the template '{name}' needs a search endpoint, and this server names none",
                field="template",
                hint="let the operator set CARREL_SEARCH_URL, for example https://HOST/search?format=json&q={query}",
            )
        host = urlsplit(self._search_url).hostname or ""
        return text.replace(SEARCH_URL, self._search_url.encode()).replace(SEARCH_HOST, host.encode())

    def _unknown(self, name: str) -> InvalidRequest:
        names = self._names()
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        hint = f"did you mean '{near[0]}'?" if near else f"the templates are: {', '.join(names[:20]) or 'none'}"
        return InvalidRequest(f"there is no template '{name[:64]}'", field="template", hint=hint)


def _build_folder(name: str, folder: str, recipe: Recipe) -> BuildFolder | None:
    """Return the folder that the image of a template is built from. Blocking."""
    if recipe.build is None:
        return None
    top = os.path.normpath(os.path.join(folder, recipe.build))
    if not os.path.isfile(os.path.join(top, DOCKERFILE)):
        hint = f"add it, or correct `build` in {name}/{RECIPE}"
        raise InvalidRequest(f"the template '{name}' has no {recipe.build}/{DOCKERFILE}", field="build", hint=hint)
    digest, count = hashlib.sha256(name.encode()), 0
    for path, folders, files in os.walk(top):
        folders.sort()
        for each in sorted((*folders, *files)):
            found = os.lstat(os.path.join(path, each))
            digest.update(f"{path}/{each}\0{found.st_mode}\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
            count += 1
        if count > MOST_BUILD_FILES:
            why = f"the build folder of the template '{name}' has more than {MOST_BUILD_FILES} files"
            raise InvalidRequest(why, field="build", hint="keep only what the Dockerfile copies")
    return BuildFolder(top, f"{BUILT}{digest.hexdigest()[:40]}")


def _mark(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _text(folder: str, name: str) -> bytes | None:
    try:
        with open(os.path.join(folder, name), "rb") as file:
            return file.read(MAX_DOCUMENT + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidRequest(
            f"{os.path.join(folder, name)} cannot be read: {error.strerror}", field="template", hint="check its mode"
        ) from None
