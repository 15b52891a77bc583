"""scripts/bundle, scripts/install and save-image, on a small repository.

Stand-ins: docker, and the programs of images/. tests/e2e/test_air_gap.py does it with the real ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ID = "sha256:0123456789abcdef"
TAG = "vllm-fleet/vllm-nixl:cpu-c0ffee"
RELAY_ID = "sha256:76543210fedcba98"
RELAY_TAG = "vllm-fleet/pd-relay:amd64-decade"
SAVED = os.urandom(3000) + b"E"

# An engine whose images are files, named after their tags, with their ids; what it saves is the file `saved`.
DOCKER = """\
#!/bin/sh
cd "$(dirname "$0")/engine" || exit
case "$1 $2" in
    "image inspect") for tag; do :; done; cat "$(echo "$tag" | tr / _)" 2>/dev/null ;;
    save*) [ -e saved ] || { echo "no such image" >&2; exit 1; }; cat saved; case "$2" in */pd-relay:*) printf R ;; esac ;;
    # The tests' images differ in the last letter of what is saved.
    load*) gunzip > loaded && case "$(tail -c 1 loaded)" in R) cp relay-id "$(cat relay-tag)" ;; *) cp id "$(cat tag)" ;; esac ;;
esac
"""
BUILD = """\
import json, sys
tag, id = (RELAY_TAG, RELAY_ID) if "pd-relay:amd64" in sys.argv else (TAG, ID)
json.dump([{"name": "-", "variant": "-", "tag": tag, "id": id, "changed": False}], sys.stdout)
"""
OTHER = """\
import json, pathlib, sys
print(sys.argv[1:], file=sys.stderr)
kept = pathlib.Path(sys.argv[-1].removeprefix("--state=")) / "others/mark.json"
kept.parent.mkdir(parents=True, exist_ok=True)
kept.write_text("a verdict")
json.dump([{"tag": TAG, "id": ID, "changed": False, "lacks": ["numactl"], "verdict": str(kept)}], sys.stdout)
"""
FETCH = """\
import pathlib, sys
folder = pathlib.Path(sys.argv[2])
folder.mkdir(parents=True, exist_ok=True)
(folder / "locked.whl").write_text(pathlib.Path(sys.argv[1]).stem)
(folder / "left.whl").write_text("of an older lock")
"""


def names(**values: str) -> str:
    return "".join(f"{name} = {value!r}\n" for name, value in values.items())


class Repository:
    """What scripts/bundle packs, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "repository"
        self.bin = folder / "bin"
        self.engine = self.bin / "engine"
        self.engine.mkdir(parents=True)
        (self.engine / "saved").write_bytes(SAVED)
        (self.engine / "tag").write_text(TAG.replace("/", "_"))
        (self.engine / "id").write_text(f"{ID}\n")
        (self.engine / "relay-tag").write_text(RELAY_TAG.replace("/", "_"))
        (self.engine / "relay-id").write_text(f"{RELAY_ID}\n")
        self.program("docker", DOCKER)
        for name in ("scripts/bundle", "scripts/install", "roles/container_image/files/save-image"):
            self.write(name, (ROOT / name).read_text()).chmod(0o755)
        self.write("scripts/setup", "#!/bin/sh\necho set up >&2\n").chmod(0o755)
        known = names(TAG=TAG, ID=ID, RELAY_TAG=RELAY_TAG, RELAY_ID=RELAY_ID)
        self.write("images/build", known + BUILD)
        self.write("roles/container_image/files/other-image", known + OTHER)
        self.write("images/fetch-wheels", FETCH)
        for lock in ("requirements/dev.txt", "roles/vllm_router/files/requirements.txt"):
            self.write(lock, f"x==1 --hash=sha256:{hashlib.sha256(Path(lock).stem.encode()).hexdigest()}\n")
        self.write(".gitignore", ".state/\n")
        shutil.copytree(ROOT / "inventory/lab", self.folder / "inventory/lab")
        self.git("init", "--quiet")
        self.commit()

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def git(self, *words: str) -> str:
        settings = ("-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "commit.gpgsign=false")
        done = subprocess.run(
            ["git", *settings, *words], cwd=self.folder, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message=all")

    def inventory(self, **variables: str) -> Path:
        """The lab's, with other variables, which git does not know."""
        folder = self.folder.parent / "inventory"
        shutil.copytree(ROOT / "inventory/lab", folder)
        path = folder / "group_vars/all.yml"
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | variables))
        return folder

    def run(self, *command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command,
            cwd=cwd or self.folder,
            env=os.environ | {"PATH": f"{self.bin}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Traceback" not in done.stderr
        return done

    def __call__(self, *more: str | Path, inventory: Path | None = None) -> subprocess.CompletedProcess[str]:
        inventory = inventory or self.folder / "inventory/lab"
        return self.run(sys.executable, "scripts/bundle", "--inventory", inventory, *more)

    def packed(self, *more: str | Path, inventory: Path | None = None) -> Path:
        """Make a bundle that must be made; the folder it was unpacked to."""
        done = self(*more, inventory=inventory)
        assert done.returncode == 0, done.stderr
        site = self.folder.parent / "site"
        with tarfile.open(done.stdout.strip()) as tar:
            tar.extractall(site, filter="data")
        [folder] = site.iterdir()
        return folder

    def install(self, folder: Path) -> subprocess.CompletedProcess[str]:
        return self.run("./install", cwd=folder)


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path)


# --- packing ------------------------------------------------------------------------------------------------------


def test_a_bundle_holds_what_deploys_a_fleet_with_the_checksum_of_every_file(repository):
    folder = repository.packed("--router-python=3.11", "--python=3.12")
    head = repository.git("rev-parse", "--short=12", "HEAD")
    assert folder.name == f"vllm-fleet-{head}"
    machine = os.uname().machine
    archive = ".state/archives/0123456789ab"
    files = {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    }
    assert files == set(repository.git("ls-files").splitlines()) | {
        "SHA256SUMS",
        ".state/bundle",
        f".state/wheelhouse/workstation-3.12-{machine}/locked.whl",
        ".state/wheelhouse/vllm-router-3.11-x86_64/locked.whl",
        f"{archive}/SHA256SUMS",
        f"{archive}/part.0000",
    }
    summed = [line.split("  ", 1)[1] for line in (folder / "SHA256SUMS").read_text().splitlines()]
    assert sorted(summed) == sorted(files - {"SHA256SUMS"})
    assert repository.run("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=folder).returncode == 0
    assert (folder / "install").readlink() == Path("scripts/install")
    assert os.access(folder / "scripts/setup", os.X_OK)
    assert not os.access(folder / "requirements/dev.txt", os.X_OK)


def test_the_routers_host_and_the_workstation_may_be_others(repository):
    folder = repository.packed("--python=3.13", "--router-python=3.12", "--router-arch=aarch64")
    wheelhouses = sorted(path.name for path in (folder / ".state/wheelhouse").iterdir())
    assert wheelhouses == ["vllm-router-3.12-aarch64", f"workstation-3.13-{os.uname().machine}"]
    assert "bundle_python=3.13\n" in (folder / ".state/bundle").read_text()


def test_what_is_not_committed_is_refused_by_name_and_what_git_does_not_know_is_named(repository):
    repository.write("inventory/mine/hosts.yml", "all:\n")
    folder = repository.packed()
    assert not (folder / "inventory/mine").exists()
    assert "not packed, because git does not have it: inventory/mine/" in repository().stderr
    repository.write("scripts/setup", "#!/bin/sh\n")
    refused = repository()
    assert refused.returncode == 1
    assert "commit or stash what you changed, because HEAD is packed: scripts/setup" in refused.stderr


def test_what_only_this_folder_has_in_images_is_refused_because_the_image_is_made_of_it(repository):
    repository.write(".gitignore", ".state/\n*.so\n__pycache__/\n")
    repository.commit()
    for name in ("README.md", "base/__pycache__/prepare.pyc", "base/notes.md"):
        repository.write(f"images/{name}", "no input")
    assert repository().returncode == 0
    for name in ("base/rootfs/etc/new file", "base/ignored.so"):
        path = repository.write(f"images/{name}", "an input")
        refused = repository()
        assert refused.returncode == 1
        assert f"what git does not have: images/{name}; remove or commit it" in refused.stderr
        path.unlink()


def revision(repository, folder: Path) -> str:
    done = repository.run(ROOT / "roles/container_image/files/revision", folder)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_which_commit_an_image_is_of_is_known_in_a_checkout_and_in_a_bundle(repository, tmp_path):
    head = repository.git("rev-parse", "HEAD")
    folder = repository.packed()
    repository.write("inventory/mine/hosts.yml", "all:\n")
    assert revision(repository, repository.folder) == head
    repository.write("images/build", "changed")
    assert revision(repository, repository.folder) == f"{head}-dirty"
    # A bundle may be unpacked in a checkout of something else.
    inside = repository.folder / ".state/unpacked"
    shutil.copytree(folder, inside, symlinks=True)
    assert revision(repository, inside) == head
    assert revision(repository, tmp_path) == ""


def test_a_folder_that_is_no_checkout_makes_no_bundle(repository):
    shutil.rmtree(repository.folder / ".git")
    done = repository()
    assert done.returncode == 1
    assert "this folder is no git checkout" in done.stderr


def test_a_wrong_inventory_is_refused_with_its_reasons(repository):
    done = repository(inventory=repository.inventory(fleet_kv_transport="carrier pigeon"))
    assert done.returncode == 1
    for words in ("must be 'nvlink', 'rdma' or 'tcp'", "is refused; the reasons are above"):
        assert words in done.stdout + done.stderr


def test_hosts_that_build_for_themselves_need_a_network(repository):
    done = repository(inventory=repository.inventory(fleet_image_source="build"))
    assert done.returncode == 1
    assert "set it to archive" in done.stderr


def test_an_image_of_somebody_else_is_packed_with_its_verdict_and_a_warning(repository):
    reference = f"images.example/engine@sha256:{'0' * 64}"
    inventory = repository.inventory(fleet_image_source="archive", fleet_image_reference=reference)
    done = repository(inventory=inventory)
    assert done.returncode == 0, done.stderr
    told = f"'{reference}', 'cpu', '--architecture=amd64', '--vllm-version=0.32.0'"
    for words in (told, f"WARNING: {reference} lacks numactl"):
        assert words in done.stderr
    with tarfile.open(done.stdout.strip()) as tar:
        [verdict] = [name for name in tar.getnames() if name.endswith("/.state/others/mark.json")]
        assert tar.extractfile(verdict).read() == b"a verdict"


def test_an_image_that_cannot_be_saved_leaves_nothing(repository):
    (repository.engine / "saved").unlink()
    done = repository()
    assert done.returncode == 1
    for words in ("no such image", "the image could not be saved"):
        assert words in done.stderr
    assert list((repository.folder / ".state").glob("archives/*")) == []
    assert list((repository.folder / ".state").glob("*.tar*")) == []


# --- installing -----------------------------------------------------------------------------------------------------


def test_a_bundle_installs_once_and_takes_being_installed_again(repository):
    folder = repository.packed()
    done = repository.install(folder)
    assert done.returncode == 0, done.stderr
    for words in ("set up", f"loading the image {TAG}", f"in {folder}"):
        assert words in done.stderr
    assert (repository.engine / "loaded").read_bytes() == SAVED
    (repository.engine / "loaded").unlink()
    again = repository.install(folder)
    assert again.returncode == 0
    assert f"the image {TAG} is there" in again.stderr
    assert not (repository.engine / "loaded").exists()


def test_the_relays_image_goes_with_the_engines_where_the_inventory_has_a_relay(repository):
    inventory = repository.inventory(fleet_image_source="archive")
    hosts = yaml.safe_load((inventory / "hosts.yml").read_text())
    hosts["all"]["children"]["relay"] = {"hosts": {"rack1-router": None}}
    (inventory / "hosts.yml").write_text(yaml.safe_dump(hosts))
    folder = repository.packed(inventory=inventory)
    assert sorted(path.name for path in (folder / ".state/archives").iterdir()) == [
        "0123456789ab",
        "76543210fedc",
    ]
    done = repository.install(folder)
    assert done.returncode == 0, done.stderr
    for tag in (TAG, RELAY_TAG):
        assert f"loading the image {tag}" in done.stderr
    again = repository.install(folder)
    for tag in (TAG, RELAY_TAG):
        assert f"the image {tag} is there" in again.stderr
    (repository.engine / RELAY_TAG.replace("/", "_")).unlink()
    (repository.engine / "relay-id").write_text("sha256:fedcba\n")
    refused = repository.install(folder)
    assert refused.returncode == 1
    assert f"docker loaded {RELAY_TAG}, but with another id than {RELAY_ID}" in refused.stderr


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:5] + bytes([content[5] ^ 1]) + content[6:])


@pytest.mark.parametrize("damage", [flip, lambda path: path.write_bytes(path.read_bytes()[:-1]), Path.unlink])
@pytest.mark.parametrize(
    "name", ["scripts/setup", ".state/archives/0123456789ab/part.0000", "inventory/lab/hosts.yml"]
)
def test_a_file_that_is_damaged_is_named_and_nothing_is_installed(repository, name, damage):
    folder = repository.packed()
    damage(folder / name)
    done = repository.install(folder)
    assert done.returncode == 1
    assert f"{name}: FAILED" in done.stderr
    assert "nothing was installed" in done.stderr
    assert "set up" not in done.stderr
    assert not (repository.engine / "loaded").exists()


def test_an_image_with_another_id_is_refused(repository):
    folder = repository.packed()
    (repository.engine / "id").write_text("sha256:fedcba\n")
    done = repository.install(folder)
    assert done.returncode == 1
    assert f"with another id than {ID}" in done.stderr


# Makes a .venv whose Python is a stand-in that writes down its arguments; all else is done by the real one.
PYTHON = """\
#!/bin/sh
case "$*" in
    *venv*) mkdir -p .venv/bin && cp "$(dirname "$0")/pip" .venv/bin/python ;;
    *) exec {python} "$@" ;;
esac
"""
PIP = """\
#!/bin/sh
case "$*" in -m*) for word; do echo "$word"; done >> pip.log ;; esac
"""


def test_wheels_are_taken_from_the_bundle_wherever_it_is_unpacked(repository, tmp_path):
    site = tmp_path / "a b"
    (site / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/setup", site / "scripts")
    (site / "requirements").mkdir()
    (site / "requirements/dev.txt").touch()
    (site / ".state").mkdir()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    (site / ".state/bundle").write_text(f"bundle_python={version}\nbundle_wheels=.state/wheels\n")
    repository.program("python3", PYTHON.format(python=sys.executable))
    repository.program("pip", PIP)
    repository.program("ssh", "#!/bin/sh\n")
    done = repository.run("scripts/setup", cwd=site)
    assert done.returncode == 0, done.stderr
    said = (site / "pip.log").read_text().splitlines()
    assert said.count("install") == 2
    wheels = ["--no-index", "--find-links", str(site / ".state/wheels")]
    assert [said[i : i + 3] for i, word in enumerate(said) if word == "--no-index"] == [wheels] * 2


def test_a_folder_that_is_no_bundle_is_told(repository):
    done = repository.run("scripts/install")
    assert done.returncode == 1
    assert "this folder is not an unpacked bundle" in done.stderr


# --- the archive ------------------------------------------------------------------------------------------------------


def save(repository, folder, size="1000"):
    return repository.run("roles/container_image/files/save-image", TAG, folder, size)


def test_the_parts_of_an_archive_are_together_what_docker_loads(repository, tmp_path):
    folder = tmp_path / "archives/x"
    assert save(repository, folder).returncode == 0
    sums = (folder / "SHA256SUMS").read_text().splitlines()
    parts = sorted(path.name for path in folder.glob("part.*"))
    assert [line.split()[1] for line in sums] == parts
    assert len(parts) > 2
    assert repository.run("sha256sum", "--check", "SHA256SUMS", cwd=folder).returncode == 0
    whole = b"".join((folder / part).read_bytes() for part in parts)
    assert subprocess.run(["gunzip"], input=whole, capture_output=True, check=True).stdout == SAVED
    assert folder.stat().st_mode & 0o777 == 0o755
    assert json.dumps(sorted(path.name for path in folder.parent.iterdir())) == '["x"]'


def test_an_archive_that_another_run_has_made_meanwhile_stays(repository, tmp_path):
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "SHA256SUMS").write_text("theirs")
    assert save(repository, folder).returncode == 0
    assert [path.name for path in folder.iterdir()] == ["SHA256SUMS"]
    assert [path.name for path in tmp_path.glob("x*")] == ["x"]


def test_an_image_that_is_not_saved_whole_is_no_archive(repository, tmp_path):
    repository.program("docker", "#!/bin/sh\necho half\nexit 1\n")
    assert save(repository, tmp_path / "x").returncode != 0
    assert list(tmp_path.glob("x*")) == []
