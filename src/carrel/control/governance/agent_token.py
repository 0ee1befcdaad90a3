"""The token that a server leaves on its machine for agents: local programs without a token of their own use it.

A person at the same machine approves requests of such an agent with the token of the administrator, which is another.
The caller stores the token.
"""

from __future__ import annotations

from carrel.audit import AuditEntry, AuditLog, Ending, server_chain
from carrel.errors import Unauthorized
from carrel.identity import ROOT, Grant, OwnerKind, Scope, Tokens
from carrel.metrics import OK

NAME = "local"
SCOPES = (Scope.OPERATE,)


async def agent_token(tokens: Tokens, audit: AuditLog, kept: str | None, node: str | None) -> str:
    """Return the stored token if it is still valid, else a new one. `node` names this server among several."""
    if kept and await _is_good(tokens, kept):
        return kept
    name = NAME if node is None else f"{NAME}@{node}"
    arguments = {"name": name, "kind": str(OwnerKind.AGENT), "scopes": [str(scope) for scope in SCOPES]}
    chain, digest = server_chain(audit.node), audit.hash_arguments(arguments)
    entry = AuditEntry(chain, audit.node, "session", "create_token", arguments=arguments, arguments_hash=digest)
    ticket = await audit.begin(entry)
    text, _ = await tokens.issue(Grant(name, OwnerKind.AGENT, SCOPES), ROOT)
    ticket.end(Ending(OK))
    return text


async def _is_good(tokens: Tokens, text: str) -> bool:
    """Whether this is a valid token of an agent: of this database, not revoked, not expired."""
    try:
        identity = await tokens.identify(text)
    except Unauthorized:
        return False
    return identity.kind is OwnerKind.AGENT and identity.has(Scope.OPERATE)
