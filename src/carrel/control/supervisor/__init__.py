"""The client of the supervisor: connection, frames, validation of its answers."""
