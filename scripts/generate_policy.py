"""The reference page and the JSON schemas of the policy documents, from their models."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from generate_reference import HEAD

if TYPE_CHECKING:
    from carrel.policy.shell.options import Program


def page() -> str:
    """Every key of the policy documents, the rules, and what is read in shell text."""
    from carrel.policy.documents import settings, sources
    from carrel.policy.rules import layers, rules
    from carrel.policy.shell import options, wrappers

    parts = [
        HEAD,
        "# Policy\n\n",
        "`settings.json` says which operations are allowed and denied, `sources.json` what may be reached and\n"
        "installed. [How to write a policy](../how-to/write-a-policy.md) shows both. JSON schemas:\n"
        "[settings](settings.schema.json), [sources](sources.schema.json). An unknown key is an error that names the\n"
        "nearest known one; keys that begin with `_comment` are for people.\n\n## Rules\n\n```\n",
        inspect.cleandoc((rules.__doc__ or "").partition("\n\n")[2].partition("\n\nA trailing")[0]),
        '\n```\n\nA trailing `:*` means "and anything after it". Deny beats allow; neither means ask.\n\n',
        _RULES,
        "\n## settings.json\n\n",
        *_keys(settings.Settings),
        "\n## sources.json\n\n",
        *_keys(sources.Sources),
        "\n## Allowed unless denied\n\nWords of the shell itself start no program: ",
        ", ".join(f"`{rule[6:-3]}`" for rule in layers.DEFAULTS.permissions.allow),
        ".\n\n## Programs that run others\n\nEach is decided itself, and so is what it runs: ",
        ", ".join(f"`{name}`" for name in sorted(wrappers.RUNNERS | {"find"})),
        ". With an option that is not known here, or words known only at run time, it asks.\n",
        "\n## Options that run or write something else\n\n",
        _OPTIONS,
        *_programs(options.PROGRAMS, options.GIT),
    ]
    return "".join(parts)


_RULES = """\
- **shell** matches words, never text. A bare name in an allow rule is that program in a system directory; in a deny
  rule it is any program of that name, wherever it lies. A word known only at run time matches an allow rule only where
  the rule says `:*` or `*`; where it could make a deny rule match, it asks. So does a command that has the words of a
  deny rule with options between them (`git -C x push`).
- **file** means operations on files and redirections in shell text. `**` is any depth, and a trailing `/**` or `:*`
  means the folder itself too. Paths are compared as written, without `.` and `..`; links, and
  what programs do, are held where the sandbox hides a file or mounts it read-only. So is all that a deny rule for
  writing means when the sandbox starts; what programs make later, and deny rules for deleting inside of what may be
  written, hold for operations alone, and `carrel policy set` says so.
- **network** means a host (`a.org`), every host below it (`*.a.org`), an address or a network (`10.0.0.0/8`), and a
  port when one is given.
- **mcp** means a tool of a server.
- `${WORKSPACE}` and `${CONTEXT_ID}` stand for the workspace and the context.
- A command whose text is longer than 65,536 characters, or takes too many steps to decide (about 32 for each
  character: texts inside texts, functions that call functions, very many rules), asks. So does a path of more than
  4,096 characters.
- Allow rules that allow everything (`shell(*)`, `network(outbound:*)`, `network(outbound:*.com)`, `file(write:/**)`)
  are refused. Allow rules for programs that run anything, rules that never count and rules given twice are warned
  about.
"""


_OPTIONS = """\
An allowed program can be told by an option to run another program or to write another file. Such an option is decided
as what it does: the command that it runs by the shell rules, the file that it writes by the file rules; the others ask.
Letters together (`-no file`), values joined to their option and names cut short (`--comp=…`) are read as the programs
read them. An argument that is known only at run time asks where it could be such an option; behind `--`, or behind a
fixed beginning as in `./"$x"`, it is none.

- `find`: `-exec`, `-execdir`, `-ok`, `-okdir` run; `-fprint`, `-fprint0`, `-fprintf`, `-fls` write; `-delete` deletes
  what it starts from.
- `sed`: the commands `e` and `w`, the flags `e` and `w` of `s`, and `-i`; a script in a file (`-f`) asks.
- `awk`: `system`, pipes and output to files ask, and so do programs in files.
- `git -c` and `git config` ask for every setting that is not known to be harmless. Hooks and settings that are in a
  repository already are not seen here.

| program | runs a command | writes a file | asks |
| --- | --- | --- | --- |
"""


def _programs(programs: Mapping[str, Program], git: Mapping[str, Program]) -> Iterator[str]:
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
        default = "needed" if info.is_required() else "" if inner or info.default in (None, ()) else f"`{info.default}`"
        default = "" if info.default_factory else default
        yield f"| `{prefix}{name}{many}` | {default} | {' '.join((info.description or '').split())} |\n"
        if inner is not None and not (prefix.endswith("package_managers.") and name != "pip"):
            yield from _rows(inner, f"{prefix}{name}{many}.")


def schema(name: str) -> str:
    """The JSON schema of a policy document."""
    from carrel.policy.documents import settings, sources

    model = {"settings": settings.Settings, "sources": sources.Sources}[name]
    made = {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema()}
    for part in (made, *made.get("$defs", {}).values()):
        part["patternProperties"] = {"^_comment": {}}
    return json.dumps(made, indent=2, sort_keys=True) + "\n"
