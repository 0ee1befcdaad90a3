"""carrel as an A2A agent: tasks that work in a workspace, wait for a person where policy asks for one, and outlive
their process. A client of the public API; each caller's own token does what their tasks do.
"""

from carrel.extras import using

with using("a2a"):
    from carrel.integrations.a2a.server import AgentSettings, RunningAgent, running, serve

__all__ = ["AgentSettings", "RunningAgent", "running", "serve"]
