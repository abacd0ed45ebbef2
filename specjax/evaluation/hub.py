"""One file of a data set on the Hugging Face hub, by its `hf://` address."""

from __future__ import annotations

import re
from pathlib import Path

SCHEME = "hf://"
FORM = "hf://datasets/<org>/<name>[@revision]/<path of the file>"
_ADDRESS = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)")


def fetch_file(address: str) -> Path:
    """The file's place in the hub's own cache, fetched where it is not there yet.

    Args:
        address: in the hub's form, `hf://datasets/openai/gsm8k/main/test-00000-of-00001.parquet` for instance.

    Raises:
        ValueError: the address is of another form.
        FileNotFoundError: there is no such data set, revision or file.
        PermissionError: its terms were not accepted.
        ConnectionError: it is not in the cache and could not be fetched.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise ValueError(f"{address!r} is no address of a file on the hub; expected {FORM}")
    import huggingface_hub
    from huggingface_hub import errors

    name, revision, file = found.groups()
    # The bases of the hub's own error are those of the HTTP library it uses, which differs by version.
    failures: tuple[type[BaseException], ...] = (
        errors.EntryNotFoundError,
        OSError,
        *errors.HfHubHTTPError.__bases__,
    )
    try:
        return Path(huggingface_hub.hf_hub_download(name, file, repo_type="dataset", revision=revision))
    except errors.GatedRepoError as error:
        raise PermissionError(
            f"the data set {name} is gated: accept its terms on https://huggingface.co/datasets/{name}, then run "
            "`hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"the hub has no data set {name!r}, or it is private and the token does not open it"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(f"the data set {name} has no revision {revision!r}") from error
    except failures as error:
        local = isinstance(error, errors.LocalEntryNotFoundError)
        if isinstance(error, errors.EntryNotFoundError) and not local:
            raise FileNotFoundError(f"the data set {name} has no file {file!r}") from error
        raise ConnectionError(
            f"{file} of the data set {name} is not in the hub's cache and could not be fetched ({error}); fetch it "
            f"where there is a network and give its path in place of {address}"
        ) from error
