from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from quire.engine.common.errors import ConfigError, HubUnreachable, ModelError

if TYPE_CHECKING:
    from quire.engine.checkpoint.hub_names import HubName

_NOT_WRITABLE_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS)
_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_GIB = 2**30
_SEARCH_LIMIT = 20


@contextmanager
def translate_hub_errors(name: HubName, revision: str | None) -> Iterator[None]:
    """Raises ModelError for errors of the hub's client, HubUnreachable if there is no answer."""
    # HTTPError is the HTTP library's base class, also of connection errors.
    from huggingface_hub.errors import HTTPError

    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, HTTPError) as error:
        reason = _explain_error(error, name, revision)
        if reason is None:
            raise HubUnreachable(
                f"model: {name.repo!r} is not a directory, and the hub cannot be reached at {_hub_endpoint()}: check "
                "the network, HF_ENDPOINT and HTTPS_PROXY. Without the hub, `quire serve` takes a directory, a GGUF "
                "file or smollm2 (a Python package)"
            ) from error
        raise ModelError(f"model: {reason}") from error
    except RuntimeError as error:  # raised by hf_xet
        if "No space left" in str(error):
            raise ModelError(f"model: {_disk_full_message(name)}") from error
        first_line = next(iter(str(error).splitlines()), "")
        raise ModelError(f"model: {name.repo} cannot be downloaded: {first_line[:200]}") from error


def _explain_error(error: Exception, name: HubName, revision: str | None) -> str | None:
    """Returns None if the hub cannot be reached."""
    from huggingface_hub import errors, is_offline_mode

    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else None
    reported_error = cause if isinstance(cause, errors.HfHubHTTPError) else error
    refusal = _explain_hub_refusal(reported_error, name.repo, revision)
    if refusal is not None:
        return refusal
    if is_offline_mode():
        return f"{name.repo} is not in the hub's cache on this machine, and HF_HUB_OFFLINE is set"
    write_failure = _explain_write_failure(error, name) if isinstance(error, OSError) else None
    if write_failure is not None:
        return write_failure
    return None


def _explain_hub_refusal(error: Exception, repo: str, revision: str | None) -> str | None:
    from huggingface_hub import errors, get_token

    token = get_token()
    if isinstance(error, errors.GatedRepoError):
        page = f"{_hub_endpoint()}/{repo}"
        if token is None:
            return f"{repo} is gated: accept its terms at {page}, and set HF_TOKEN to a token of that account"
        return f"{repo} is gated, and the account of HF_TOKEN has no access to it: request access at {page}"
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return _not_found_message(repo, private=token is None)
    if isinstance(error, errors.RevisionNotFoundError):
        return f"revision: {repo} has no branch, tag or commit {revision!r}"
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return f"{repo} has no file {str(error.response.url).rpartition('/')[2]}"
    if not isinstance(error, errors.HfHubHTTPError):
        return None
    status = error.response.status_code
    if status == 401 and token is None:  # the hub's answer for private repositories
        return _not_found_message(repo, private=True)
    if status in (401, 403):
        return f"HF_TOKEN: the hub refuses this token for {repo} (status {status})"
    return f"the hub answers {status} for {repo}: try again later"


def _explain_write_failure(error: OSError, name: HubName) -> str | None:
    if error.errno in _NOT_WRITABLE_ERRNOS:
        return (
            f"{name.repo!r} cannot be stored: {error.filename} cannot be written by uid {os.getuid()} "
            f"({(error.strerror or '').lower()}); change its owner, or set HF_HOME to another folder"
        )
    if error.errno in _DISK_FULL_ERRNOS:
        return _disk_full_message(name)
    if "Consistency check" in str(error):
        return f"{name.repo}: the hub sent a file whose size differs from the announced one: try again"
    return None


def _not_found_message(repo: str, *, private: bool) -> str:
    similar_repo = _find_similar_repo(repo)
    suggestion = f"; did you mean {similar_repo}?" if similar_repo else ""
    access_hint = "; if it is private, set HF_TOKEN" if private else ", or HF_TOKEN has no access to it"
    return f"{repo!r} is neither a directory nor found on the hub{access_hint}{suggestion}"


def _find_similar_repo(repo: str) -> str | None:
    from huggingface_hub import HfApi

    owner, _, name = repo.partition("/")
    repo_ids: list[str] = []
    with suppress(Exception):
        for search in (name, owner):
            repo_ids += [each.id for each in HfApi().list_models(search=search, limit=_SEARCH_LIMIT)]
    return next(iter(get_close_matches(repo, repo_ids, 1, 0.75)), None)


def check_disk_space(name: HubName, needed_bytes: int) -> None:
    """Raises ModelError if the cache's disk lacks space."""
    free_bytes = _free_disk_bytes()
    if free_bytes is not None and needed_bytes > free_bytes:
        sizes = f"{needed_bytes / _GIB:.1f} GiB are needed, {free_bytes / _GIB:.1f} GiB are free"
        raise ModelError(f"model: {_disk_full_message(name)} ({sizes})")


def _disk_full_message(name: HubName) -> str:
    from huggingface_hub import constants

    return (
        f"the disk of {constants.HF_HUB_CACHE} is too full for {name.repo}: `quire list` shows what is there, "
        "`quire rm` frees it, HF_HOME selects another folder"
    )


def _free_disk_bytes() -> int | None:
    """Bytes that this user may write to the disk of the hub's cache."""
    from huggingface_hub import constants

    path = Path(constants.HF_HUB_CACHE)
    existing_dir = next((each for each in (path, *path.parents) if each.is_dir()), None)
    if existing_dir is None:
        return None
    disk_stat = os.statvfs(existing_dir)
    return disk_stat.f_bavail * disk_stat.f_frsize


def _hub_endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT
