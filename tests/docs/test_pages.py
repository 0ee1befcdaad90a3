"""Every page can be found, every link and file it names exists, and the picture fits its boxes."""

import json
import re
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INDEX = DOCS / "README.md"
PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.MULTILINE | re.DOTALL
FOLDERS = ("src", "tests", "bench", "scripts", "examples")
PLACEHOLDERS = {"integrations/NAME.py", "providers/NAME.py", "cli/NOUN.py", "tests/cli/test_NOUN.py"}
SCREEN = 3000  # characters: about 30 lines of 100


@cache
def programs() -> list[str]:
    """Every file of Python in the repository."""
    return [path.as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=FENCED)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text()):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_exist(page):
    for name in re.findall(r"`([\w/.-]+\.py)`", re.sub(r"^```.*?^```$", "", page.read_text(), flags=FENCED)):
        assert any(path.endswith(f"/{name}") for path in programs()) or name in PLACEHOLDERS, name


def test_names_on_the_architecture_page_exist():
    page = (DOCS / "explanation/architecture.md").read_text()
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("test_*.py"), ROOT / "pyproject.toml"]
    words = {word for path in files for word in re.findall(r"\w+", path.read_text())}
    named = re.findall(r"`@?(?:\w+\.)*([A-Za-z_]\w+)(?:\([^`]*\))?`", page)
    assert len(named) > 50
    assert {name for name in named if name not in words} <= {"CARREL_GROUP_NAME", "checksum"}, "renamed?"


def test_index_links_every_page():
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in LINK.findall(INDEX.read_text())}
    pages = {path for path in DOCS.rglob("*") if path.suffix in {".md", ".json"}} - {INDEX}
    assert sorted(path.name for path in pages - linked) == []


@pytest.mark.parametrize("page", sorted((DOCS / "decisions").glob("*.md")), ids=lambda page: page.stem)
def test_decision_has_the_usual_form_and_fits_a_screen(page):
    text = page.read_text()
    places = [text.find(f"**{part}.**") for part in ("Context", "Decision", "Consequences")]
    assert -1 not in places and places == sorted(places)
    assert len(text) <= SCREEN


def test_texts_of_the_picture_fit_their_boxes():
    """Measured for the widest of the common fonts: 0.62 of the size for a character, 0.70 in bold."""
    svg = "{http://www.w3.org/2000/svg}"
    picture = ElementTree.parse(DOCS / "images/overview.svg").getroot()
    boxes = [[float(box.get(side, 0)) for side in ("x", "y", "width", "height")] for box in picture.iter(f"{svg}rect")]
    texts = list(picture.iter(f"{svg}text"))
    assert len(boxes) > 10 and len(texts) > 20
    for text in texts:
        words = text.text or ""
        x, y = float(text.get("x", 0)), float(text.get("y", 0))
        width = len(words) * (15 * 0.70 if text.get("class") == "name" else 13 * 0.62)
        left = x - width / 2 if text.get("text-anchor") == "middle" else x
        # The innermost box around the place where the text stands.
        right = min(
            (box for box in boxes if box[0] <= x <= box[0] + box[2] and box[1] <= y <= box[1] + box[3]),
            key=lambda box: box[2] * box[3],
        )
        assert right[0] <= left and left + width <= right[0] + right[2], words


def test_recorded_session_names_no_private_path_and_fits_its_picture():
    lines = (DOCS / "images/here.cast").read_text().splitlines()
    header, *events = map(json.loads, lines)
    text = "".join(words for _, _, words in events)
    assert header["version"] == 2 and [at for at, _, _ in events] == sorted(at for at, _, _ in events)
    assert "carrel here --" in text and "Read-only file system" in text and "brings them back" in text
    assert not re.search(r"/(tmp|work|root|home|usr|var)/", text)
    picture = ElementTree.parse(DOCS / "images/here.svg").getroot()
    texts = list(picture.iter("{http://www.w3.org/2000/svg}text"))
    assert len(texts) > 20
    assert all(
        float(each.get("x", 0)) + float(each.get("textLength", 0)) < float(picture.get("width", 0)) for each in texts
    )
    assert all(float(each.get("y", 0)) < float(picture.get("height", 0)) for each in texts)
