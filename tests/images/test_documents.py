"""Manifests, indexes and configurations: what is valid is read, hostile documents are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from carrel.errors import ImageRefused
from carrel.images.documents import (
    OCI_CONFIG,
    OCI_LAYER,
    BlobDescriptor,
    ImageConfig,
    ImageIndex,
    ImageManifest,
    ImagePlatform,
    parse_config,
    parse_manifest,
)

DIGEST = "sha256:" + "0" * 64
BLOB = {"mediaType": OCI_CONFIG, "digest": DIGEST, "size": 2}
LAYER = {"mediaType": OCI_LAYER + "+gzip", "digest": DIGEST, "size": 2}


def manifest(**changes: Any) -> bytes:
    return json.dumps({"schemaVersion": 2, "config": BLOB, "layers": [LAYER], **changes}).encode()


def test_config_reads_back() -> None:
    config = ImageConfig(
        architecture="arm64", variant="v8", environment={"A": "b=c"}, working_directory="/srv", user="1:2",
        entry_point=("/a", "b"), command=("c",), labels={"x": "y"}, shell=("sh", "-c"), stop_signal="SIGINT",
        exposed_ports=("80/tcp",), volumes=("/data",), diff_ids=(DIGEST,),
    )  # fmt: skip
    assert parse_config(config.encode()) == config
    nulls = (
        b'{"architecture":"amd64","config":{"Env":null,"Cmd":null,"WorkingDir":"a//b/../c"},"rootfs":{"diff_ids":null}}'
    )
    assert parse_config(nulls) == ImageConfig(architecture="amd64", working_directory="/a/c")


def test_index_chooses_the_platform() -> None:
    def entry(number: int, **platform: str) -> dict[str, Any]:
        return {**BLOB, "digest": f"sha256:{number:064}", "platform": {"os": "linux", **platform}}

    entries = [
        entry(1, architecture="arm64", variant="v8"),
        entry(2, architecture="amd64"),
        entry(3, architecture="arm", variant="v6"),
    ]
    index = parse_manifest(json.dumps({"manifests": entries}).encode())
    assert isinstance(index, ImageIndex)
    assert index.choose(ImagePlatform.parse("linux/arm64/v8")).digest.endswith("1")
    assert index.choose(ImagePlatform.parse("linux/amd64")).digest.endswith("2")
    with pytest.raises(ImageRefused, match="no version for linux/riscv64"):
        index.choose(ImagePlatform.parse("linux/riscv64"))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b" " * ((4 << 20) + 1), "more than 4 MiB"),
        (manifest(layers=[LAYER] * 501), "layers"),
        (manifest(layers=[{**LAYER, "size": -1}]), "size"),
        (manifest(layers=[{**LAYER, "size": "2"}]), "size"),
        (manifest(layers=[{**LAYER, "digest": "sha256:../../x"}]), "digest"),
        (manifest(layers=[{**LAYER, "mediaType": OCI_LAYER + "+encrypted"}]), "unknown type"),
        (manifest(config={**BLOB, "mediaType": "application/vnd.cncf.helm.config.v1+json"}), "artifact"),
        (manifest(config=7), "config"),
        (b'{"schemaVersion": 1, "fsLayers": []}', "schema 1"),
    ],
)
def test_hostile_manifests_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(ImageRefused, match=words):
        parse_manifest(data)


@pytest.mark.parametrize(
    "data",
    [
        b'{"config":{"User":"a\\u0000"}}',
        b'{"config":{"Env":["\\ud800=x"]}}',
        b'{"config":{"Cmd":"x"}}',
        b'{"rootfs":{"diff_ids":["x"]}}',
    ],
)
def test_hostile_configs_are_refused(data: bytes) -> None:
    with pytest.raises(ImageRefused):
        parse_config(data)


def test_manifest_reads_back() -> None:
    config, layer = BlobDescriptor.model_validate(BLOB), BlobDescriptor.model_validate(LAYER)
    found = parse_manifest(ImageManifest.of(config, [layer]))
    assert isinstance(found, ImageManifest)
    assert (found.config, found.layers) == (config, (layer,))
