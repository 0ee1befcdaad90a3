"""The agent card: the agent's description, its URLs and its authentication. Pure."""

from __future__ import annotations

from a2a.types.a2a_pb2 import (
    AgentCapabilities,
    AgentCard,
    AgentInterface,
    AgentProvider,
    AgentSkill,
    HTTPAuthSecurityScheme,
    SecurityRequirement,
    SecurityScheme,
    StringList,
)
from a2a.utils.constants import PROTOCOL_VERSION_0_3, PROTOCOL_VERSION_1_0, TransportProtocol

RPC_PATH = "/"
REST_PATH = "/rest"
SCHEME = "carrel"
_TEXT, _JSON = "text/plain", "application/json"


def agent_card(url: str, *, model: str, version: str) -> AgentCard:
    """Build the card of an agent at `url`."""
    url = url.rstrip("/")
    places = [(TransportProtocol.JSONRPC, url + RPC_PATH), (TransportProtocol.HTTP_JSON, url + REST_PATH)]
    return AgentCard(
        name="carrel",
        description="Works in a private, durable, governed workspace: every context has an isolated machine of its "
        "own, whose files stay. What its policy leaves to a person makes a task wait for them.",
        version=version,
        provider=AgentProvider(organization="carrel", url=url),
        supported_interfaces=[
            AgentInterface(url=place, protocol_binding=binding.value, protocol_version=spoken)
            for spoken in (PROTOCOL_VERSION_1_0, PROTOCOL_VERSION_0_3)
            for binding, place in places
        ],
        capabilities=AgentCapabilities(streaming=True, push_notifications=True),
        security_schemes={
            SCHEME: SecurityScheme(
                http_auth_security_scheme=HTTPAuthSecurityScheme(
                    scheme="bearer", description="A token of carrel; all the agent does is done with it."
                )
            )
        },
        security_requirements=[SecurityRequirement(schemes={SCHEME: StringList()})],
        default_input_modes=[_TEXT, _JSON],
        default_output_modes=[_TEXT, _JSON, "application/octet-stream"],
        skills=[_skill(model)],
    )


def _skill(model: str) -> AgentSkill:
    if model == "shell":
        return AgentSkill(
            id="shell",
            name="Run a command",
            description="The message is a shell command. It runs in the workspace of the context; files it leaves in "
            "output/ come back as artifacts.",
            tags=["shell", "sandbox", "files"],
            examples=["uname -a", "mkdir -p output && date > output/now.txt"],
        )
    return AgentSkill(
        id="work",
        name="Work in a workspace",
        description="Runs commands and Python and edits files in the workspace of the context to do what the message "
        "asks for; files left in output/ come back as artifacts.",
        tags=["code", "shell", "python", "files", "sandbox"],
        examples=["Find the slowest test of this project and make it faster.", "Plot data.csv into output/plot.png."],
    )
