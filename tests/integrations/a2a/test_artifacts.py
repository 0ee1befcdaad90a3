"""Files of `output/` as artifacts, whatever a sandbox puts there."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.a2a_ground import Ground

from carrel.client import AsyncSandbox
from carrel.integrations.a2a import artifacts
from carrel.integrations.a2a.artifacts import MOST_BYTES, MOST_FILES, OutputFiles, changed, listing, marks
from carrel.integrations.text import printable


@pytest.fixture
async def box(ground: Ground) -> AsyncSandbox:
    await ground.owner.policy(ground.context).delete()
    return await ground.owner.sandbox(ground.context)


async def given_back(box: AsyncSandbox, ground: Ground, found: OutputFiles) -> dict[str, bytes | str]:
    result: dict[str, bytes | str] = {}
    async for each in artifacts.artifacts(box, ground.url, found):
        part = each.parts[0]
        result[each.name] = part.raw if part.HasField("raw") else part.url or part.text
    return result


async def test_new_and_changed_files_only(box: AsyncSandbox, ground: Ground) -> None:
    assert await listing(box) == ([], False)
    await box.files.write("output/same", b"1")
    await box.files.write("output/old", b"1")
    before = marks((await listing(box))[0])
    assert (await changed(box, before)).files == []
    await box.files.write("output/old", b"2")
    await box.files.write("output/deep/new.json", b"{}")
    await box.files.write("elsewhere", b"x")
    found = await changed(box, before)
    assert await given_back(box, ground, found) == {"output/old": b"2", "output/deep/new.json": b"{}"}
    [kind] = [each.parts[0].media_type async for each in artifacts.artifacts(box, ground.url, found)][:1]
    assert kind == "application/json"


async def test_links_and_odd_names(box: AsyncSandbox, ground: Ground) -> None:
    script = r"""mkdir -p output && cd output && ln -s /etc/passwd link && ln -s / dir && mkfifo pipe
        printf x > "$(printf 'a\nb')" && printf x > "$(printf 'caf\351')" """
    await box.commands.run(script, check=True)
    found = await given_back(box, ground, await changed(box, {}))
    assert found == {r"output/a\nb": b"x", r"output/caf\udce9": b"x"}


async def test_a_directory_that_is_a_link_gives_nothing(box: AsyncSandbox) -> None:
    await box.commands.run("ln -s /etc output", check=True)
    assert (await listing(box))[0] == []


async def test_a_large_file_comes_by_its_address(box: AsyncSandbox, ground: Ground, server: dict[str, str]) -> None:
    await box.files.write("output/large file.bin", b"x" * (MOST_BYTES + 1))
    [(name, url)] = (await given_back(box, ground, await changed(box, {}))).items()
    assert name == "output/large file.bin"
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {server['token']}"}, trust_env=False) as http:
        assert len((await http.get(str(url))).content) == MOST_BYTES + 1


async def test_a_file_that_grows_meanwhile_comes_by_its_address(box: AsyncSandbox, ground: Ground) -> None:
    await box.files.write("output/grows", b"x")
    found = await changed(box, {})
    await box.files.write("output/grows", b"x" * (MOST_BYTES + 1))
    [(_, url)] = (await given_back(box, ground, found)).items()
    assert str(url).startswith(ground.url)
    await box.files.delete("output/grows")
    [(_, words)] = (await given_back(box, ground, found)).items()
    assert "cannot be read" in str(words)


async def test_many_files_are_counted(box: AsyncSandbox, ground: Ground) -> None:
    await box.commands.run(f"mkdir output; for i in $(seq {MOST_FILES + 5}); do echo $i > output/$i; done", check=True)
    found = await given_back(box, ground, await changed(box, {}))
    assert len(found) == MOST_FILES + 1
    assert found["more files"] == "5 more files in output/"
    truncated = await given_back(box, ground, OutputFiles([], truncated=True))
    assert truncated == {"more files": "there are more files in output/"}


async def test_files_that_may_not_be_seen_are_not_given(ground: Ground) -> None:
    await ground.owner.policy(ground.context).put(settings={"permissions": {"deny": ["file(read:/**)"]}})
    assert await listing(await ground.owner.sandbox(ground.context)) == ([], False)


@given(st.text(alphabet=st.characters(), max_size=50))
def test_every_name_is_made_harmless(name: str) -> None:
    assert printable(name).encode() or not name
    assert printable(name).isprintable()
