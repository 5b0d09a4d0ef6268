# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The pure parts of images: references, recipes, SIF headers, eviction."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.filesystems import filesystem_type_in
from nemo_gym_prorl.sandbox.images import recipe as recipes
from nemo_gym_prorl.sandbox.images import rootfs
from nemo_gym_prorl.sandbox.images.entries import Entry
from nemo_gym_prorl.sandbox.images.recipe import Recipe, render, template_text
from nemo_gym_prorl.sandbox.images.reference import (
    LocalImage,
    NamedImage,
    RegistryImage,
    parse,
    parse_registry,
    portable_path,
)
from nemo_gym_prorl.sandbox.images.store import Image, ImageInfo, eviction_candidates


SHA = "@sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("docker://python", "docker://docker.io/library/python:latest"),
        ("docker://index.docker.io/us/it", "docker://docker.io/us/it:latest"),
        ("docker://localhost/it", "docker://localhost/it:latest"),
        ("docker://127.0.0.1:5000/a/b/c:1", "docker://127.0.0.1:5000/a/b/c:1"),
        (f"docker://us/it:3{SHA}", f"docker://docker.io/us/it{SHA}"),
        ("docker://swe/x.y_1776_z-12:latest", "docker://docker.io/swe/x.y_1776_z-12:latest"),
    ],
)
def test_addresses_of_registries_are_completed(text: str, uri: str) -> None:
    assert parse(text) == parse(uri) == parse_registry(text.removeprefix("docker://")) == RegistryImage(uri)


def test_paths_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, path in {"/a/b": "/a/b", "./b": "b", "x.sif": "x.sif", "~/x": "~/x"}.items():
        assert parse(text) == LocalImage(Path(path).expanduser().absolute())
    assert parse("swe-base_1.2") == NamedImage("swe-base_1.2")
    for folder in ("/one", "/other"):
        monkeypatch.setenv("PRORL_CACHE", folder)
        assert parse("cache:swe-tasks/x.sif") == LocalImage(Path(folder, "swe-tasks/x.sif"))
        assert portable_path(Path(folder, "swe-tasks/x.sif")) == "cache:swe-tasks/x.sif"
    assert portable_path(Path("/one/x.sif")) == "/one/x.sif"


@pytest.mark.parametrize(
    "text",
    [
        *("", "a b", "library://x", "docker://A/b", "docker://a/b:", "docker://a/b@sha256:1", "docker://u:p@host/x"),
        *("cache:", "cache:/etc/x", "cache:x/../../y", "cache:x\0"),
    ],
)
def test_an_invalid_reference_is_refused_for_its_field(text: str) -> None:
    with pytest.raises(CallerError, match=r"^somewhere: "):
        parse(text, "somewhere")


ONE = Recipe("t", "b", "x86_64", "sif", locks={"uv.lock": b"1"})


@pytest.mark.parametrize(
    "change",
    [
        *({"template": "u"}, {"base": "c"}, {"machine": "aarch64"}, {"format": "folder"}, {"apt": frozenset("a")}),
        *(
            {"pip": frozenset("a")},
            {"wheels": frozenset("a")},
            {"locks": {"uv.lock": b"2"}},
            {"variables": {"a": "b"}},
        ),
    ],
)
def test_a_recipes_key_changes_with_each_field(change: dict[str, Any]) -> None:
    assert replace(ONE, **change).key != ONE.key


def test_a_recipes_key_changes_with_the_template_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ONE.key
    monkeypatch.setattr(recipes, "template_text", lambda name: "changed")
    assert ONE.key != before


@pytest.mark.parametrize("name", ["agent", "packages", "plain", "default", "kernel"])
def test_shipped_templates_make_definition_files(name: str) -> None:
    one = Recipe(
        template_text(name), "b", "x86_64", "sif", frozenset({"gcc", "make=4.3"}), frozenset({"a[b]>=1,<2"}),
        {"requirements.txt": b"x", "uv.lock": b"y"}, frozenset({"x"}), {"run": "first\nsecond"},
    )  # fmt: skip
    recipes.check_recipe(one)
    text = render(one.template, "Bootstrap: docker\nFrom: debian", one)
    assert text.lstrip().startswith("Bootstrap: docker\nFrom: debian\n")
    assert name != "packages" or ("gcc make=4.3\n" in text and "'a[b]>=1,<2'" in text)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ base }}\n{% if %}", "template: line 2"),
        ("{{ base }}\n{{ nothing }}", "template: 'nothing' is undefined.*--set"),
        ("%post\n    true", "template: .*Bootstrap"),
    ],
)
def test_template_errors_name_the_line_or_variable(template: str, reason: str) -> None:
    with pytest.raises(CallerError, match=reason):
        render(template, "Bootstrap: x", Recipe(template, "b", "x86_64", "sif"))


@pytest.mark.parametrize("change", [{"apt": {"a; rm"}}, {"pip": {"a'b"}}, {"pip": {"-r x"}}, {"locks": {"../x": b""}}])
def test_values_that_would_escape_a_definition_file_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CallerError):
        recipes.check_recipe(replace(ONE, **change))


def sif_file(arch: bytes = b"02\0", fs: int = 1, role: int = 2, offset: int = 5000, length: int = 100) -> bytes:
    """An image file with one partition, of zeros and the size that its header says."""
    header = struct.pack(
        "<32s10s3s3s16s8q", b"#!/usr/bin/env run-singularity\n", b"SIF_MAGIC\0", b"01\0", arch, b"i" * 16,
        *(0, 0, 1, 2, 128, 2 * 585, 2048, 0),
    )  # fmt: skip
    extra = struct.pack("<ii3s", fs, role, arch)
    table = struct.pack("<i?iiiqqqqqqq128s384s", 0x4004, True, 1, 1, 0, offset, length, 0, 0, 0, 0, 0, b"", extra)
    return (header + table + bytes(585)).ljust(offset + length, b"x")


def test_an_image_file_is_read() -> None:
    assert rootfs.parse_sif(sif_file()) == rootfs.Sif("x86_64", (b"i" * 16).hex(), 5000, 5100)
    assert rootfs.parse_sif(sif_file(arch=b"04\0")).machine == "aarch64"
    assert rootfs.parse_sif(sif_file(fs=5)).offset is None, "encrypted"
    with pytest.raises(ValueError, match="no root file system"):
        rootfs.parse_sif(sif_file(role=3))


@given(st.integers(0, 5200), st.integers(0, 255))
def test_a_damaged_image_file_raises_a_value_error_only(at: int, value: int) -> None:
    whole = sif_file()
    for data in (whole[:at], whole[:at] + bytes([value]) + whole[at + 1 :]):
        try:
            rootfs.parse_sif(data)
        except ValueError:
            continue


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"not an image", "image: .*no usable image"),
        (sif_file()[:3000], "cut short .3000 of 5100 bytes"),
        (sif_file()[:400], "no usable image .its table"),
        (sif_file(arch=b"04\0"), "for aarch64, but this machine is x86_64"),
    ],
)
def test_unusable_image_files_are_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "x.sif").write_bytes(data)
    with pytest.raises(CallerError, match=reason):
        rootfs.read_sif(tmp_path / "x.sif", "x86_64")


def image_of(name: str, size: int, last_use: float, used: bool) -> Image:
    return Image(Entry(name, Path(name), last_use, used), ImageInfo("image", "", "sif", size, 0.0))


images = st.lists(
    st.builds(image_of, st.uuids().map(str), st.integers(0, 100), st.floats(0, 100), st.booleans()), max_size=12
)


@given(images, st.none() | st.integers(0, 500), st.none() | st.floats(0, 100))
def test_only_what_must_go_goes(given_: list[Image], most: int | None, before: float | None) -> None:
    protected = {image.entry.name for image in given_ if image.info.bytes % 7 == 0}
    gone = eviction_candidates(given_, protected, max_bytes=most, before=before)
    left = [image for image in given_ if image not in gone]
    assert not any(image.entry.used or image.entry.name in protected for image in gone)
    free = [image for image in left if not image.entry.used and image.entry.name not in protected]
    assert most is None or not free or sum(image.info.bytes for image in left) <= most
    assert before is None or all(image.entry.last_use >= before for image in free)
    for image in gone:
        if before is None or image.entry.last_use >= before:
            assert most is not None
            assert all(other.entry.last_use >= image.entry.last_use for other in free), "the least recently used first"
            newer = [other for other in given_ if other in left or other.entry.last_use >= image.entry.last_use]
            assert sum(other.info.bytes for other in newer) > most, "and no more than needed"


def test_the_type_of_a_file_system() -> None:
    mounts = (
        "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        "30 22 0:40 / /home rw - nfs4 server:/home rw\n"
        "31 30 0:41 / /home/a\\040b rw - tmpfs tmpfs rw\n"
        "32 22 0:42 / /scratch rw - lustre mds:/x rw\n"
    )
    kinds = {"/": "ext4", "/home": "nfs4", "/home/x": "nfs4", "/homes": "ext4", "/home/a b/c": "tmpfs"}
    assert {path: filesystem_type_in(mounts, path) for path in kinds} == kinds
