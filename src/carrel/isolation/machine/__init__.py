"""Virtual machines: what runs on the host for one, what runs first in it, and the connections between the two."""
