"""The audit log: a record of every operation, chained by hashes, signed, searchable, and verifiable without the server.

`records` and `keys` define the hashes and signatures, `log` writes, `search` finds, `export` writes a file that
`verifying` checks. Knows no operation and no database.
"""

from carrel.audit.keys import SigningKey, public_key
from carrel.audit.log import AuditLog, Ticket, Unfinished
from carrel.audit.records import AuditEntry, Ending, chain_of, server_chain
from carrel.audit.search import Filter
from carrel.audit.verifying import Broken, Verification, verify

__all__ = [
    "AuditEntry",
    "AuditLog",
    "Broken",
    "Ending",
    "Filter",
    "SigningKey",
    "Ticket",
    "Unfinished",
    "Verification",
    "chain_of",
    "public_key",
    "server_chain",
    "verify",
]
