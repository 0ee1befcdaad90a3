from __future__ import annotations

from pathlib import Path

from carrel.workspaces.marks import Marks


def test_a_volume_is_unfinished_until_it_is_recorded(tmp_path: Path) -> None:
    marks = Marks(str(tmp_path / "marks"))
    marks.prepare()
    marks.prepare()
    for volume in ("ctx-a", "ctx-b", "ctx-c"):
        marks.making(volume)
        marks.making(volume)
    marks.whole("ctx-b")
    marks.whole("ctx-c")
    marks.whole("ctx-never")
    marks.clear("ctx-c")
    marks.clear("ctx-c")
    assert Marks(str(tmp_path / "marks")).unfinished() == {"ctx-a": False, "ctx-b": True}
    marks.making("ctx-b")
    marks.whole("ctx-b")
    marks.clear("ctx-b")
    assert marks.unfinished() == {"ctx-a": False}
