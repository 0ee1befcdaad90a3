"""Variables that change what a command runs: who sets one could run anything through a harmless name."""

from __future__ import annotations

_SHELL = frozenset(
    {"PATH", "BASH_ENV", "ENV", "SHELLOPTS", "BASHOPTS", "PS0", "PS1", "PS2", "PS3", "PS4", "PROMPT_COMMAND"}
    | {"POSIXLY_CORRECT", "BASH_COMPAT", "EXECIGNORE", "BASH_ALIASES", "BASH_CMDS", "BASH_LOADABLES_PATH", "HOME"}
    | {"CDPATH", "SHELL", "BASH_XTRACEFD", "TEXTDOMAIN", "TEXTDOMAINDIR"}
)
_PROGRAMS = frozenset(
    {"PAGER", "EDITOR", "VISUAL", "BROWSER", "MANPAGER", "LESSOPEN", "LESSCLOSE", "LESS", "TAR_OPTIONS"}
    | {"GREP_OPTIONS", "GCONV_PATH", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "CLASSPATH", "XDG_CONFIG_HOME", "AWKPATH"}
    | {
        "AWKLIBPATH",
        "TERMINFO",
        "LOCPATH",
        "NLSPATH",
        "ZDOTDIR",
        "OPENSSL_CONF",
        "SSLKEYLOGFILE",
        "PERLLIB",
        "PERLDB_OPTS",
    }
    | {"CARREL_ENV", "RUBYOPT", "RUBYLIB", "TERMCAP", "WGETRC", "CURL_HOME", "SSH_ASKPASS", "SUDO_ASKPASS", "DISPLAY"}
)
_PREFIXES = ("LD_", "DYLD_", "BASH_FUNC_", "PERL5", "NODE_", "GIT_", "RSYNC_", "PIP_", "UV_", "NPM_CONFIG_")
_INTEGERS = frozenset({"RANDOM", "SRANDOM", "SECONDS", "LINENO", "OPTIND", "HISTCMD", "EPOCHSECONDS", "BASH_SUBSHELL"})
_OWN = {"PYTHON": ("python", "pytest"), "NODE_": ("node",), "PERL5": ("perl",)}


LOCALE = frozenset({"LANG", "LC_ALL", "LC_CTYPE"})
"""Variables that change which bytes are one character."""


def changes_what_runs(name: str) -> bool:
    """Whether a variable decides what a command runs."""
    if name in _SHELL or name in _PROGRAMS or name.startswith((*_PREFIXES, "PYTHON")):
        return True
    return name.upper().startswith("NPM_CONFIG_")


def belongs_to(name: str, program: str) -> bool:
    """Whether a variable only tells an interpreter what the interpreter could be told anyway."""
    return any(name.startswith(prefix) and program.startswith(own) for prefix, own in _OWN.items())


def is_evaluated(name: str) -> bool:
    """Whether the shell evaluates what is assigned to a variable."""
    return name in _INTEGERS
