"""Identities of servers and sandboxes: X.509 SVIDs from carrel's own authority or from SPIRE, and their renewal.

Knows no server, session or provider. IDs, credentials and TLS contexts are values of `carrel.primitives.spiffe`.
"""
