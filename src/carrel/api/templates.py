"""Templates: list them, and manage the secrets of their sandboxes."""

from __future__ import annotations

from typing import Annotated

from starlette.responses import Response

from carrel.api.guard import GuardedRouter
from carrel.api.parameters import Path
from carrel.api.parts import Plane, Who, as_json
from carrel.models import SecretList, SecretName, SecretValue, TemplateList, TemplateName
from carrel.models.operations import DELETE_TEMPLATE_SECRET, LIST_TEMPLATE_SECRETS, LIST_TEMPLATES, PUT_TEMPLATE_SECRET

router = GuardedRouter(tags=["templates"])

Template = Annotated[TemplateName, Path(alias="template", description="the name of a template")]
Name = Annotated[str, Path(min_length=1, max_length=128)]


@router.operation(LIST_TEMPLATES, "The templates of the server", TemplateList)
async def list_templates(plane: Plane) -> Response:
    """By name. A template that cannot be used says why."""
    return as_json(await plane.packages.templates())


@router.operation(LIST_TEMPLATE_SECRETS, "The secrets of a template", SecretList)
async def list_template_secrets(template: Template, plane: Plane) -> Response:
    """Names and versions, never values."""
    return as_json(await plane.secrets.list(template, kind="template"))


@router.operation(PUT_TEMPLATE_SECRET, "Store a secret of a template", SecretName, 413, 422, 502)
async def put_template_secret(template: Template, name: Name, body: SecretValue, plane: Plane, caller: Who) -> Response:
    """Every sandbox of the template has it as the file `/run/secrets/NAME`, unless its context has one of that name;
    running ones get it at once.
    """
    await plane.templates.get(template)
    async with plane.operations.admit(caller, PUT_TEMPLATE_SECRET, {"template": template, "name": name}):
        return as_json(await plane.secrets.put(template, name, body.bytes(), kind="template"))


@router.operation(DELETE_TEMPLATE_SECRET, "Delete a secret of a template", None, 404, 502)
async def delete_template_secret(template: Template, name: Name, plane: Plane, caller: Who) -> Response:
    """Running sandboxes lose it at once."""
    async with plane.operations.admit(caller, DELETE_TEMPLATE_SECRET, {"template": template, "name": name}):
        await plane.secrets.delete(template, name, kind="template")
    return Response(status_code=204)
