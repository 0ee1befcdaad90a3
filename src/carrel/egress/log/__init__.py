"""Writes down every outbound connection."""
