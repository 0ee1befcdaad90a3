"""E2B's wire: E2B's own SDKs work in carrel's sandboxes, unmodified.

A translation and nothing else: each request becomes requests of carrel's own API, which pass the gate. So tokens,
policy, approvals, audit, events and forwarding are the same, and nothing here knows of sessions or supervisors.
"""
