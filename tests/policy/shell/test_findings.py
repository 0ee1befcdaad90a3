from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from carrel.policy.shell.arguments import Unknown
from carrel.policy.shell.findings import Command, normal


def test_a_command_as_a_person_would_write_it() -> None:
    assert Command(("echo", "a b", Unknown('"$x"', "one"))).text == "echo 'a b' \"$x\""


@given(st.lists(st.sampled_from(["a", "..", ".", "", "b"]), max_size=8))
def test_a_normal_path_is_absolute_and_stays_so(parts: list[str]) -> None:
    path = normal("/" + "/".join(parts))
    assert path == normal(path)
    assert path.startswith("/")
    assert not {".", ".."} & set(path.split("/"))
    assert "//" not in path
