from __future__ import annotations

from pathlib import Path

import pytest

from carrel.errors import Unsupported
from carrel.isolation.image_user import MOST, ImageUser, find


@pytest.fixture
def root(tmp_path: Path) -> str:
    (tmp_path / "etc").mkdir()
    (tmp_path / "real").write_text(
        "root:x:0:0:r:/root:/bin/sh\napp:x:100:101::/srv:\napp:x:7:7:::\n:x:1:1::\nbad:x:-1:0:::\n"
    )
    (tmp_path / "etc/passwd").symlink_to("/real")  # beneath the image, not on this host
    (tmp_path / "etc/group").write_text("staff:x:50:a,b\nhuge:x:99999999999:\n")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("user", "found"),
    [
        ("", ImageUser(0, 0, "root", "/root")),
        ("0", ImageUser(0, 0, "root", "/root")),
        ("root", ImageUser(0, 0, "root", "/root")),
        ("app", ImageUser(100, 101, "app", "/srv")),
        ("app:staff", ImageUser(100, 50, "app", "/srv")),
        ("100", ImageUser(100, 101, "app", "/srv")),
        ("100:5", ImageUser(100, 5, "app", "/srv")),
        ("4000", ImageUser(4000, 0, "", "/")),
        (f"{MOST}:{MOST}", ImageUser(MOST, MOST, "", "/")),
        (":staff", ImageUser(0, 50, "root", "/root")),
    ],
)
def test_found_as_container_engines_do(root: str, user: str, found: ImageUser) -> None:
    assert find(root, user) == found


@pytest.mark.parametrize("user", ["nobody", "app:none", "bad", "app:huge", str(MOST + 1), "-1", "٣", "x" * 100_000])
def test_refused(root: str, user: str) -> None:
    with pytest.raises(Unsupported) as caught:
        find(root, user)
    assert caught.value.field == "image" and caught.value.hint and len(caught.value.detail) < 300
