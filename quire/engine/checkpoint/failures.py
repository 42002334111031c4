"""Why the hub did not give a model, in one line each: no such name, gated, private, offline, no answer, a full disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from quire.engine.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from quire.engine.checkpoint.names import HubName

_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_GIB = 2**30
_SEARCHED = 20


@contextmanager
def told_apart(name: HubName, revision: str | None) -> Iterator[None]:
    """Turns what the hub's client raises into a ModelError."""
    # What it raises where no connection comes about is its HTTP library's, which it imports under this name.
    from huggingface_hub.errors import HTTPError

    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, HTTPError) as error:
        raise ModelError(f"model: {_explained(error, name, revision)}") from error
    except RuntimeError as error:  # hf_xet's
        if "No space left" in str(error):
            raise ModelError(f"model: {_full(name)}") from error
        first = next(iter(str(error).splitlines()), "")
        raise ModelError(f"model: {name.repo} cannot be downloaded: {first[:200]}") from error


def _explained(error: Exception, name: HubName, revision: str | None) -> str:
    from huggingface_hub import errors, is_offline_mode

    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else None
    shown = cause if isinstance(cause, errors.HfHubHTTPError) else error
    refusal = _explained_refusal(shown, name.repo, revision)
    if refusal is not None:
        return refusal
    if is_offline_mode():
        return f"{name.repo} is not in the hub's cache on this machine, and HF_HUB_OFFLINE is set"
    write_failure = _explained_write_failure(error, name) if isinstance(error, OSError) else None
    if write_failure is not None:
        return write_failure
    return (
        f"{name.repo!r} is not a directory, and the hub cannot be reached at {_endpoint()} to download it: give the "
        "path of a copy (for quire plan a config.json will do)"
    )


def _explained_refusal(error: Exception, repo: str, revision: str | None) -> str | None:
    """Why the hub, or its client for it, refused; None if this is no answer of theirs."""
    from huggingface_hub import errors, get_token

    token = get_token()
    if isinstance(error, errors.GatedRepoError):
        page = f"{_endpoint()}/{repo}"
        if token is None:
            return f"{repo} is gated: accept its terms at {page}, and set HF_TOKEN to a token of that account"
        return f"{repo} is gated, and the account of HF_TOKEN may not read it: ask for that at {page}"
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return _not_found(repo, private=token is None)
    if isinstance(error, errors.RevisionNotFoundError):
        return f"revision: {repo} has no branch, tag or commit {revision!r}"
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return f"{repo} has no file {str(error.response.url).rpartition('/')[2]}"
    if not isinstance(error, errors.HfHubHTTPError):
        return None
    status = error.response.status_code
    if status == 401 and token is None:  # so the hub answers who may not know whether there is such a model
        return _not_found(repo, private=True)
    if status in (401, 403):
        return f"HF_TOKEN: the hub refuses this token for {repo} (status {status})"
    return f"the hub answers {status} for {repo}: try again later"


def _explained_write_failure(error: OSError, name: HubName) -> str | None:
    """Why a file could not be stored; None if another operation failed."""
    if error.errno in _NOT_WRITABLE:
        return (
            f"{name.repo!r} cannot be stored: {error.filename} cannot be written by uid {os.getuid()} "
            f"({(error.strerror or '').lower()}); make it this user's, or let HF_HOME name another folder"
        )
    if error.errno in _FULL:
        return _full(name)
    if "Consistency check" in str(error):
        return f"{name.repo}: the hub sent a file of another size than it said: try again"
    return None


def _not_found(repo: str, *, private: bool) -> str:
    near = _near(repo)
    more = f"; did you mean {near}?" if near else ""
    closed = "; if it is private, HF_TOKEN opens it" if private else ", or HF_TOKEN may not see it"
    return f"{repo!r} is neither a directory nor found on the hub{closed}{more}"


def _near(repo: str) -> str | None:
    """A model of the hub with nearly this name."""
    from huggingface_hub import HfApi

    owner, _, name = repo.partition("/")
    found: list[str] = []
    with suppress(Exception):  # a hint alone
        for search in (name, owner):
            found += [each.id for each in HfApi().list_models(search=search, limit=_SEARCHED)]
    return next(iter(get_close_matches(repo, found, 1, 0.75)), None)


def check_room(name: HubName, needed: int) -> None:
    """Raise ModelError where the disk of the hub's cache has not so many bytes free."""
    free = _free()
    if free is not None and needed > free:
        raise ModelError(f"model: {_full(name)} ({needed / _GIB:.1f} GiB are needed, {free / _GIB:.1f} GiB are free)")


def _full(name: HubName) -> str:
    from huggingface_hub import constants

    return (
        f"the disk of {constants.HF_HUB_CACHE} is too full for {name.repo}: `quire list` shows what is there, "
        "`quire rm` frees it, HF_HOME names another folder"
    )


def _free() -> int | None:
    """Bytes for this user on the disk of the hub's cache."""
    from huggingface_hub import constants

    path = Path(constants.HF_HUB_CACHE)
    there = next((each for each in (path, *path.parents) if each.is_dir()), None)
    if there is None:
        return None
    disk = os.statvfs(there)
    return disk.f_bavail * disk.f_frsize


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT
