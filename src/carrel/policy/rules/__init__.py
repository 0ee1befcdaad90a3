"""Rules and layers of a policy, and the decisions made by them. Pure: no I/O, no clock."""
