"""The policy of a context: its documents, and explanations of its verdicts."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from carrel.api.guard import GuardedRouter
from carrel.api.parts import Context, Plane, Who, as_json, caller_of, context_of, json_of, plane_of
from carrel.models import ExplainRequest, Explanation, PolicyDocuments, PolicyInfo
from carrel.models.operations import DELETE_POLICY, EXPLAIN_POLICY, GET_POLICY, PUT_POLICY

router = GuardedRouter(tags=["policies"])


@router.operation(
    GET_POLICY, "The policy of a context", PolicyInfo, responses={304: {"description": "The version is unchanged"}}
)
async def get_policy(request: Request) -> Response:
    """The documents, with warnings for their author. A context without a policy has version 0. With the header
    `If-None-Match: "VERSION"` there is no body if that is still the version.
    """
    context_id, policies = context_of(request), plane_of(request).policies
    known = request.headers.get("if-none-match")
    if known is not None and known == _tag(await policies.version(context_id)):
        return Response(status_code=304, headers={"etag": known})
    found = await policies.get(context_id)
    answer = as_json(found)
    answer.headers["etag"] = _tag(found.version)
    return answer


def _tag(version: int) -> str:
    return f'"{version}"'


@router.operation(PUT_POLICY, "Change the policy of a context", PolicyInfo, 409, 413, parses=PolicyDocuments)
async def put_policy(request: Request) -> Response:
    """Refused completely when a rule cannot be read. It applies from the next operation on."""
    context_id, body = context_of(request), await json_of(request, PolicyDocuments)
    plane, caller = plane_of(request), caller_of(request)
    arguments = body.model_dump(mode="json", exclude_unset=True)
    async with plane.operations.admit(caller, PUT_POLICY, arguments, context_id=context_id):
        return as_json(await plane.policy_changes.put(context_id, body, caller.identity.subject))


@router.operation(DELETE_POLICY, "Delete the policy of a context", None)
async def delete_policy(context_id: Context, plane: Plane, caller: Who) -> Response:
    """From now on the policy of the server applies."""
    async with plane.operations.admit(caller, DELETE_POLICY, {}, context_id=context_id):
        await plane.policy_changes.delete(context_id)
    return Response(status_code=204)


@router.operation(EXPLAIN_POLICY, "Explain the verdict on a command", Explanation, 413)
async def explain_policy(context_id: Context, body: ExplainRequest, plane: Plane) -> Response:
    """Part by part. Runs nothing."""
    return as_json(await plane.policies.explain(context_id, body.command, body.cwd))
