"""Python with real packages, as agents have it: rich results, errors, environments that are named, imports ahead."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterator

import pytest
from tests.support.servers import SCIENCE, Server

from carrel import Client
from carrel.client import CodeContext, Sandbox
from carrel.errors import InvalidRequest

FRAME = "import pandas as pd\nframe = pd.DataFrame({'city': ['Oslo', 'Rom'], 'when': pd.to_datetime(['2024-01-02', None])})\n"


@pytest.fixture
def client(scientific: Server) -> Client:
    return scientific.client


@pytest.fixture
def box(client: Client) -> Iterator[Sandbox]:
    with client.sandbox(template=SCIENCE) as box:
        yield box


@pytest.fixture
def context(box: Sandbox) -> CodeContext:
    return box.python.context("work")


def test_data_frames_come_as_text_html_and_json(context: CodeContext) -> None:
    cell = context.run(FRAME + "frame")
    [shown] = cell.results
    assert shown.kind == "result" and sorted(shown.data) == ["application/json", "text/html", "text/plain"]
    assert shown.text is not None and "Oslo" in shown.text and "NaT" in shown.text
    assert shown.html is not None and "<table" in shown.html and "<td>Oslo</td>" in shown.html
    assert shown.json_text is not None
    assert json.loads(shown.json_text) == {
        "columns": ["city", "when"],
        "index": [0, 1],
        "data": [["Oslo", "2024-01-02T00:00:00.000"], ["Rom", None]],
    }
    series = context.run("display(frame['city']); frame.describe()")
    assert [each.kind for each in series.results] == ["display", "result"]
    assert series.results[0].json_text is not None
    assert json.loads(series.results[0].json_text)["data"] == ["Oslo", "Rom"]
    long = context.run("pd.DataFrame({'n': range(5000)})").results[0]
    assert long.json_text is not None and len(json.loads(long.json_text)["data"]) == 1000, "the first rows"


def test_figures_come_as_png_and_svg(context: CodeContext) -> None:
    drawing = "import matplotlib.pyplot as plt\nplt.plot([1, 3, 2]); plt.title('slope')\n"
    for code in (drawing, drawing + "plt.show()", drawing + "plt.gcf()"):
        shown = context.run(code).results
        [png] = [each.png for each in shown if each.png]
        assert png.startswith(b"\x89PNG\r\n"), code
    shown = context.run(drawing, figures=["svg"]).results
    [svg] = [each.svg for each in shown if each.svg]
    assert svg.lstrip().startswith("<?xml") and "</svg>" in svg and not any(each.png for each in shown)
    both = context.run(
        "fig, ax = plt.subplots(); ax.bar(['a', 'b'], [1, 2]); other = plt.figure()", figures=["png", "svg"]
    )
    assert [bool(each.png and each.svg) for each in both.results] == [True, True]
    assert context.run("1").results[0].data == {"text/plain": "1"}, "shown once"
    plot = context.run("pd_ = __import__('pandas').DataFrame({'x': [1, 2]}); pd_.plot();")
    assert [bool(each.png) for each in plot.results] == [True]
    saved = context.run("plt.plot([1]); plt.savefig('out.png'); plt.close()")
    assert saved.ok and saved.results == []


def test_errors_show_the_code_of_the_cell(context: CodeContext) -> None:
    context.run(FRAME)
    failed = context.run("def pick(name):\n    return frame[name]\n\npick('country')")
    assert failed.status == "error" and failed.error is not None
    assert (failed.error.name, failed.error.value) == ("KeyError", "'country'")
    assert "return frame[name]" in failed.error.traceback and "kernel.py" not in failed.error.traceback
    assert context.run("len(frame)").text == "2", "the variables are there"


def test_imported_before_the_code_comes(box: Sandbox) -> None:
    ahead = (
        "import sys; print([name in sys.modules for name in ('pandas', 'matplotlib.pyplot', 'matplotlib.animation')])"
    )
    assert box.python.run(ahead).stdout == "[True, True, False]\n"
    cell = box.python.context("c").run(ahead)
    assert cell.stdout == "[True, True, False]\n"
    drawn = [box.python.run("import numpy; print(numpy.random.random())").stdout for _ in range(3)]
    assert len(set(drawn)) == 3, "random numbers are each call's own"


def test_calls_draw_into_files(box: Sandbox) -> None:
    code = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.savefig('plot.svg')\nplt.show()"
    made = box.python.run(code)
    assert (made.exit_code, made.files_produced) == (0, ["plot.svg"]), made.stderr
    assert b"</svg>" in box.files.read("plot.svg")
    table = box.python.run(
        "import pandas as pd; print(pd.read_csv('in.csv')['n'].sum())", files={"in.csv": b"n\n1\n2\n"}
    )
    assert table.stdout == "3\n"
    shell = box.commands.run("python3 -c 'import pandas; print(pandas.DataFrame([1]).shape)'")
    assert shell.stdout == "(1, 1)\n"


def test_an_environment_is_named_or_made_of_requirements(client: Client, box: Sandbox) -> None:
    shared = box.envs.attach()
    assert [each.templates for each in client.envs.list() if each.name == shared.name] == [[SCIENCE]]
    with client.sandbox() as bare:
        assert "No module named" in bare.python.run("import pandas").stderr
        look = "import pandas, sys; print(sys.prefix)"
        expected = f"{shared.path}\n"
        assert bare.python.run(look, requirements=["matplotlib", "pandas"]).stdout == expected, "the same packages"
        assert bare.python.run(look, env=shared).stdout == expected
        assert bare.python.run(look, env=shared.name).stdout == expected
        by_name = bare.python.context("named", env=shared.name)
        by_packages = bare.python.context("packed", requirements=["pandas", "matplotlib"])
        for each in (by_name, by_packages):
            assert each.run(look).stdout == expected
            assert each.info().env == shared.name
        assert "No module named" in bare.python.context("none").run("import pandas").error.value  # type: ignore[union-attr]
        assert bare.python.run("import sys; print('pandas' in sys.modules)", env=shared.name).stdout == "True\n"
    stateless = client.python.run("import pandas; print(1)", template=SCIENCE)
    assert stateless.output == "1\n"
    stateless = client.python.run("import pandas; print(2)", requirements=["pandas", "matplotlib"])
    assert stateless.output == "2\n"


def test_the_version_of_python_is_one_of_the_hosts(box: Sandbox) -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    info = box.envs.attach(["pandas", "matplotlib"], python=here)
    assert info.python.startswith(f"{here}.") and info.name == box.envs.attach().name
    with pytest.raises(InvalidRequest, match=r"there is no Python 3\.99 here") as caught:
        box.envs.attach(["pandas"], python="3.99")
    assert caught.value.hint is not None and here in caught.value.hint


def test_stopped_and_resumed_it_is_there(client: Client) -> None:
    name = f"c-{uuid.uuid4().hex}"
    box = client.sandbox(name, template=SCIENCE)
    try:
        assert box.python.context("a").run(FRAME + "len(frame)").text == "2"
        box.stop()
        box = client.sandbox(name)
        fresh = box.python.context("a").run(FRAME + "len(frame)")
        assert fresh.fresh and fresh.text == "2"
    finally:
        box.terminate(delete_files=True)
