"""carrel as an MCP server: the workspace of a context as tools, over stdio or streamable HTTP.

It calls the public API with the token of its caller and has no privileges of its own.
"""
