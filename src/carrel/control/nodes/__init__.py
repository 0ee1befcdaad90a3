"""Several servers on one database: which there are, where a session belongs, and the proof of a forwarded request."""
