"""Relays HTTP requests and looks into them where a rule asks for it."""
