from __future__ import annotations

import pytest
from alembic import command

from carrel.store.upgrades import config


def test_it_wants_the_connection_of_an_open_database() -> None:
    with pytest.raises(TypeError, match="opened"):
        command.upgrade(config(), "head")
