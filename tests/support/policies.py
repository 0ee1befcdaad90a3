"""Small policies for tests."""

from __future__ import annotations

from carrel.policy.documents.settings import SettingsDocument
from carrel.policy.documents.sources import Sources
from carrel.policy.rules.layers import Layer, Policy


def settings(allow: list[str] | None = None, deny: list[str] | None = None) -> SettingsDocument:
    """A settings document."""
    return SettingsDocument.model_validate({"permissions": {"allow": allow or [], "deny": deny or []}})


def policy(allow: list[str] | None = None, deny: list[str] | None = None) -> Policy:
    """A policy of one layer."""
    return Policy.of([Layer("settings.json", settings(allow, deny))], context_id="c", workspace="/workspace/c")


def sources(**keys: object) -> Sources:
    """A sources document."""
    return Sources.model_validate(keys)
