"""When an image is built, what may enter it from the host, and that a broken build leaves nothing."""

from __future__ import annotations

import asyncio
import json
import re
import stat
import tomllib
from pathlib import Path

import pytest

from forkyard.errors import ImageBuildFailed
from forkyard.images import base_image_key, ensure_base_image
from forkyard.images.build import DATA_DIR, PATH, PackageProgress, Progress, write_overlay
from forkyard.images.hostconfig import (
    DEBIAN_KEYRING,
    AptSource,
    HostConfig,
    acquire_options,
    debian_sources,
    is_portable,
    npm_settings,
    pip_settings,
    read_uv_python,
    source_options,
    uv_python_settings,
)


def silent(step: str, fraction: float | None = None) -> None:
    """Nobody watches."""


# --- The key


def test_the_key_follows_embedded_files_and_certificates() -> None:
    key = base_image_key({"rootfs/etc/fstab": b"a"}, {})
    assert key == base_image_key({"rootfs/etc/fstab": b"a"}, {})
    assert key != base_image_key({"rootfs/etc/fstab": b"b"}, {})
    assert key != base_image_key({"rootfs/etc/fstab": b"a"}, {"corp.crt": b"x"})


def test_the_key_follows_the_package_list(monkeypatch: pytest.MonkeyPatch) -> None:
    before = base_image_key({}, {})
    monkeypatch.setattr("forkyard.images.build.PACKAGES", ("bash",))
    assert base_image_key({}, {}) != before


# --- Building once, whole or not at all


class FakeBuilder:
    """Writes the three files; waits for `release` half-way."""

    def __init__(self) -> None:
        self.builds = 0
        self.half_way = asyncio.Event()
        self.release = asyncio.Event()
        self.release.set()
        self.error: Exception | None = None

    async def __call__(self, work: Path, progress: Progress) -> dict[str, object]:
        self.builds += 1
        assert names_in(work) == []
        (work / "disk.raw").write_bytes(b"half")
        self.half_way.set()
        await self.release.wait()
        if self.error:
            raise self.error
        for name in ("disk.raw", "vmlinuz", "initramfs.cpio"):
            (work / name).write_bytes(b"whole")
        return {"kernel_version": "6.1.0-1-cloud-amd64", "min_disk_gib": 2}


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def visible(cache: Path) -> list[str]:
    return [name for name in names_in(cache / "images") if not name.startswith(".")]


def unfinished(cache: Path) -> list[str]:
    return [name for name in names_in(cache / "images") if name.endswith(".building")]


def test_a_built_image_is_returned_at_once_the_next_time(tmp_path: Path) -> None:
    async def main() -> None:
        builder = FakeBuilder()
        first = await ensure_base_image(tmp_path, silent, builder=builder)
        second = await ensure_base_image(tmp_path, silent, builder=builder)
        assert first == second
        assert builder.builds == 1
        assert (first.kernel_version, first.min_disk_gib) == ("6.1.0-1-cloud-amd64", 2)
        assert first.dir == tmp_path / "images" / first.key
        assert {first.disk, first.kernel, first.initramfs} < set(first.dir.iterdir())
        assert json.loads((first.dir / "manifest.json").read_text())["key"] == first.key

    asyncio.run(main())


def test_virtual_machines_of_other_users_can_read_an_image(tmp_path: Path) -> None:
    image = asyncio.run(_build_once(tmp_path))
    assert stat.S_IMODE(image.stat().st_mode) == 0o755
    assert {stat.S_IMODE(file.stat().st_mode) for file in image.iterdir()} == {0o644}


async def _build_once(cache: Path) -> Path:
    return (await ensure_base_image(cache, silent, builder=FakeBuilder())).dir


def test_two_that_ask_at_once_get_one_build_and_the_second_is_told_to_wait(tmp_path: Path) -> None:
    async def main() -> None:
        builder = FakeBuilder()
        builder.release.clear()
        first = asyncio.create_task(ensure_base_image(tmp_path, silent, builder=builder))
        await builder.half_way.wait()
        waiting = asyncio.Event()

        def heard(step: str, fraction: float | None = None) -> None:
            if "waiting" in step:
                waiting.set()

        second = asyncio.create_task(ensure_base_image(tmp_path, heard, builder=builder))
        await waiting.wait()
        builder.release.set()
        assert await first == await second
        assert builder.builds == 1

    asyncio.run(main())


def test_a_failed_build_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    async def main() -> None:
        builder = FakeBuilder()
        builder.error = OSError(28, "No space left on device")
        with pytest.raises(ImageBuildFailed, match="No space left"):
            await ensure_base_image(tmp_path, silent, builder=builder)
        assert visible(tmp_path) == unfinished(tmp_path) == []
        builder.error = None
        image = await ensure_base_image(tmp_path, silent, builder=builder)
        assert image.disk.read_bytes() == b"whole"

    asyncio.run(main())


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        builder = FakeBuilder()
        builder.release.clear()
        task = asyncio.create_task(ensure_base_image(tmp_path, silent, builder=builder))
        await builder.half_way.wait()
        assert visible(tmp_path) == []
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert visible(tmp_path) == unfinished(tmp_path) == []

    asyncio.run(main())


def test_what_a_killed_builder_left_is_removed_by_the_next(tmp_path: Path) -> None:
    async def main() -> None:
        image = await ensure_base_image(tmp_path, silent, builder=FakeBuilder())
        image.dir.rename(image.dir.with_name(f".{image.key}.building"))
        image.dir.with_name(".0123456789abcdef.building").mkdir()
        again = await ensure_base_image(tmp_path, silent, builder=FakeBuilder())
        assert again == image
        assert unfinished(tmp_path) == []

    asyncio.run(main())


def test_an_image_without_a_readable_manifest_is_built_anew(tmp_path: Path) -> None:
    async def main() -> None:
        builder = FakeBuilder()
        image = await ensure_base_image(tmp_path, silent, builder=builder)
        (image.dir / "manifest.json").write_text("{")
        await ensure_base_image(tmp_path, silent, builder=builder)
        assert builder.builds == 2

    asyncio.run(main())


# --- What carries over from the host

SOURCES_FILE = """\
# a comment before
Types: deb
# an old address
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Signed-By: /usr/share/keyrings/company.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Check-Valid-Until: no
"""
TARGETS = """\
Debian|Debian|bookworm|main|http://mirror.example/debian/|/etc/apt/sources.list.d/debian.sources:1
Debian|Debian|bookworm|contrib|http://mirror.example/debian/|/etc/apt/sources.list.d/debian.sources:1
Debian|Debian|bookworm-updates|main|http://mirror.example/debian/|/etc/apt/sources.list.d/debian.sources:1
Debian|Debian-Security|bookworm-security|main|http://u:p@mirror.example/security/|/etc/apt/sources.list.d/debian.sources:2
Debian|Debian Backports|bookworm-backports|main|http://mirror.example/debian/|/etc/apt/sources.list:1
|. nodistro|nodistro|main|https://vendor.example/node/|/etc/apt/sources.list.d/vendor.list:1
Debian|Debian|bookworm|main|file:/srv/cdrom/|/etc/apt/sources.list:2
"""


def sources_of_a_host() -> list[AptSource]:
    return debian_sources(TARGETS, "bookworm", {"/etc/apt/sources.list.d/debian.sources": SOURCES_FILE})


def test_only_debian_itself_is_taken_from_the_hosts_sources() -> None:
    assert [(source.uri, source.suite, source.components) for source in sources_of_a_host()] == [
        ("http://mirror.example/debian/", "bookworm", ("main", "contrib")),
        ("http://mirror.example/debian/", "bookworm-updates", ("main",)),
        ("http://u:p@mirror.example/security/", "bookworm-security", ("main",)),
    ]


def test_each_source_keeps_the_key_it_is_trusted_by() -> None:
    main, _, security = sources_of_a_host()
    assert main.keyrings == ["/usr/share/keyrings/company.gpg"]
    assert security.line(public=True) == (
        f"deb [check-valid-until=no signed-by={DEBIAN_KEYRING}] http://mirror.example/security/ bookworm-security main"
    )


def test_a_host_of_a_newer_release_gives_its_mirrors_to_the_guests_release() -> None:
    targets = (
        "Debian|Debian|trixie-updates|main|http://m.example/|f:1\nDebian|Debian|trixie|main|http://m.example/|f:1\n"
    )
    assert [source.suite for source in debian_sources(targets, "bookworm", {})] == ["bookworm-updates", "bookworm"]


def test_a_host_without_debian_sources_is_told_what_to_do() -> None:
    with pytest.raises(ImageBuildFailed, match="apt-get update"):
        debian_sources("Ubuntu|Ubuntu|noble|main|http://m.example/|f:1\n", "bookworm", {})


def test_options_of_a_one_line_source_are_read_from_its_brackets() -> None:
    text = "# comment\ndeb [arch=amd64 signed-by=/k.gpg trusted=yes] http://m.example bookworm main\n"
    assert dict(source_options(text, 2, deb822=False)) == {"signed-by": "/k.gpg", "trusted": "yes"}


def test_a_key_pasted_into_a_source_falls_back_to_debians_keyring() -> None:
    text = "Types: deb\nSigned-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n"
    assert dict(source_options(text, 1, deb822=True)) == {"signed-by": DEBIAN_KEYRING}


@pytest.mark.parametrize(
    "url",
    [
        "file:///opt/simple",
        "https://user:secret@pypi.example/simple",
        "https://token@npm.example/",
        "https://npm.example/?token=secret",
        "http://localhost:3141/root/pypi",
        "http://127.0.0.1:4873/",
        "http://[::1]:4873/",
        "http://[broken/",
        "",
    ],
)
def test_addresses_that_mean_the_host_or_hold_secrets_stay_outside(url: str) -> None:
    assert not is_portable(url)


def test_pip_indexes_carry_over_without_local_paths_and_secrets() -> None:
    listing = """\
:env:.cert='/etc/ssl/certs/ca-certificates.crt'
:env:.index-url='https://env.example/simple'
global.extra-index-url='file:///opt/pypi https://more.example/simple https://u:p@private.example/simple'
global.index-url='https://global.example/simple'
"""
    assert pip_settings(listing) == {
        "index-url": "https://env.example/simple",
        "extra-index-url": "https://more.example/simple",
    }


def test_npm_registries_carry_over_without_tokens() -> None:
    config = {
        "registry": "https://npm.example/",
        "@team:registry": "https://team.example/",
        "@secret:registry": "https://u:p@secret.example/",
        "//npm.example/:_authToken": "secret",
        "proxy": None,
        "cafile": "/etc/ssl/x.pem",
    }
    assert npm_settings(json.dumps(config)) == {
        "registry": "https://npm.example/",
        "@team:registry": "https://team.example/",
    }


def test_mirrors_of_pythons_carry_over_from_uvs_variables_and_files() -> None:
    user = 'python-install-mirror = "https://user.example/py"\nindex-url = "https://x.example"\n'
    system = (
        'python-install-mirror = "https://all.example/py"\npython-downloads-json-url = "https://all.example/a.json"\n'
    )
    assert uv_python_settings({}, [user, system]) == {
        "UV_PYTHON_INSTALL_MIRROR": "https://user.example/py",
        "UV_PYTHON_DOWNLOADS_JSON_URL": "https://all.example/a.json",
    }
    said = {"UV_PYTHON_INSTALL_MIRROR": "https://u:p@env.example/", "UV_PYTHON_DOWNLOADS_JSON_URL": "/srv/list.json"}
    assert uv_python_settings(said, [user]) == {}, "what cannot carry over does not fall back to what was not meant"
    assert uv_python_settings({}, ["no toml ["]) == {}


def test_the_hosts_uv_is_asked_where_it_looks_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("UV_PYTHON_INSTALL_MIRROR", "UV_PYTHON_DOWNLOADS_JSON_URL", "UV_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "uv").mkdir()
    (tmp_path / "uv" / "uv.toml").write_text('python-install-mirror = "https://file.example/"\n')
    assert read_uv_python()["UV_PYTHON_INSTALL_MIRROR"] == "https://file.example/"
    monkeypatch.setenv("UV_PYTHON_INSTALL_MIRROR", "https://env.example/")
    assert read_uv_python()["UV_PYTHON_INSTALL_MIRROR"] == "https://env.example/"


def test_uv_yarn_and_bun_are_told_of_the_registries_of_pip_and_npm(tmp_path: Path) -> None:
    host = HostConfig(
        (AptSource("https://deb.example/debian", "bookworm", ("main",)),),
        pip={"index-url": "https://pip.example/simple", "extra-index-url": "https://a.example https://b.example"},
        npm={"registry": "http://npm.example:4873/"},
        uv_python={"UV_PYTHON_INSTALL_MIRROR": "https://py.example/"},
    )
    write_overlay(tmp_path, host)
    assert tomllib.loads((tmp_path / "etc/uv/uv.toml").read_text()) == {
        "python-install-mirror": "https://py.example/",
        "index-url": "https://pip.example/simple",
        "extra-index-url": ["https://a.example", "https://b.example"],
    }
    assert (tmp_path / "opt/node/etc/yarnrc").read_text() == 'registry "http://npm.example:4873/"\n'
    assert (tmp_path / "etc/skel/.yarnrc.yml").read_text().splitlines() == [
        'npmRegistryServer: "http://npm.example:4873/"',
        'unsafeHttpWhitelist: ["npm.example"]',
    ]
    assert (
        tomllib.loads((tmp_path / "etc/skel/.bunfig.toml").read_text())["install"]["registry"] == host.npm["registry"]
    )


def test_apt_proxies_are_used_for_the_build_and_only_harmless_ones_enter_the_image() -> None:
    dump = """\
Acquire::http::Proxy "http://u:p@proxy.example:3128";
Acquire::https::Proxy "http://proxy.example:3128";
Acquire::https::CAInfo "/etc/ssl/company.pem";
Acquire::http::Proxy-Auto-Detect "/usr/bin/detect";
Acquire::Changelogs::URI "x";
"""
    options = acquire_options(dump)
    assert set(options) == {"Acquire::http::Proxy", "Acquire::https::Proxy", "Acquire::https::CAInfo"}
    assert HostConfig(apt_sources=(), apt_options=options).portable_apt_options == {
        "Acquire::https::Proxy": "http://proxy.example:3128"
    }


# --- Files of the image


def overlay_of(tmp_path: Path, **host: object) -> Path:
    source = AptSource("http://u:hunter2@mirror.example/", "bookworm", ("main",), (("signed-by", DEBIAN_KEYRING),))
    write_overlay(tmp_path, HostConfig(apt_sources=(source,), **host))  # type: ignore[arg-type]
    return tmp_path


def test_no_password_of_a_mirror_enters_the_image(tmp_path: Path) -> None:
    overlay = overlay_of(tmp_path)
    assert "http://mirror.example/ bookworm main" in (overlay / "etc/apt/sources.list").read_text()
    assert not [file for file in overlay.rglob("*") if file.is_file() and b"hunter2" in file.read_bytes()]


def test_the_hosts_certificates_are_trusted_by_programs_with_stores_of_their_own(tmp_path: Path) -> None:
    overlay = overlay_of(tmp_path, ca_certificates={"corp/root.crt": b"PEM"})
    assert (overlay / "usr/local/share/ca-certificates/corp/root.crt").read_bytes() == b"PEM"
    environment = (overlay / "etc/environment").read_text()
    assert "NODE_EXTRA_CA_CERTS=/etc/ssl/certs/ca-certificates.crt\n" in environment
    assert '"PIP_CERT=/etc/ssl/certs/' in (overlay / "etc/systemd/system.conf.d/forkyard.conf").read_text()


def test_without_private_certificates_the_environment_says_nothing_of_them(tmp_path: Path) -> None:
    assert "CERT" not in (overlay_of(tmp_path) / "etc/environment").read_text()


def test_modes_in_the_image_do_not_depend_on_who_builds_it(tmp_path: Path) -> None:
    (tmp_path / "opt/node/bin").mkdir(parents=True, mode=0o700)
    (tmp_path / "opt/node/bin/node").touch(mode=0o600)
    overlay = overlay_of(tmp_path)
    assert stat.S_IMODE((overlay / "opt/node/bin").stat().st_mode) == 0o755
    assert stat.S_IMODE((overlay / "opt/node/bin/node").stat().st_mode) == 0o755
    assert stat.S_IMODE((overlay / "etc/fstab").stat().st_mode) == 0o644


def test_every_way_into_the_machine_has_the_same_path() -> None:
    """Login shells and sudo cannot read it from one place, so it stands in three files."""
    for name in ("etc/profile.d/forkyard.sh", "etc/sudoers.d/forkyard"):
        found = re.findall(r'(?:PATH=|secure_path=)"?(/[^"\n]*)', (DATA_DIR / "rootfs" / name).read_text())
        assert found == [PATH]


def test_installing_packages_is_shown_as_a_growing_fraction() -> None:
    seen: list[float] = []

    def note(step: str, fraction: float | None = None) -> None:
        if fraction is not None:
            seen.append(fraction)

    counter = PackageProgress(note)
    counter.line("0 upgraded, 2 newly installed, 0 to remove and 0 not upgraded.")
    for line in ("Unpacking a (1) ...", "noise", "Unpacking b (1) ...", "Setting up a (1) ...", "Setting up b (1) ..."):
        counter.line(line)
    assert seen == [0.25, 0.5, 0.75, 1.0]
