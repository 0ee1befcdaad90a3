"""Models of pools: warm sandboxes that wait for their owner."""

from pydantic import Field

from carrel.models.base import Answer, Request


class PoolInfo(Answer):
    """The slots of one kind of sandbox: warm sandboxes that have no owner yet."""

    provider: str
    template: str | None = Field(default=None, description="the template of its sandboxes")
    image: str | None = Field(default=None, description="the image of its sandboxes; none for the root of the host")
    memory_mb: int | None = Field(default=None, description="their memory limit, where a slot needs it at its start")
    ready: int = Field(description="slots that wait for an owner")
    starting: int = Field(description="slots that are being started")
    wanted: int = Field(description="slots that the pool wants now; more than `size` after it has run dry")
    size: int = Field(description="its usual size")
    max: int = Field(description="the size to which it may grow")
    claimed: int = Field(description="sandboxes that were made from its slots")
    cold_starts: int = Field(description="sandboxes that started without a slot")
    last_failure: str | None = Field(default=None, description="why its newest slot failed; none if slots work")


class PoolList(Answer):
    """The pools of a server."""

    items: list[PoolInfo]


class PoolResize(Request):
    """A new size for the pools of a provider or a template, until the server ends."""

    size: int = Field(ge=0, le=10_000, description="how many slots each pool keeps ready; 0 ends them")
