#!/usr/bin/env python3
"""`file-search`: finds files of the workspace by their text, also in PDF and Office documents, with an index.

It runs in sandboxes, for the template `file-search`. Office documents need only the standard library, PDF needs pypdf.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import sqlite3
import sys
import zipfile
from collections.abc import Iterator
from xml.etree import ElementTree

INDEX = ".file-search.sqlite"
SKIPPED = {".git", ".hg", ".svn", ".venv", "node_modules", "__pycache__", ".cache", INDEX}
LARGEST_FILE = 64 << 20
LARGEST_TEXT = 4 << 20
MOST_FILES = 200_000
OFFICE = {
    ".docx": r"word/(document|footnotes|header\d*|footer\d*)\.xml",
    ".pptx": r"ppt/(slides|notesSlides)/[^/]+\.xml",
    ".xlsx": r"xl/(sharedStrings|worksheets/[^/]+)\.xml",
    ".odt": r"content\.xml",
    ".ods": r"content\.xml",
    ".odp": r"content\.xml",
}
_PARAGRAPHS = ("}p", "}h", "}row", "}si", "}table-row")


def office_text(path: str, parts: str) -> str:
    """Return the text of an Office document: a zip file with XML inside."""
    pieces: list[str] = []
    with zipfile.ZipFile(path) as archive:
        for info in sorted(archive.infolist(), key=lambda each: each.filename):
            if not re.fullmatch(parts, info.filename) or info.file_size > LARGEST_FILE:
                continue
            with archive.open(info) as part:
                for _event, element in ElementTree.iterparse(part):  # noqa: S314 - the worst is this process
                    if element.text and not element.text.isspace():
                        pieces.append(element.text)
                    if element.tag.endswith(_PARAGRAPHS):
                        pieces.append("\n")
                        element.clear()
    return re.sub(r"[ \t]*\n\s*", "\n", " ".join(pieces)).strip()


def pdf_text(path: str) -> str:
    """Return the text of a PDF document."""
    try:
        from pypdf import PdfReader  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ValueError("PDF needs the package pypdf: use the template file-search, or `pip install pypdf`") from None
    return "\n".join(page.extract_text() or "" for page in PdfReader(path).pages)


def text_of(path: str) -> str | None:
    """Return the text of a file; None for a file that has none. Raises for a damaged document."""
    kind = os.path.splitext(path)[1].lower()
    if kind == ".pdf":
        return pdf_text(path)[:LARGEST_TEXT]
    if kind in OFFICE:
        return office_text(path, OFFICE[kind])[:LARGEST_TEXT]
    with open(path, "rb") as file:
        data = file.read(LARGEST_TEXT)
    return None if b"\0" in data[:8192] else data.decode("utf-8", "replace")


def files(root: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the regular files below a directory, by their path relative to it."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(each for each in folders if each not in SKIPPED)
        for name in sorted(names):
            path = os.path.join(folder, name)
            try:
                facts = os.lstat(path)
            except OSError:
                continue
            if name not in SKIPPED and not name.startswith(INDEX) and os.path.isfile(path) and not os.path.islink(path):
                yield os.path.relpath(path, root), facts


def update(database: sqlite3.Connection, root: str) -> tuple[int, list[str]]:
    """Bring the index up to date; return how many files were read, and what could not be."""
    database.execute("CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, mtime INTEGER, size INTEGER)")
    database.execute("CREATE VIRTUAL TABLE IF NOT EXISTS texts USING fts5(path UNINDEXED, name, text)")
    known = {path: (mtime, size) for path, mtime, size in database.execute("SELECT * FROM files")}
    seen: set[str] = set()
    read, failed = 0, []
    for path, facts in files(root):
        if len(seen) == MOST_FILES:
            failed.append(f"more than {MOST_FILES} files: the rest is left out")
            break
        seen.add(path)
        mark = (facts.st_mtime_ns, facts.st_size)
        if known.get(path) == mark:
            continue
        text: str | None = None
        try:
            text = text_of(os.path.join(root, path)) if facts.st_size <= LARGEST_FILE else None
        except Exception as error:  # a damaged document must not stop the others
            failed.append(f"{path}: {error}")
        read += 1
        forget(database, path)
        database.execute("INSERT INTO files VALUES (?, ?, ?)", (path, *mark))
        if text is not None:
            database.execute("INSERT INTO texts VALUES (?, ?, ?)", (path, os.path.basename(path), text))
    for path in known.keys() - seen:
        forget(database, path)
    database.commit()
    return read, failed


def forget(database: sqlite3.Connection, path: str) -> None:
    """Remove a file from the index."""
    database.execute("DELETE FROM files WHERE path = ?", (path,))
    database.execute("DELETE FROM texts WHERE path = ?", (path,))


def query(database: sqlite3.Connection, words: list[str], most: int) -> int:
    """Print the best matches, with an excerpt of each; return how many there are."""
    # Each word is quoted, so that no character of it is an operator of the index.
    wanted = " ".join('"' + word.replace('"', '""') + '"' for word in words)
    found = database.execute(
        "SELECT path, snippet(texts, 2, '[', ']', ' … ', 24) FROM texts WHERE texts MATCH ? ORDER BY rank LIMIT ?",
        (wanted, most),
    ).fetchall()
    for path, excerpt in found:
        print(f"{path}\n    {' '.join(excerpt.split())}")
    return len(found)


def main() -> int:
    """Run one of the subcommands."""
    parser = argparse.ArgumentParser(prog="file-search", description="Find files of the workspace by their text.")
    parser.add_argument(
        "--root", default=os.environ.get("WORKSPACE", "."), help="the directory; default: the workspace"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("index", help="bring the index up to date; `query` does so by itself")
    asking = commands.add_parser("query", help="print the files that contain all words, the best first")
    asking.add_argument("words", nargs="+")
    asking.add_argument("-n", type=int, default=10, help="most results")
    commands.add_parser("text", help="print the text of a file, also of PDF and Office").add_argument("file")
    commands.add_parser("files", help="print the files whose path matches").add_argument("pattern")
    given = parser.parse_args()
    root = os.path.abspath(given.root)
    if given.command == "text":
        try:
            text = text_of(given.file)
        except Exception as error:  # a damaged document fails in many ways
            print(f"file-search: {given.file}: {error}", file=sys.stderr)
            return 2
        print("" if text is None else text)
        return 0 if text is not None else 1
    if given.command == "files":
        found = [path for path, _ in files(root) if fnmatch.fnmatch(path, f"*{given.pattern}*")]
        print("\n".join(found), end="\n" if found else "")
        return 0 if found else 1
    database = sqlite3.connect(os.path.join(root, INDEX))
    try:
        read, failed = update(database, root)
        for line in failed:
            print(f"file-search: {line}", file=sys.stderr)
        if given.command == "index":
            print(f"{read} files were read")
            return 0
        return 0 if query(database, given.words, given.n) else 1
    finally:
        database.close()


if __name__ == "__main__":
    sys.exit(main())
