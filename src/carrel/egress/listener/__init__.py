"""Accepts the connections of sandboxes: CONNECT, SOCKS, TLS hellos."""
