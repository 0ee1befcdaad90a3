"""Profiles of coding agents: what each of them may reach and change, as data, and the pure function that combines a
profile with the configuration of the user and of a project into policy documents, secrets and variables.
"""
