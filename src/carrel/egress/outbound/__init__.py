"""Decides where a connection may go, looks names up and dials."""
