# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The rules about images, without any: references, recipes, SIF headers, what is removed."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

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


# References


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("docker://python", "docker://docker.io/library/python:latest"),
        ("docker://python:3.12-slim", "docker://docker.io/library/python:3.12-slim"),
        ("docker://index.docker.io/us/it", "docker://docker.io/us/it:latest"),
        ("docker://localhost/it", "docker://localhost/it:latest"),
        ("docker://127.0.0.1:5000/a/b/c:1", "docker://127.0.0.1:5000/a/b/c:1"),
        ("docker://us/it@sha256:" + "a" * 64, "docker://docker.io/us/it@sha256:" + "a" * 64),
        ("docker://us/it:3@sha256:" + "a" * 64, "docker://docker.io/us/it@sha256:" + "a" * 64),
        ("docker://swe/x.y_1776_z-12:latest", "docker://docker.io/swe/x.y_1776_z-12:latest"),
    ],
)
def test_addresses_of_registries_are_completed(text: str, uri: str) -> None:
    assert parse(text) == RegistryImage(uri)
    assert parse(uri) == RegistryImage(uri), "and a complete one stays"
    assert parse_registry(text.removeprefix("docker://")) == RegistryImage(uri)


def test_a_path_below_the_cache_folder_is_good_on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("/one", "/other"):
        monkeypatch.setenv("PRORL_CACHE", folder)
        assert parse("cache:swe-tasks/x.sif") == LocalImage(Path(folder, "swe-tasks/x.sif"))
        assert portable_path(Path(folder, "swe-tasks/x.sif")) == "cache:swe-tasks/x.sif"
    assert portable_path(Path("/one/x.sif")) == "/one/x.sif"


def test_paths_and_names() -> None:
    assert parse("/a/b") == LocalImage(Path("/a/b"))
    assert parse("./b") == LocalImage(Path("b").absolute())
    assert parse("x.sif") == LocalImage(Path("x.sif").absolute())
    assert parse("~/x") == LocalImage(Path("~/x").expanduser())
    assert parse("swe-base_1.2") == NamedImage("swe-base_1.2")


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "a b", "-a", "library://x", "docker://", "docker://A/b", "docker://a/b:", "docker://a//b"),
        *("docker://a/b@sha256:1", "docker://a/b@", "docker://a/../b", "docker://u:p@host/x", "docker://a/b:1/c"),
        *("cache:", "cache:.", "cache:/etc/x", "cache:../x", "cache:x/../../y", "cache:x\0"),
    ],
)
def test_what_is_no_image_is_refused_for_its_field(text: str) -> None:
    with pytest.raises(CallerError, match=r"^somewhere: "):
        parse(text, "somewhere")


@given(st.text(max_size=40))
def test_any_text_is_understood_or_refused(text: str) -> None:
    for candidate in (text, f"docker://{text}"):
        try:
            found = parse(candidate)
        except CallerError:
            continue
        if isinstance(found, RegistryImage):
            assert parse(found.uri) == found
            assert "/" not in found.entry("x86_64")
            assert not found.entry("x86_64").startswith((".", "-"))


# Recipes

names = st.text("abc", min_size=1, max_size=3)
recipe_strategy = st.builds(
    Recipe,
    template=names,
    base=names,
    machine=st.sampled_from(["x86_64", "aarch64"]),
    format=st.sampled_from(["folder", "sif"]),
    apt=st.frozensets(names, max_size=3),
    pip=st.frozensets(names, max_size=3),
    locks=st.dictionaries(names, st.binary(max_size=3), max_size=2),
    variables=st.dictionaries(names, names, max_size=2),
)


def facts(one: Recipe) -> tuple[object, ...]:
    return (
        *(one.base, one.machine, one.apt, one.pip, one.template, one.format),
        *(dict(one.locks), dict(one.variables)),
    )


@given(recipe_strategy, recipe_strategy)
def test_keys_are_equal_exactly_when_what_they_stand_for_is(one: Recipe, other: Recipe) -> None:
    assert (one.key == other.key) == (facts(one) == facts(other))


def test_a_changed_lock_file_or_package_template_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Recipe("t", "b", "x86_64", "sif", locks={"uv.lock": b"1"})
    before = one.key
    assert before != replace(one, locks={"uv.lock": b"2"}).key
    monkeypatch.setattr(recipes, "template_text", lambda name: "changed")
    assert one.key != before


@pytest.mark.parametrize("name", ["agent", "packages", "plain", "default", "kernel"])
def test_templates_that_come_with_the_package_make_definition_files(name: str) -> None:
    one = Recipe(
        template_text(name), "b", "x86_64", "sif", frozenset({"gcc", "make=4.3"}), frozenset({"a[b]>=1,<2"}),
        {"requirements.txt": b"x", "uv.lock": b"y"}, frozenset({"x"}), {"run": "first\nsecond"},
    )  # fmt: skip
    recipes.check_recipe(one)
    text = render(one.template, "Bootstrap: docker\nFrom: debian", one)
    assert text.lstrip().startswith("Bootstrap: docker\nFrom: debian\n")
    if name == "packages":
        assert "gcc make=4.3\n" in text
        assert "'a[b]>=1,<2'" in text


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ base }}\n{% if %}", "template: line 2"),
        ("{{ base }}\n{{ nothing }}", "template: 'nothing' is undefined.*--set"),
        ("%post\n    true", "template: .*Bootstrap"),
    ],
)
def test_template_errors_name_what_is_wrong(template: str, reason: str) -> None:
    with pytest.raises(CallerError, match=reason):
        render(template, "Bootstrap: x", Recipe(template, "b", "x86_64", "sif"))
    with pytest.raises(
        CallerError, match=r"no template is named 'nosuch': choose from agent, default, kernel, math, packages, plain"
    ):
        template_text("nosuch")


@pytest.mark.parametrize(
    "change",
    [
        {"apt": frozenset({"a; rm"})},
        {"pip": frozenset({"a'b"})},
        {"pip": frozenset({"-r x"})},
        {"locks": {"../x": b""}},
    ],
)
def test_what_would_break_out_of_a_definition_file_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(CallerError):
        recipes.check_recipe(replace(Recipe("t", "b", "x86_64", "sif"), **change))  # type: ignore[arg-type]


# SIF


def sif_file(arch: bytes = b"02\0", fs: int = 1, role: int = 2, offset: int = 5000, length: int = 100) -> bytes:
    """The beginning of an image file with one partition, and as many bytes as it says."""
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
def test_no_damage_goes_further_than_a_clear_refusal(at: int, value: int) -> None:
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
    (tmp_path / "x.sif").write_bytes(sif_file())
    assert rootfs.read_sif(tmp_path / "x.sif", "x86_64").offset == 5000


# What is removed


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
    if most is not None:
        assert sum(image.info.bytes for image in left) <= most or not free
    if before is not None:
        assert all(image.entry.last_use >= before for image in free)
    for image in gone:
        if before is None or image.entry.last_use >= before:
            assert most is not None
            assert all(other.entry.last_use >= image.entry.last_use for other in free), "the least recently used first"
            newer = [other for other in given_ if other in left or other.entry.last_use >= image.entry.last_use]
            assert sum(other.info.bytes for other in newer) > most, "and no more than needed"


def test_kinds_of_disks() -> None:
    mounts = (
        "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        "30 22 0:40 / /home rw - nfs4 server:/home rw\n"
        "31 30 0:41 / /home/a\\040b rw - tmpfs tmpfs rw\n"
        "32 22 0:42 / /scratch rw - lustre mds:/x rw\n"
    )
    kinds = ["/", "/home", "/home/me/x", "/homes", "/home/a b/c", "/scratch/x"]
    assert [filesystem_type_in(mounts, path) for path in kinds] == ["ext4", "nfs4", "nfs4", "ext4", "tmpfs", "lustre"]
