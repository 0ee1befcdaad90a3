"""Variables that change what a command runs. Setting one of them could run anything through a harmless command."""

from __future__ import annotations

from carrel.policy.shell.arguments import word_set

_SHELL = frozenset(
    {"PATH", "BASH_ENV", "ENV", "SHELLOPTS", "BASHOPTS", "PS0", "PS1", "PS2", "PS3", "PS4", "PROMPT_COMMAND"}
    | {"POSIXLY_CORRECT", "BASH_COMPAT", "EXECIGNORE", "BASH_ALIASES", "BASH_CMDS", "BASH_LOADABLES_PATH", "HOME"}
    | {"CDPATH", "SHELL", "BASH_XTRACEFD", "TEXTDOMAIN", "TEXTDOMAINDIR"}
)
_PROGRAMS = word_set("""
    PAGER EDITOR VISUAL BROWSER MANPAGER LESSOPEN LESSCLOSE LESS TAR_OPTIONS GREP_OPTIONS GCONV_PATH
    JAVA_TOOL_OPTIONS _JAVA_OPTIONS CLASSPATH XDG_CONFIG_HOME AWKPATH AWKLIBPATH TERMINFO LOCPATH NLSPATH
    ZDOTDIR OPENSSL_CONF SSLKEYLOGFILE PERLLIB PERLDB_OPTS CARREL_ENV RUBYOPT RUBYLIB TERMCAP WGETRC CURL_HOME
    SSH_ASKPASS SUDO_ASKPASS DISPLAY
""")
_TOOLS = word_set("""
    MANOPT MANROFFOPT LESSKEY LESSKEYIN LESSEDIT VIMINIT EXINIT VIM VIMRUNTIME MYVIMRC SYSTEMD_PAGER SYSTEMD_EDITOR
    DELTA_PAGER BAT_PAGER RIPGREP_CONFIG_PATH FZF_DEFAULT_COMMAND FZF_DEFAULT_OPTS ZIPOPT UNZIP ZIPINFO GZIP XZ_OPT
    XZ_DEFAULTS MAKEFLAGS MAKEFILES GNUMAKEFLAGS CC CXX CPP LD AR CMAKE_TOOLCHAIN_FILE RUSTC RUSTC_WRAPPER RUSTFLAGS
    GOFLAGS GOROOT MAVEN_OPTS GRADLE_OPTS JAVA_OPTS JDK_JAVA_OPTIONS JAVA_HOME PYTEST_ADDOPTS PYTEST_PLUGINS LUA_INIT
    LUA_PATH LUA_CPATH PHPRC PHP_INI_SCAN_DIR R_PROFILE R_PROFILE_USER R_ENVIRON R_ENVIRON_USER SVN_SSH SVN_EDITOR
    HGEDITOR HGMERGE HGRCPATH CVS_RSH CVSEDITOR FCEDIT SSH_ASKPASS_REQUIRE XDG_CONFIG_DIRS INPUTRC PSQLRC PSQL_EDITOR
    PSQL_PAGER MYSQL_HOME MAILCAPS OPENSSL_MODULES OPENSSL_ENGINES PERL_MM_OPT GEM_HOME GEM_PATH BUNDLE_GEMFILE
    TEXMFCNF GIO_EXTRA_MODULES GTK_MODULES QT_PLUGIN_PATH
""")
_PREFIXES = ("LD_", "DYLD_", "BASH_FUNC_", "PERL5", "NODE_", "GIT_", "RSYNC_", "PIP_", "UV_", "NPM_CONFIG_", "CARGO_")
_INTEGERS = frozenset({"RANDOM", "SRANDOM", "SECONDS", "LINENO", "OPTIND", "HISTCMD", "EPOCHSECONDS", "BASH_SUBSHELL"})
_OWN = {"PYTHON": ("python", "pytest"), "NODE_": ("node",), "PERL5": ("perl",)}


LOCALE = frozenset({"LANG", "LC_ALL", "LC_CTYPE"})
"""Variables that change which bytes are one character."""


def changes_what_runs(name: str) -> bool:
    """Whether a variable decides what a command runs."""
    if name in _SHELL or name in _PROGRAMS or name in _TOOLS or name.startswith((*_PREFIXES, "PYTHON")):
        return True
    return name.upper().startswith("NPM_CONFIG_")


def belongs_to(name: str, program: str) -> bool:
    """Whether a variable is one of an interpreter's own, which can run anything anyway."""
    return any(name.startswith(prefix) and program.startswith(own) for prefix, own in _OWN.items())


def is_evaluated(name: str) -> bool:
    """Whether the shell evaluates what is assigned to a variable."""
    return name in _INTEGERS
