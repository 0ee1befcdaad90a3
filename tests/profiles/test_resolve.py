"""Profiles and their combination with the configuration of a user and of a folder."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carrel.control.sessions.masks import masks_of
from carrel.egress.outbound.names import read_authority
from carrel.egress.outbound.rules import EgressRules
from carrel.egress.plan import placeholder
from carrel.errors import InvalidRequest, UnknownSetting
from carrel.policy.documents import documents
from carrel.policy.documents.settings import Permissions, SettingsDocument
from carrel.policy.documents.sources import Sources
from carrel.policy.rules.decide import decide_file, decide_network, decide_shell
from carrel.policy.rules.layers import Layer, Policy
from carrel.profiles import files
from carrel.profiles.documents import (
    MOST_PROJECT_RULES,
    Profile,
    ProjectConfig,
    UserConfig,
    UserDocument,
    read_project_settings,
    read_toml,
)
from carrel.profiles.resolve import AgentSetup, GitRemote, Project, SharedFile, resolve

KEY = "sk-ant-0123456789abcdef"
REMOTE = GitRemote("github.com", "/team/app.git", ("git@github.com:", "ssh://git@github.com/"))


def setup(
    user: str = "",
    project: Project | None = None,
    *,
    program: str = "claude",
    environ: Mapping[str, str] | None = None,
    options: UserConfig | None = None,
) -> AgentSetup:
    name, profile = files.find_profile(program, "/nonexistent")
    return resolve(
        name,
        [program, "-p", "x"],
        default=files.read_profile(files.DEFAULT, "/nonexistent"),
        profile=profile,
        user=read_toml(user, UserDocument, "here.toml"),
        options=options or UserConfig(),
        project=project or Project(remotes=(REMOTE,)),
        environ={"ANTHROPIC_API_KEY": KEY} if environ is None else environ,
        home="/home/me",
        identity={"name": 'Ann "A"', "email": "ann@example.org"},
    )


def policy_of(found: AgentSetup) -> Policy:
    own = documents.build(found.settings, SettingsDocument, "settings")
    return Policy.of(
        [Layer("settings", own, documents.build(found.sources, Sources, "sources"))],
        context_id="c",
        workspace="/workspace",
    )


def web(found: AgentSetup) -> dict[str, list[dict[str, object]]]:
    return found.sources["web_access"]  # type: ignore[return-value]


@pytest.mark.parametrize("name", sorted(files.names("/nonexistent")))
def test_every_profile_makes_a_valid_policy(name: str) -> None:
    profile = files.read_profile(name, "/nonexistent")
    program = next(iter(profile.programs), "some-agent")
    every_key = {each.variable: KEY for each in profile.credentials}
    found = setup(program=program, environ=every_key)
    assert found.profile == name
    assert set(found.secrets) == set(every_key)
    policy = policy_of(found)
    assert not policy.warnings
    assert decide_shell(policy, [*found.command]).allows
    masks = masks_of(policy)
    assert masks is not None and masks.writable is None
    assert {"/workspace/.git/hooks/**", "/workspace/.github/workflows/**", "/workspace/.carrel/**"} <= set(
        masks.readonly
    )
    assert decide_file(policy, "write", "/workspace/.git/config").denies
    assert decide_file(policy, "write", "/workspace/Makefile").allows
    assert all(decide_network(policy, host, 443).allows for host in profile.hosts)
    assert decide_network(policy, "evil.example", 443).denies
    assert KEY not in repr(found) and KEY not in str(found.env)


def test_a_key_goes_to_its_host_and_a_placeholder_inside() -> None:
    found = setup()
    assert found.env["ANTHROPIC_API_KEY"] == placeholder("ANTHROPIC_API_KEY")
    assert found.secrets == {"ANTHROPIC_API_KEY": KEY}
    expected = {"host": "api.anthropic.com", "secret": "ANTHROPIC_API_KEY", "header": "x-api-key", "format": "{secret}"}
    assert expected in web(found)["credentials"]

    moved = setup(environ={"ANTHROPIC_API_KEY": KEY, "ANTHROPIC_BASE_URL": "https://gw.example.org:8443/v1"})
    assert web(moved)["credentials"][0]["host"] == "gw.example.org"
    assert decide_network(policy_of(moved), "gw.example.org", 8443).allows
    assert decide_network(policy_of(moved), "gw.example.org", 22).denies

    clear = setup(environ={"ANTHROPIC_API_KEY": KEY, "ANTHROPIC_BASE_URL": "http://gw.example.org"})
    assert clear.secrets == {} and "not https" in " ".join(clear.notes)
    assert "ANTHROPIC_API_KEY" in setup(environ={}).notes[0]
    with pytest.raises(InvalidRequest, match="ANTHROPIC_API_KEY"):
        setup(environ={"ANTHROPIC_API_KEY": "two\nlines"})


def test_git_goes_by_https_with_a_credential_for_the_folder_only() -> None:
    found = setup()
    [login] = found.git_logins
    assert (login.host, login.secret) == ("github.com", "git-github.com")
    credential = next(each for each in web(found)["credentials"] if each["secret"] == login.secret)
    assert credential["paths"] == ["/team/app", "/team/app.git"]
    assert {"github.com", "gitlab.com"} <= {each["host"] for each in web(found)["requests"]}
    assert {each["verdict"] for each in web(found)["requests"]} == {"ask"}
    text = found.home_texts[".config/git/config"]
    assert 'insteadOf = "git@github.com:"' in text and 'name = "Ann \\"A\\""' in text
    assert web(setup('push = "allow"'))["requests"] == []
    assert setup("git_credentials = false").git_logins == ()


def test_publishing_to_a_registry_of_the_user_asks() -> None:
    policy = policy_of(
        setup('registries = ["python-index.example", "*.crates.example"]\nallow_hosts = ["docs.example.org"]')
    )
    rules = EgressRules(policy)
    for host, asks in {"python-index.example": True, "a.crates.example": True, "docs.example.org": False}.items():
        target = read_authority(host, 443)
        assert rules.decide(target).allows and rules.inspected(target) is asks
        for method, path in (
            ("PUT", "/@team%2fname"),
            ("POST", "/legacy/"),
            ("PUT", "/api/v1/crates/new"),
            ("POST", "/api/v1/gems"),
            ("DELETE", "/api/v1/gems/yank"),
        ):
            verdict = rules.decide_request(target, method, path)
            assert (verdict is not None and verdict.asks) is asks
        for method, path in (("GET", "/@team%2fname"), ("GET", "/simple/x/"), ("POST", "/-/npm/v1/security/audits")):
            assert rules.decide_request(target, method, path) is None
    for wrong in ("*", "*.com", "python-index.example:8080"):
        with pytest.raises(InvalidRequest):
            setup(f'registries = ["{wrong}"]')


def test_the_user_chooses_how_many_files_may_be_deleted_and_a_project_lowers_it() -> None:
    def limit(user: str = "", project: int | None = None) -> int | None:
        return policy_of(setup(user, Project(ProjectConfig(delete_limit=project)))).limits.delete_limit

    assert (limit(), limit("delete_limit = 500")) == (200, 500)
    assert (limit("delete_limit = 500", 50), limit("delete_limit = 5", 50)) == (50, 5)


def test_the_user_widens_and_options_win() -> None:
    found = setup(
        'allow_hosts = ["docs.example.org"]\nunprotect = [".vscode"]\nunknown_hosts = "ask"\n'
        'home_files = ["~/.gitconfig", "/opt/tools", "profile"]\n'
        '[env]\nA = "1"\n[profiles.claude]\npush = "deny"\nallow = ["network(outbound:b.example.org:8080)"]\n',
        options=UserConfig(push="allow"),
    )
    policy = policy_of(found)
    assert decide_network(policy, "docs.example.org", 443).allows
    assert decide_network(policy, "b.example.org", 8080).allows
    assert decide_network(policy, "other.example", 443).asks
    assert decide_file(policy, "write", "/workspace/.vscode/tasks.json").allows
    assert web(found)["requests"] == [] and found.env["A"] == "1"
    assert SharedFile("/home/me/.gitconfig", "/home/agent/.gitconfig") in found.shared_files
    assert SharedFile("/opt/tools", "/opt/tools") in found.shared_files
    assert (
        SharedFile("/home/me/.claude/CLAUDE.md", "/home/agent/.claude/CLAUDE.md", optional=True) in found.shared_files
    )
    assert setup(program="codex").command[:2] == ("codex", "-c")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('allow_hosts = ["*"]', "every host"),
        ('allow_hosts = ["*.com"]', "top-level domain"),
        ('allow_hosts = ["*.co.uk"]', "everybody can register"),
        ('allow_hosts = ["0.0.0.0/0"]', "large part of all addresses"),
        ('allow = ["network(outbound:*)"]', "every host"),
        ('allow_hosts = ["a b"]', "not a domain"),
        ('protect = ["../x"]', "not a path inside"),
        ('unprotect = [".vscod"]', "not in the list"),
        ('home_files = ["~/"]', "home directory"),
        ("x = [", "not TOML"),
    ],
)
def test_what_is_too_broad_or_wrong_is_refused_with_the_reason(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        setup(text)


def test_unknown_keys_name_the_nearest() -> None:
    for text, model in (
        ("alow_hosts = []", UserDocument),
        ("only_host = []", ProjectConfig),
        ('description = "x"\nhost = []', Profile),
    ):
        with pytest.raises(UnknownSetting) as raised:
            read_toml(text, model, "here.toml")
        assert "did you mean" in str(raised.value.hint)
    with pytest.raises(UnknownSetting):  # a project cannot set variables, allow hosts, or unprotect
        read_toml('allow_hosts = ["a.org"]', ProjectConfig, ".carrel/here.toml")
    assert read_project_settings('{"editor.tabSize": 4}', "settings.json") is None


# --- a project can only take away

HOSTS = ["api.anthropic.com", "claude.ai", "*.example.org", "a.example.org", "a.example.org:8080", "10.1.0.0/16"]
TRIED = ["api.anthropic.com", "claude.ai", "a.example.org", "b.a.example.org", "github.com", "evil.example", "10.1.2.3"]
PATHS = [".git/hooks", ".git/config", ".vscode", "src", "src/**", "**/secret", ".carrel"]
RULES = [
    *(f"file({verb}:${{WORKSPACE}}/{path}/**)" for verb in ("read", "write", "delete") for path in ("src", ".git")),
    "shell(claude:*)", "shell(git push:*)", "shell(make)", "network(outbound:*)", "network(outbound:claude.ai)",
    "file(write:${WORKSPACE}/**)", "mcp(*:*)",
]  # fmt: skip
USERS = [
    "",
    'unknown_hosts = "ask"\npush = "allow"\nallow_hosts = ["*.example.org", "a.example.org:8080", "10.1.0.0/16"]\n'
    'unprotect = [".vscode"]\nhome_files = ["profile"]\nallow = ["shell(make)"]',
    'push = "deny"\ndeny_hosts = ["claude.ai"]\nnetwork = "none"\nprotect = ["src"]',
]
_lists = st.lists
_CONFIGS = st.builds(
    ProjectConfig,
    only_hosts=st.none() | _lists(st.sampled_from(HOSTS), max_size=4).map(tuple),
    deny_hosts=_lists(st.sampled_from(["claude.ai", "*.example.org", "*", "github.com"]), max_size=2).map(tuple),
    unknown_hosts=st.sampled_from([None, "deny"]),
    network=st.sampled_from([None, "none"]),
    push=st.sampled_from([None, "ask", "deny"]),
    git_credentials=st.sampled_from([None, False]),
    home_files=st.sampled_from([None, False]),
    protect=_lists(st.sampled_from(PATHS), max_size=3).map(tuple),
    deny=_lists(st.sampled_from(RULES), max_size=3).map(tuple),
    delete_limit=st.sampled_from([None, 0, 1000]),
)
_SETTINGS = st.builds(
    lambda allow, deny: SettingsDocument(
        context_workspace="/elsewhere", permissions=Permissions(allow=tuple(allow), deny=tuple(deny))
    ),
    _lists(st.sampled_from(RULES), max_size=3),
    _lists(st.sampled_from(RULES), max_size=3),
)
_ORDER = {"allow": 0, "ask": 1, "deny": 2}


def strictness(found: AgentSetup) -> dict[str, int]:
    """How strict a setup is about many things; a larger number is stricter."""
    policy = policy_of(found)
    masks = masks_of(policy)
    assert masks is not None
    tried = {f"{host}:{port}": decide_network(policy, host, port) for host in TRIED for port in (443, 8080)}
    tried |= {
        f"{verb} {path}": decide_file(policy, verb, f"/workspace/{path}")
        for verb in ("read", "write", "delete")
        for path in ("src/a", ".git/hooks/x", ".vscode/a", "secret")
    }
    tried |= {line: decide_shell(policy, line) for line in ("claude -p x", "make", "git push", "rm -rf x")}
    found_web = documents.build(found.sources, Sources, "sources").web_access
    assert found_web is not None
    pushes = {each.host: _ORDER[each.verdict] for each in found_web.requests}
    shut = masks.writable == ()
    return {
        **{key: _ORDER[verdict.verdict] for key, verdict in tried.items()},
        **{f"push {host}": value for host, value in pushes.items()},
        **{f"mask {place}": 1 for place in masks.readonly},
        "network": int(found.network == "none"),
        "unknown": _ORDER[found_web.unknown_domains],
        "credentials": -len(found_web.credentials),
        "secrets": -len(found.secrets),
        "home": -len(found.shared_files),
        "shut": int(shut),
        "deletions": -(policy.limits.delete_limit or 0),
    }


@settings(max_examples=60, deadline=None)
@given(config=st.none() | _CONFIGS, own=st.none() | _SETTINGS, user=st.sampled_from(USERS))
def test_whatever_a_project_says_the_result_is_never_milder(
    config: ProjectConfig | None, own: SettingsDocument | None, user: str
) -> None:
    bare = setup(user, Project(remotes=(REMOTE,)))
    found = setup(user, Project(config, own, (REMOTE,)))
    before, after = strictness(bare), strictness(found)
    milder = {
        key: (value, after.get(key, 0))
        for key, value in before.items()
        if after.get(key, 0) < value and not (key.startswith("mask ") and after["shut"])
    }
    assert not milder
    assert found.env == bare.env and found.command == bare.command
    assert set(found.secrets.items()) <= set(bare.secrets.items())


def test_many_rules_of_a_project_cannot_push_out_the_masks_of_the_user() -> None:
    deny = tuple(f"shell(program{number}:*)" for number in range(MOST_PROJECT_RULES))
    own = SettingsDocument(
        permissions=Permissions(deny=tuple(f"file(read:/workspace/f{n})" for n in range(MOST_PROJECT_RULES)))
    )
    found = setup("", Project(ProjectConfig(deny=deny), own))
    masks, bare = masks_of(policy_of(found)), masks_of(policy_of(setup("", Project())))
    assert masks is not None and bare is not None
    assert set(bare.readonly) <= set(masks.readonly)
    with pytest.raises(InvalidRequest):
        read_toml(f"deny = {[*deny, 'shell(x)']}", ProjectConfig, ".carrel/here.toml")


def test_shipped_profiles_name_their_version() -> None:
    for name, path in files.names("/nonexistent").items():
        with open(path, "rb") as file:
            assert tomllib.load(file)["description"]
        if name != files.DEFAULT:
            with open(path) as text:
                assert "Checked with" in text.readline()
