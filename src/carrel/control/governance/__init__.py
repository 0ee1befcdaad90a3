"""Policies, approvals and redaction of secrets. Knows nothing of Python, MCP, egress or jobs."""
