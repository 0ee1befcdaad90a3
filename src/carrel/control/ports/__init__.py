"""The ports of sandboxes from outside: who may reach one, and HTTP, WebSockets and bytes to the server behind it."""
