"""Reads shell text: finds every command that it could run and every file that it touches. Decides nothing.

The modules in the order in which a text passes them (see docs/explanation/shell-reader.md):

    cursor       a place in the text, line continuations, quotes
    words        words with their expansions
    commands     redirections, here-documents, lists, pipelines, compound commands, functions
    cross_check  a second parser, tree-sitter, which can only object
    arguments    what the words of a command become: braces, what is known of the rest
    builtins     commands of the shell itself that change what later words mean
    wrappers     programs that run others; with `options` and `sed_awk`, what their arguments run and write
    finder       `find`: walks the commands and puts everything together

`syntax` has the values in between, `variables` the names that change what runs, `step_budget` bounds the work.
Others import from here, and `find` with its findings from `finder`: that module loads the two parsers, which the
egress process, where the same rules are decided, does not need. Nothing in here knows of rules or documents.
"""

from carrel.policy.shell.arguments import Argument, Unknown, shown, word_set
from carrel.policy.shell.options import PIP, is_safe_config
from carrel.policy.shell.step_budget import SPARE_STEPS, StepBudget, TooComplex, size_of
from carrel.policy.shell.syntax import Dialect
from carrel.policy.shell.variables import changes_what_runs
from carrel.policy.shell.wrappers import PYTHON, RUNNERS, base, module_of

__all__ = [
    "PIP",
    "PYTHON",
    "RUNNERS",
    "SPARE_STEPS",
    "Argument",
    "Dialect",
    "StepBudget",
    "TooComplex",
    "Unknown",
    "base",
    "changes_what_runs",
    "is_safe_config",
    "module_of",
    "shown",
    "size_of",
    "word_set",
]
