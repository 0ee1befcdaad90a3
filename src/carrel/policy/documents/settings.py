"""`settings.json`: which operations are allowed and which are denied. All others ask a person."""

from __future__ import annotations

from pydantic import Field, field_validator

from carrel.models.base import MAX_PATH
from carrel.policy.documents import documents
from carrel.policy.documents.documents import DocumentPart

NAME = "settings.json"
MOST_RULES = 100_000
MAX_RULE = 4096


class Permissions(DocumentPart):
    """The two lists of rules."""

    allow: tuple[str, ...] = Field(
        default=(), strict=False, max_length=MOST_RULES, description="operations that are allowed without asking"
    )
    deny: tuple[str, ...] = Field(
        default=(),
        strict=False,
        max_length=MOST_RULES,
        description="operations that are always refused, even if `allow` has them",
    )

    @field_validator("allow", "deny")
    @classmethod
    def _short(cls, rules: tuple[str, ...]) -> tuple[str, ...]:
        for index, rule in enumerate(rules):
            if len(rule) > MAX_RULE:
                raise ValueError(f"rule {index} is longer than {MAX_RULE} characters")
        return rules


class SettingsDocument(DocumentPart, title="Settings"):
    """A settings document."""

    context_workspace: str = Field(
        default="/workspace/${CONTEXT_ID}",
        max_length=MAX_PATH,
        description="the path of a context's workspace; `${CONTEXT_ID}` is the context. In rules `${WORKSPACE}` is "
        "this path",
    )
    permissions: Permissions = Field(default_factory=Permissions, description="the rules")

    @field_validator("context_workspace")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if not value.startswith("/") or "\0" in value:
            raise ValueError("it must be an absolute path")
        return value


def load(text: str | bytes, source: str = NAME) -> SettingsDocument:
    """Read a settings document. `Policy.of` parses the rules."""
    return documents.load(text, SettingsDocument, source)
