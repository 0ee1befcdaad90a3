"""LangGraph on carrel: governed tools, a ready graph, and checkpoints from which any process can continue.

A client of the public API: the model, the graph and its state stay in the process that uses this.
"""

from carrel.extras import using

with using("langgraph"):
    from carrel.integrations.langgraph.approvals import PendingApproval, answer, at_rest, pending
    from carrel.integrations.langgraph.checkpoints import Checkpoints, open_checkpointer
    from carrel.integrations.langgraph.graph import build_graph
    from carrel.integrations.langgraph.metrics import ModelMetrics
    from carrel.integrations.langgraph.models import ShellModel, resolve_model
    from carrel.integrations.langgraph.tools import carrel_tools
    from carrel.integrations.langgraph.workspace import Workspace

__all__ = [
    "Checkpoints",
    "ModelMetrics",
    "PendingApproval",
    "ShellModel",
    "Workspace",
    "answer",
    "at_rest",
    "build_graph",
    "carrel_tools",
    "open_checkpointer",
    "pending",
    "resolve_model",
]
