"""carrel as an A2A agent. Its tasks work in a workspace, wait for approval where policy asks for it, and outlive their
process. It calls the public API with the token of each task's caller.
"""

from carrel.extras import using

with using("a2a"):
    from carrel.integrations.a2a.server import AgentSettings, RunningAgent, running, serve

__all__ = ["AgentSettings", "RunningAgent", "running", "serve"]
