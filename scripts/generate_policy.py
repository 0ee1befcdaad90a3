"""Generates the reference page and the JSON schemas of the policy documents from their models."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from generate_reference import HEAD

if TYPE_CHECKING:
    from carrel.policy.shell.options import ProgramOptions


def page() -> str:
    """Return the page: the rules, the keys of the policy documents, and the programs that the shell reader knows."""
    from carrel.policy.documents import settings, sources
    from carrel.policy.rules import layers, rules
    from carrel.policy.shell import options, wrappers

    parts = [
        HEAD,
        "# Policy\n\n",
        "`settings.json` says which operations are allowed and denied. `sources.json` says what an agent may connect\n"
        "to and install. [How to write a policy](../how-to/write-a-policy.md) shows both. JSON schemas:\n"
        "[settings](settings.schema.json), [sources](sources.schema.json). An unknown key is an error that names the\n"
        "most similar known key; keys that begin with `_comment` are ignored.\n\n## Rules\n\n```\n",
        inspect.cleandoc((rules.__doc__ or "").partition("\n\n")[2].partition("\n\nA trailing")[0]),
        '\n```\n\nA trailing `:*` means "and anything after it". A deny rule beats an allow rule. If no rule\n'
        "matches, the operation asks a person.\n\n",
        _RULES,
        "\n## settings.json\n\n",
        *_keys(settings.SettingsDocument),
        "\n## sources.json\n\n",
        *_keys(sources.Sources),
        "\n## Allowed unless denied\n\nBuiltins of the shell, which start no program: ",
        ", ".join(f"`{rule[6:-3]}`" for rule in layers.DEFAULTS.permissions.allow),
        ".\n\n## Programs that run others\n\nThe policy decides about each one and about the programs that it runs: ",
        ", ".join(f"`{name}`" for name in sorted(wrappers.RUNNERS | {"find"})),
        ". A command with an unknown option, or with words known only at run time, asks.\n",
        "\n## Options that run or write something else\n\n",
        _OPTIONS,
        *_programs(options.PROGRAMS, options.GIT),
    ]
    return "".join(parts)


_RULES = """\
- **shell** rules match words, never text. In an allow rule a name without a directory is the program of this name in a
  system directory; in a deny rule it is the program of this name in any directory. A word known only at run time
  matches an allow rule only where the rule has `:*` or `*`; a command that a deny rule might match because of it
  asks. So does a command that contains the words of a deny rule with options between them (`git -C x push`).
- **file** rules match file operations and redirections in shell text. `**` matches any depth, and a trailing `/**` or
  `:*` matches the folder itself too. Paths are compared as written, without `.` and `..`. For links and for what
  programs do, the sandbox hides files or mounts them read-only: this covers everything that a deny rule for writing
  matches when the sandbox starts. Files that programs make later, and deny rules for deleting inside a writable folder,
  are checked only for operations; `carrel policy set` warns about them.
- **network** rules match a host (`a.org`), every host below a domain (`*.a.org`), an address or a network
  (`10.0.0.0/8`); with a port, only this port.
- **mcp** rules match a tool of a server.
- `${WORKSPACE}` and `${CONTEXT_ID}` are the workspace and the context.
- A command of more than 65,536 characters asks. So does one that takes too many steps to decide (about 32 for each
  character: scripts inside scripts, functions that call functions, very many rules), and a path of more than 4,096
  characters.
- Allow rules that allow everything (`shell(*)`, `network(outbound:*)`, `network(outbound:*.com)`, `file(write:/**)`)
  are refused. Allow rules for programs that can run anything, rules without effect and duplicate rules give a warning.
"""


_OPTIONS = """\
Some options make an allowed program run another program or write another file. The policy decides about what such an
option does: about the command that it runs by the shell rules, about the file that it writes by the file rules; other
such options ask. Combined letters (`-no file`), values joined to their option and abbreviated names (`--comp=…`) are
read as the programs read them. An argument that is known only at run time and could be such an option asks. It cannot
be one after `--`, or with a fixed beginning as in `./"$x"`.

- `find`: `-exec`, `-execdir`, `-ok`, `-okdir` run programs; `-fprint`, `-fprint0`, `-fprintf`, `-fls` write files;
  `-delete` deletes the folders that it starts from.
- `sed`: the commands `e` and `w`, the flags `e` and `w` of `s`, and `-i`; a script in a file (`-f`) asks.
- `awk`: `system`, pipes and output to files ask, and so do programs in files.
- `git -c` and `git config` ask for every setting that is not known to be harmless. Hooks and settings that are already
  in a repository are not checked.

| program | runs a command | writes a file | asks |
| --- | --- | --- | --- |
"""


def _programs(programs: Mapping[str, ProgramOptions], git: Mapping[str, ProgramOptions]) -> Iterator[str]:
    every = {**programs, **{f"git {name}": each for name, each in git.items()}}
    for name, program in sorted(every.items()):
        columns = [
            [f"`-{key}`" if len(key) < 3 else f"`--{key}`" for key, does in program.options.items() if does in kinds]
            for kinds in ({"text", "program"}, {"file"}, {"asks", "setting"})
        ]
        if program.operand is not None:
            columns[1].append(
                f"`{program.prefix}FILE`" if program.prefix else f"operands from number {program.operand + 1}"
            )
        yield f"| `{name}` | " + " | ".join(", ".join(each) for each in columns) + " |\n"


def _keys(model: Any, prefix: str = "") -> Iterator[str]:
    rows = list(_rows(model, prefix))
    yield "| key | default | meaning |\n| --- | --- | --- |\n"
    yield from rows


def _rows(model: Any, prefix: str) -> Iterator[str]:
    from pydantic import BaseModel

    for name, info in model.model_fields.items():
        kinds = [info.annotation, *getattr(info.annotation, "__args__", ())]
        kinds += [inner for kind in kinds for inner in getattr(kind, "__args__", ())]
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        many = "[]" if inner is not None and info.annotation is not inner and "tuple" in str(info.annotation) else ""
        default = (
            "required" if info.is_required() else "" if inner or info.default in (None, ()) else f"`{info.default}`"
        )
        default = "" if info.default_factory else default
        yield f"| `{prefix}{name}{many}` | {default} | {' '.join((info.description or '').split())} |\n"
        if inner is not None and not (prefix.endswith("package_managers.") and name != "pip"):
            yield from _rows(inner, f"{prefix}{name}{many}.")


def schema(name: str) -> str:
    """Return the JSON schema of a policy document."""
    from carrel.policy.documents import settings, sources

    model = {"settings": settings.SettingsDocument, "sources": sources.Sources}[name]
    made = {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema()}
    for part in (made, *made.get("$defs", {}).values()):
        part["patternProperties"] = {"^_comment": {}}
    return json.dumps(made, indent=2, sort_keys=True) + "\n"
