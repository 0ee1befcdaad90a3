"""carrel as an MCP server: a context's workspace as tools, over stdio or streamable HTTP.

A client of the public API with the token of who calls: it has no privilege of its own, and policy, approvals and the
audit log hold as they do for everybody.
"""
