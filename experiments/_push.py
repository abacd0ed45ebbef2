"""Uploads a directory to the Hugging Face hub."""

from __future__ import annotations

from typing import Any


def check_push(repository: str, token: str | None) -> None:
    """Checks what can be checked before anything is written.

    Args:
        repository: where to push.
        token: of the hub, None where there is none.

    Raises:
        ValueError: it is no repository's name.
        PermissionError: there is no token.
    """
    from huggingface_hub import errors, utils

    try:
        utils.validate_repo_id(repository)
    except errors.HFValidationError as error:
        raise ValueError(f"--push={repository!r}; expected a repository of the hub, owner/name ({error})") from error
    if repository.count("/") != 1:
        raise ValueError(f"--push={repository!r}; expected a repository of the hub, owner/name")
    if not token:
        raise PermissionError(f"--push={repository} needs a token of the hub: run `hf auth login` or set HF_TOKEN")


def push(directory: str, repository: str, api: Any) -> str:
    """Uploads a written head to the hub.

    Args:
        directory: of the head and its card.
        repository: `owner/name`; made if absent.
        api: `huggingface_hub.HfApi()`, or what acts like one.

    Returns:
        The address of the commit.

    Raises:
        PermissionError: the token may not write there.
        ConnectionError: the hub cannot be reached.
    """
    from huggingface_hub import errors

    # The bases of the hub's own error are those of the HTTP library it uses, which differs by version.
    unreachable: tuple[type[BaseException], ...] = (OSError, *errors.HfHubHTTPError.__bases__)
    try:
        api.create_repo(repository, exist_ok=True)
        return str(api.upload_folder(folder_path=directory, repo_id=repository, commit_message="A head from specjax"))
    except (errors.HfHubHTTPError, errors.LocalTokenNotFoundError) as error:
        raise PermissionError(
            f"{directory} is written, but the hub refused {repository} ({error}): check that your token may write there"
        ) from error
    except unreachable as error:
        raise ConnectionError(
            f"{directory} is written, but the hub cannot be reached ({error}): push it later with `hf upload "
            f"{repository} {directory}`"
        ) from error
