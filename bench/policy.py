"""The time of a decision: a typical command with 60 rules, the same with 10,000 rules, and only reading the text.

Measured in this process, without a server: reading the text with two parsers, finding its commands, matching rules.
There is no peer; the figures are milliseconds.
"""

from __future__ import annotations

from bench.measure import Contender, Progress, Report, Table, median, percentile, rounds, timed
from carrel.policy.documents.settings import Permissions, SettingsDocument
from carrel.policy.rules.decide import decide_shell
from carrel.policy.rules.layers import Layer, Policy
from carrel.policy.shell.finder import find

ROUNDS = 300
TEXT = "cd src && git status && grep -rn 'def main' . | sort -u > ../output/found.txt"
LONG = "\n".join([f'for f in *.{number}; do grep -c TODO "$f" | tee -a log; done' for number in range(20)])


async def run(progress: Progress) -> Report:
    """Measure."""
    typical, many = _policy(60), _policy(10_000)
    contenders: dict[str, Contender] = {
        "60 rules": timed(lambda: decide_shell(typical, TEXT)),
        "10,000 rules": timed(lambda: decide_shell(many, TEXT)),
        "10,000 rules, 20 loops": timed(lambda: decide_shell(many, LONG)),
        "reading alone": timed(lambda: find(TEXT, cwd="/workspace")),
    }
    samples = await rounds(contenders, ROUNDS, warm_up=10, progress=progress)
    table = Table(f"one decision, {ROUNDS} rounds", ("", "median ms", "p99 ms"))
    for name, taken in samples.items():
        table.add(name, median(taken) * 1e3, percentile(taken, 99) * 1e3)
    return Report(
        {
            "decide_ms": median(samples["60 rules"]) * 1e3,
            "decide_p99_ms": percentile(samples["60 rules"], 99) * 1e3,
            "decide_10k_rules_ms": median(samples["10,000 rules"]) * 1e3,
            "decide_read_ms": median(samples["reading alone"]) * 1e3,
        },
        [table],
    )


def _policy(count: int) -> Policy:
    """Make rules of all shapes: half share their program, some have stars, a tenth are about files."""
    allow = ["shell(git status:*)", "shell(grep:*)", "shell(sort:*)", "file(write:${WORKSPACE}/**)", "shell(tee:*)"]
    deny = ["shell(curl:*)", "shell(git push:*)", "file(write:/etc/**)"]
    shapes = (
        "shell(git sub{0}:*)",
        "shell(grep --opt{0} * x:*)",
        "shell(tool{0}:*)",
        "shell(git sub{0} *.{0})",
        "file(write:/workspace/context/secret-{0}/**)",
    )
    deny += [shapes[number % 5].format(number) for number in range(count - len(allow) - len(deny))]
    settings = SettingsDocument(permissions=Permissions(allow=tuple(allow), deny=tuple(deny)))
    return Policy.of([Layer("settings.json", settings)], context_id="context")
