"""Documents on disk, in a folder that an agent may have filled; and git outside of it."""

from __future__ import annotations

import base64
import os
import subprocess
from pathlib import Path

import pytest

from carrel.errors import FileMissing, InvalidRequest
from carrel.profiles import files
from carrel.profiles.resolve import GitLogin, GitRemote

GITHUB = ("git@github.com:", "ssh://git@github.com/")


def git(*words: str, cwd: Path) -> None:
    subprocess.run(["git", *words], cwd=cwd, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("https://github.com/team/app.git", GitRemote("github.com", "/team/app.git")),
        ("https://me:token@github.com/team/app/", GitRemote("github.com", "/team/app")),
        ("git@github.com:team/app.git", GitRemote("github.com", "/team/app.git", GITHUB)),
        ("ssh://git@github.com/team/app.git", GitRemote("github.com", "/team/app.git", GITHUB)),
        ("http://github.com/team/app", None),
        ("https://github.com:8443/team/app", None),
        ("https://github.com/team/../app", None),
        ("https://github.com/a b", None),
        ("ext::sh -c touch% x", None),
        ("/srv/app.git", None),
    ],
)
def test_remotes_that_https_can_reach(url: str, found: GitRemote | None) -> None:
    assert files.read_remote(url) == found


def test_a_folder_says_what_it_has(tmp_path: Path) -> None:
    git("init", "-q", cwd=tmp_path)
    git("remote", "add", "origin", "git@github.com:team/app.git", cwd=tmp_path)
    (tmp_path / ".carrel").mkdir()
    (tmp_path / ".carrel/here.toml").write_text('push = "deny"')
    (tmp_path / "settings.json").write_text("// settings of another program\n{}")
    project = files.read_project(str(tmp_path))
    assert project.config is not None and project.config.push == "deny" and project.settings is None
    assert project.remotes == (GitRemote("github.com", "/team/app.git", GITHUB),) and not project.git_is_file
    (tmp_path / "settings.json").write_text('{"permissions": {"deny": ["shell(rm:*)"]}}')
    settings = files.read_project(str(tmp_path)).settings
    assert settings is not None and settings.permissions.deny == ("shell(rm:*)",)

    worktree = tmp_path / "worktree"
    git("-c", "user.name=a", "-c", "user.email=a@b.test", "commit", "-q", "--allow-empty", "-m", "x", cwd=tmp_path)
    git("worktree", "add", "-q", str(worktree), cwd=tmp_path)
    project = files.read_project(str(worktree))
    assert project.git_is_file and project.remotes[0].host == "github.com"


def test_planted_documents_are_refused_and_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "outside"
    secret.write_text('push = "deny"')
    folder = tmp_path / "folder"
    (folder / ".carrel").mkdir(parents=True)
    document = folder / ".carrel/here.toml"
    document.symlink_to(secret)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        files.read_project(str(folder))
    document.unlink()
    os.mkfifo(document)
    with pytest.raises(InvalidRequest, match="regular file"):
        files.read_project(str(folder))
    document.unlink()
    document.write_bytes(b"#" * (2 << 20))
    with pytest.raises(InvalidRequest, match="larger"):
        files.read_project(str(folder))
    document.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="not TOML"):
        files.read_project(str(folder))


def test_only_the_helper_of_the_user_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(
        f"[credential]\n\thelper = store --file={home}/kept\n[user]\n\tname = Ann\n\temail = ann@example.org\n"
    )
    (home / "kept").write_text("https://ann:pass%2Fword@github.com\n")
    folder = tmp_path / "folder"
    folder.mkdir()
    git("init", "-q", cwd=folder)
    git("config", "credential.helper", f"!touch {tmp_path}/planted; false", cwd=folder)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_DIR", str(folder / ".git"))
    monkeypatch.chdir(folder)
    found = files.ask_credential_helper(GitLogin("git-github.com", "github.com", "/team/app"))
    assert found is not None and base64.b64decode(found) == b"ann:pass/word"
    assert files.ask_credential_helper(GitLogin("x", "gitlab.com", "/team/app")) is None
    assert files.read_identity() == {"name": "Ann", "email": "ann@example.org"}
    assert not (tmp_path / "planted").exists()


def test_a_profile_of_the_user_replaces_one_of_carrel(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles/mine.toml").write_text('description = "mine"\nprograms = ["claude"]')
    (tmp_path / "profiles/claude.toml").write_text('description = "another"\nprograms = ["claude"]')
    assert files.find_profile("/opt/claude", str(tmp_path))[1].description == "another"
    assert files.find_profile("unheard-of", str(tmp_path))[0] == files.DEFAULT
    with pytest.raises(FileMissing, match="claud") as raised:
        files.read_profile("claud", str(tmp_path))
    assert "mine" in str(raised.value.hint)
