"""Changes the key that encrypts the secrets, while no server runs. The order of its steps lets it stop anywhere and be
repeated: every secret can always be decrypted with a key that is in a file or that the operator has.

A key in the data directory is replaced last: the new key is in a file beside it before it encrypts anything, and
replaces it when everything is encrypted with it and on disk. A server does not start in between.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from carrel.config import Settings
from carrel.errors import InvalidRequest, NotFound
from carrel.secrets import KEY_FILE, Vault, decoded_key, next_key, replace_key, rewrap
from carrel.store import Database, SecretStore


@dataclass(frozen=True, slots=True)
class Rekeyed:
    """The numbers of secrets and former values that were encrypted again, the number that no given key decrypts, and
    the id and file of the new key.
    """

    secrets: int
    former: int
    left: int
    key_id: str
    key_file: str


async def rekey(settings: Settings, *, old_key: str | None = None, new_key: str | None = None) -> Rekeyed:
    """Encrypt everything with a new key: the one in the file `new_key`, else a generated one. Decrypts with the current
    key and with the one in the file `old_key`. The caller makes sure that no server uses the data directory.
    """
    kept = os.path.join(settings.data_dir, KEY_FILE)
    olds = [] if old_key is None else [Vault.of_file(old_key, "old_key")]
    if settings.secret_key is not None:
        olds.append(Vault(decoded_key(settings.secret_key.get_secret_value(), "secret_key")))
        if new_key is None:
            raise InvalidRequest(
                "the key is the setting secret_key, so the new one must come in a file",
                field="new_key",
                hint="(umask 077; head -c 32 /dev/urandom | base64 > new.key), then give it with --new-key new.key",
            )
    elif os.path.lexists(kept):
        olds.append(Vault.of_file(kept, "data_dir"))
    if not olds:
        raise NotFound(
            f"there is no key to change: {kept} does not exist",
            field="data_dir",
            hint="name the data directory of the server with --data-dir, or a file with the key with --old-key",
        )
    theirs = None if settings.secret_key is None else new_key  # the operator keeps it
    database = await Database.open(settings.database_url)
    try:
        new = next_key(settings.data_dir, new_key) if theirs is None else Vault.of_file(theirs, "new_key")
        store = SecretStore(database)
        done = [await rewrap(store, old, new) for old in olds]
        left = await store.not_sealed_with(new.key_id)
        await database.sync()
    finally:
        await database.close()
    if theirs is None:
        replace_key(settings.data_dir)
    return Rekeyed(
        secrets=sum(each.secrets for each in done),
        former=sum(each.former for each in done),
        left=left,
        key_id=new.key_id,
        key_file=kept if theirs is None else os.path.abspath(theirs),
    )
