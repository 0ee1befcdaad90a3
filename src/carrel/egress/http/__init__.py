"""Relays HTTP requests, and inspects them if the policy says so."""
