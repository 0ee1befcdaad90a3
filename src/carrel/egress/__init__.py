"""Outbound network (egress): the proxy process through which every connection of a sandbox goes."""
