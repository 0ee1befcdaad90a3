"""MCP servers that run in sandboxes: added, installed, discovered, called."""
