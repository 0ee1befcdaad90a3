"""The audit log: what every operation leaves behind, linked, signed, searchable, and verifiable without carrel's help.

`records` and `heads` say what is hashed and signed, `log` writes, `search` finds, `export` and `verifying` are the two
ends of a file that leaves the server. Knows no operation and no database.
"""

from carrel.audit.keys import SigningKey, public_key
from carrel.audit.log import AuditLog, Ticket, Unfinished
from carrel.audit.records import Ending, Entry, chain_of, server_chain
from carrel.audit.search import Filter
from carrel.audit.verifying import Broken, Verdict, verify

__all__ = [
    "AuditLog",
    "Broken",
    "Ending",
    "Entry",
    "Filter",
    "SigningKey",
    "Ticket",
    "Unfinished",
    "Verdict",
    "chain_of",
    "public_key",
    "server_chain",
    "verify",
]
