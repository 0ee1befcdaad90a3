"""Shared by tests: servers, sandboxes, checks. Holds no test."""
