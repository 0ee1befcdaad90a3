import re

from carrel.api.page import page


async def test_page_shows_every_operation_and_loads_nothing(http):
    answer = await http.get("/docs")
    assert answer.status_code == 200
    document = (await http.get("/openapi.json")).json()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert f"<code>{operation['operationId']}</code>" in answer.text, path
    assert not re.search(r"(src|href)=['\"]?(https?:)?//", answer.text)


def test_hostile_text_is_escaped():
    text = "<script>alert(1)</script>"
    operation = {
        "summary": text,
        "description": text,
        "operationId": text,
        "tags": [text],
        "responses": {"200": {"description": text}},
    }
    document = {
        "info": {"title": text, "version": text, "description": text},
        "paths": {text: {"get": operation}},
        "components": {"schemas": {"X": {"description": text, "properties": {text: {"type": text}}}}},
    }
    assert text not in page(document)
