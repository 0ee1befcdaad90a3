"""Deciding what an agent may do: rules, the shell text they judge, package and git sources. Pure: no I/O, no clock."""
