"""`carrel here`: a coding agent, or any program, on the current folder.

The modules on the way to the first byte of the program import little, because `carrel here` must start quickly.
"""
