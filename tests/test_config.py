from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel import config
from carrel.errors import CarrelError, InvalidRequest, UnknownSetting
from carrel.models import Network


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_defaults() -> None:
    settings = config.load(environ={})
    assert (settings.host, settings.port, settings.auth, settings.token) == ("127.0.0.1", 7070, True, None)
    sandbox = settings.sandbox
    assert (sandbox.provider, sandbox.network, sandbox.timeout) == ("auto", Network.NONE, 300)
    assert (sandbox.cpu_limit, sandbox.memory_mb, sandbox.disk_mb, sandbox.processes) == (2, 2048, 1024, 512)
    assert not sandbox.allow_process


def test_workers() -> None:
    assert config.load(environ={}).workers == 1
    assert config.load(environ={"CARREL_WORKERS": "auto"}).workers == len(os.sched_getaffinity(0))
    assert config.load({"workers": 4}, environ={}).workers == 4
    for wrong in ("0", "65", "many", "-1", "1.5", ""):
        with pytest.raises(InvalidRequest, match="a number from 1 to 64, or auto") as caught:
            config.load({"workers": wrong}, environ={})
        assert caught.value.field == "workers"


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "carrel.toml"
    file.write_text('port = 1\nhost = "127.0.0.2"\nmax_sandboxes = 9\n[sandbox]\nmemory_mb = 100\nprocesses = 9\n')
    environ = {"CARREL_PORT": "2", "CARREL_SANDBOX_MEMORY_MB": "200"}
    settings = config.load({"sandbox.memory_mb": 300, "host": None}, environ=environ)
    assert (settings.host, settings.port, settings.max_sandboxes) == ("127.0.0.2", 2, 9)
    assert (settings.sandbox.memory_mb, settings.sandbox.processes) == (300, 9)


def test_file_by_name(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("port = 5\n")
    assert config.load(environ={"CARREL_CONFIG": "other.toml"}).port == 5
    assert config.load(environ={}, config=tmp_path / "other.toml").port == 5
    with pytest.raises(InvalidRequest) as caught:
        config.load(environ={}, config="absent.toml")
    assert caught.value.field == "config"


@pytest.mark.parametrize(
    ("environ", "near"),
    [({"CARREL_PROT": "1"}, "CARREL_PORT"), ({"CARREL_SANDBOX_MEMORY": "1"}, "CARREL_SANDBOX_MEMORY_MB")],
)
def test_unknown_variable_names_the_nearest(environ: dict[str, str], near: str) -> None:
    with pytest.raises(UnknownSetting) as caught:
        config.load(environ=environ)
    assert caught.value.field == next(iter(environ))
    assert near in (caught.value.hint or "")


def test_unknown_key_in_file(tmp_path: Path) -> None:
    (tmp_path / "carrel.toml").write_text("[sandbox]\nmemroy_mb = 4\n")
    with pytest.raises(UnknownSetting) as caught:
        config.load(environ={})
    assert caught.value.field == "sandbox.memroy_mb"
    assert "sandbox.memory_mb" in (caught.value.hint or "")


def test_unknown_flag() -> None:
    with pytest.raises(UnknownSetting):
        config.load({"prot": 1}, environ={})


def test_group_must_be_a_table(tmp_path: Path) -> None:
    (tmp_path / "carrel.toml").write_text("sandbox = 3\n")
    with pytest.raises(InvalidRequest) as caught:
        config.load(environ={})
    assert caught.value.field == "sandbox"


def test_broken_toml(tmp_path: Path) -> None:
    (tmp_path / "carrel.toml").write_text("port = \n")
    with pytest.raises(InvalidRequest) as caught:
        config.load(environ={})
    assert caught.value.field == "config"


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("CARREL_PORT", "70000", "port"),
        ("CARREL_PORT", "many", "port"),
        ("CARREL_AUTH", "perhaps", "auth"),
        ("CARREL_TOKEN", "a b", "token"),
        ("CARREL_SANDBOX_MEMORY_MB", "-1", "sandbox.memory_mb"),
        ("CARREL_SANDBOX_NETWORK", "everything", "sandbox.network"),
        ("CARREL_LOG_LEVEL", "loud", "log_level"),
    ],
)
def test_bad_value_names_the_field(name: str, value: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        config.load(environ={name: value})
    assert caught.value.field == field
    assert caught.value.hint


def test_names_of_the_client_are_known() -> None:
    environ = {"CARREL_URL": "http://127.0.0.1:1", "CARREL_TOKEN": "carrel_abcdef", "PATH": "x"}
    assert config.load(environ=environ).token == "carrel_abcdef"


def test_a_bad_token_is_not_shown() -> None:
    with pytest.raises(InvalidRequest) as caught:
        config.load(environ={"CARREL_TOKEN": "secret with spaces"})
    assert "secret" not in str(caught.value.problem())


def test_the_database_is_a_file_in_the_data_dir_or_a_url(tmp_path: Path) -> None:
    assert config.load({"data_dir": "here"}, environ={}).database_url == str(tmp_path / "here" / "carrel.db")
    for url in ("postgresql://carrel:hush-hush@db:5432/carrel", "postgres://db/x", "sqlite:////srv/x.db"):
        assert config.load(environ={"CARREL_DATABASE": url}).database_url == url


@pytest.mark.parametrize("url", ["mysql://carrel:hush-hush@db/x", "hush-hush", "", "postgresql:/hush-hush"])
def test_an_unknown_database_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        config.load(environ={"CARREL_DATABASE": url})
    assert caught.value.field == "database" and "postgresql" in (caught.value.hint or "")
    assert "hush" not in str(caught.value.problem())


def test_the_password_of_the_database_is_not_shown() -> None:
    settings = config.load(environ={"CARREL_DATABASE": "postgresql://carrel:hush-hush@db/x"})
    assert "hush" not in f"{settings} {settings!r} {settings.model_dump()} {settings.model_dump_json()}"


def test_data_dir_is_absolute(tmp_path: Path) -> None:
    assert config.load({"data_dir": "here"}, environ={}).data_dir == str(tmp_path / "here")


def test_every_setting_is_declared_with_a_meaning() -> None:
    declared = {each.name: each for each in config.declarations()}
    assert declared["sandbox.provider"].env == "CARREL_SANDBOX_PROVIDER"
    assert declared["port"].default == "7070"
    assert declared["sandbox.allow_process"].default == "false"
    assert all(each.description for each in declared.values())


@given(st.dictionaries(st.sampled_from([each.env for each in config.declarations()]), st.text(max_size=20)))
def test_any_environment_gives_settings_or_a_named_field(environ: dict[str, str]) -> None:
    try:
        config.load(environ=environ)
    except CarrelError as error:
        assert error.field


def test_the_key_of_the_secrets_is_checked_and_never_shown() -> None:
    good = base64.b64encode(bytes(range(32))).decode()
    settings = config.load(environ={"CARREL_SECRET_KEY": good})
    assert settings.secret_key is not None and settings.secret_key.get_secret_value() == good
    assert good not in repr(settings)
    for bad in ("c2hvcnQ=", "not base64 at all!", good + "AAAA"):
        with pytest.raises(InvalidRequest) as caught:
            config.load(environ={"CARREL_SECRET_KEY": bad})
        assert caught.value.field == "secret_key"
        assert bad not in str(caught.value.problem())


def test_the_largest_volume_is_not_below_the_first() -> None:
    assert config.load({"volumes_mb": 256, "volumes_max_mb": 512}, environ={}).volumes_max_mb == 512
    with pytest.raises(InvalidRequest, match="below the first size, volumes_mb = 1024") as caught:
        config.load({"volumes_mb": 1024, "volumes_max_mb": 512}, environ={})
    assert caught.value.field == "volumes_max_mb"
