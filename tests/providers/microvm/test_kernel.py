"""The kernel of the machines, its modules, and the first file system that is made of them."""

import gzip
import lzma
import shutil
import subprocess

import pytest
from tests.support import microvm

from carrel.errors import PlatformError
from carrel.providers import bundle
from carrel.providers.microvm import initramfs, kernel

MODULES = {"virtiofs": "fuse", "virtio_pci": "virtio", "virtio_console": "virtio", "fuse": "", "virtio": ""}


@pytest.fixture
def made(tmp_path):
    """A kernel image with a header, and its modules, each compressed as one distribution does it."""
    head = bytearray(4096)
    head[0x202:0x206] = b"HdrS"
    head[0x20E:0x210] = (0x400).to_bytes(2, "little")
    head[0x600:0x60F] = b"9.8.7-test (me)"
    (tmp_path / "boot").mkdir()
    (tmp_path / "boot" / "vmlinuz").write_bytes(head)
    folder = tmp_path / "lib/modules/9.8.7-test/kernel/drivers"
    folder.mkdir(parents=True)
    ways = [("", bytes), (".xz", lzma.compress), (".gz", gzip.compress), ("", bytes), ("", bytes)]
    for (name, needs), (suffix, pack) in zip(MODULES.items(), ways, strict=True):
        content = b"\x7fELF\0license=GPL\0depends=" + needs.encode() + b"\0name=" + name.encode() + b"\0"
        (folder / f"{name.replace('_', '-')}.ko{suffix}").write_bytes(pack(content))
    return tmp_path


def test_modules_come_after_those_that_they_need(made):
    found = kernel.find(str(made / "boot/vmlinuz"), "")
    assert found is not None and found.release == "9.8.7-test"
    names = [name for name, content in found.needed() if content.startswith(b"\x7fELF")]
    assert sorted(names) == sorted(MODULES)
    assert names.index("virtio") < names.index("virtio_pci") and names.index("fuse") < names.index("virtiofs")


def test_modules_may_be_built_in(made):
    folder = made / "lib/modules/9.8.7-test"
    (folder / "modules.builtin").write_text("kernel/virtio.ko\nkernel/virtio_pci.ko\nkernel/virtio_console.ko\n")
    found = kernel.find(str(made / "boot/vmlinuz"), "")
    assert found is not None and [name for name, _ in found.needed()] == ["fuse", "virtiofs"]


@pytest.mark.skipif(shutil.which("zstd") is None, reason="there is no zstd")
def test_modules_may_be_compressed_by_zstd(made):
    path = next(made.rglob("fuse.ko"))
    content = path.read_bytes()
    subprocess.run(["zstd", "-q", "--rm", path], check=True)
    found = kernel.find(str(made / "boot/vmlinuz"), "")
    assert found is not None and dict(found.needed())["fuse"] == content


def test_a_missing_module_is_named(made):
    next(made.rglob("fuse.ko")).unlink()
    found = kernel.find(str(made / "boot/vmlinuz"), "")
    assert found is not None
    with pytest.raises(PlatformError, match="has no module fuse"):
        found.needed()


@pytest.mark.parametrize("damage", [b"", b"no module", b"\x1f\x8bdamaged"])
def test_a_damaged_module_is_refused(made, damage):
    next(made.rglob("virtio-console.ko.gz")).write_bytes(damage)
    found = kernel.find(str(made / "boot/vmlinuz"), "")
    assert found is not None
    with pytest.raises(PlatformError):
        found.needed()


@pytest.mark.parametrize("content", [b"", b"no kernel", bytes(4096)])
def test_what_is_no_kernel_is_not_found(tmp_path, content):
    (tmp_path / "vmlinuz").write_bytes(content)
    assert kernel.find(str(tmp_path / "vmlinuz"), str(tmp_path)) is None


def test_a_kernel_without_its_modules_is_not_found(made):
    shutil.rmtree(made / "lib")
    assert kernel.find(str(made / "boot/vmlinuz"), "") is None


def test_the_first_file_system_is_the_same_each_time(bundles, tmp_path):
    path = microvm.find_kernel()
    found = kernel.find(path, "") if path else None
    if found is None:
        pytest.skip("there is no kernel: scripts/fetch-kernel fetches one")
    made = bundle.provide(str(bundles))
    for name in ("a", "b"):
        initramfs.write(str(tmp_path / name), made.path, found.needed())
    archive = (tmp_path / "a").read_bytes()
    assert archive == (tmp_path / "b").read_bytes()
    names = set(names_in(archive))
    assert {"opt/carrel/lib/ld.so", "opt/carrel/bin/python3", "modules/virtiofs", "dev/console"} <= names


def names_in(archive):
    """The names in a cpio archive."""
    at = 0
    while at < len(archive):
        assert archive[at : at + 6] == b"070701"
        size, length = (int(archive[at + field : at + field + 8], 16) for field in (54, 94))
        name = archive[at + 110 : at + 110 + length - 1].decode()
        if name == "TRAILER!!!":
            return
        yield name
        at += -(-(110 + length) // 4) * 4 + -(-size // 4) * 4
