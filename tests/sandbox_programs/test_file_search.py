from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from carrel.sandbox_programs import file_search

WORD = '<w:document xmlns:w="urn:w"><w:p><w:t>quarterly</w:t><w:t>turnover</w:t></w:p><w:p><w:t>end</w:t></w:p></w:document>'
SLIDE = '<p:sld xmlns:p="urn:p" xmlns:a="urn:a"><a:p><a:t>roadmap of penguins</a:t></a:p></p:sld>'


def office(path: Path, name: str, text: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, text)


def pdf(path: Path, text: str) -> None:
    """A PDF with one line of text."""
    drawn = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
    parts = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R"
        b" /Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(drawn), drawn),
    ]
    out, offsets = io.BytesIO(b"%PDF-1.4\n"), []
    out.seek(0, os.SEEK_END)
    for number, part in enumerate(parts, start=1):
        offsets.append(out.tell())
        out.write(b"%d 0 obj\n%s\nendobj\n" % (number, part))
    place = out.tell()
    out.write(b"xref\n0 5\n0000000000 65535 f \n" + b"".join(b"%010d 00000 n \n" % each for each in offsets))
    out.write(b"trailer << /Size 5 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % place)
    path.write_bytes(out.getvalue())


def search(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the program as a sandbox does: as a file, without carrel."""
    program = [sys.executable, "-I", file_search.__file__, "--root", str(root), *words]
    return subprocess.run(program, capture_output=True, text=True, check=False)


def test_texts_and_documents_are_found_and_changes_are_followed(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("the capital of Peru is Lima")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").write_text("Lima")
    (tmp_path / "binary").write_bytes(b"\0Lima")
    (tmp_path / "broken.docx").write_bytes(b"no zip file")
    office(tmp_path / "report.docx", "word/document.xml", WORD)
    office(tmp_path / "talk.pptx", "ppt/slides/slide1.xml", SLIDE)
    done = search(tmp_path, "query", "lima")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "notes.md")
    assert "[Lima]" in done.stdout and done.stdout.count("notes") == 1
    assert "broken.docx" in done.stderr, "a damaged document is told of and stops nothing"
    assert search(tmp_path, "query", "turnover", "quarterly").stdout.startswith("report.docx")
    assert search(tmp_path, "query", "penguins").stdout.startswith("talk.pptx")
    assert search(tmp_path, "text", str(tmp_path / "report.docx")).stdout == "quarterly turnover\nend\n"
    assert search(tmp_path, "files", "*.docx").stdout == "broken.docx\nreport.docx\n"
    assert search(tmp_path, "query", 'no" OR text:lima').returncode == 1, "words are not operators of the index"
    (tmp_path / "notes.md").unlink()
    assert search(tmp_path, "index").stdout == "0 files were read\n"
    assert search(tmp_path, "query", "lima").returncode == 1


def test_pdf_needs_a_package_and_says_so(tmp_path: Path) -> None:
    pdf(tmp_path / "a.pdf", "whales and krill")
    done = search(tmp_path, "text", str(tmp_path / "a.pdf"))
    try:
        import pypdf  # noqa: F401
    except ImportError:
        assert done.returncode == 2 and "the template file-search" in done.stderr
    else:
        assert done.stdout.strip() == "whales and krill"


@pytest.mark.parametrize("kind", sorted(file_search.OFFICE))
def test_a_document_without_text_is_empty(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"x{kind}"
    office(path, "other.xml", "<x/>")
    assert file_search.text_of(str(path)) == ""
