"""`quire rm`: deletes downloaded models from the hub's cache, and says what that frees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.engine.advice import nearest
from quire.engine.checkpoint.files import hub_model
from quire.engine.checkpoint.names import ANY_GGUF
from quire.engine.errors import ModelError
from quire.engine.gguf.files import PACKAGED
from quire.server.cli.flags import command
from quire.server.cli.models.downloaded import Downloaded, cached, models, size
from quire.server.cli.unknown_flags import parse_known

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo


def main(argv: Sequence[str], started: float) -> int:
    """Returns the exit status."""
    names = "as `quire list` prints it; OWNER/REPO is all of that repository"
    args = parse_known(command("quire rm", __doc__, {"names": {"nargs": "+", "metavar": "MODEL", "help": names}}), argv)
    for name in args.names:
        print(f"{name}: {size(remove(name))} freed")
    return 0


def remove(name: str) -> int:
    """Delete a model's files, those of all its revisions; the number of bytes that this frees. Raises ModelError."""
    if Path(name).expanduser().exists():
        raise ModelError(f"model: {name} is a path, not a name: only what was downloaded is deleted")
    if name in PACKAGED:
        raise ModelError(f"model: {name} is in a package: pip uninstall {PACKAGED[name][2].partition('==')[0]}")
    wanted, cache = hub_model(name), cached()
    there = [] if cache is None else [each for each in models(cache) if each.repo.lower() == wanted.repo.lower()]
    chosen = there
    if wanted.file is not None:
        chosen = [each for each in there if wanted.file in each.files]
    elif wanted.tag == ANY_GGUF:
        chosen = [each for each in there if each.gguf]
    elif wanted.tag is not None:
        chosen = [each for each in there if each.name.lower() == f"{wanted.repo}:{wanted.tag}".lower()]
    if cache is None or not chosen:
        every = [] if cache is None else [each.name for each in models(cache)]
        advice = nearest(name, every) or "`quire list` shows what is"
        raise ModelError(f"model: {name} is not downloaded; {advice}")
    return _delete(cache, chosen, whole=len(chosen) == len(there))


def _delete(cache: HFCacheInfo, chosen: Sequence[Downloaded], *, whole: bool) -> int:
    if whole:
        commits = {
            revision.commit_hash
            for repo in cache.repos
            if repo.repo_type == "model" and repo.repo_id == chosen[0].repo
            for revision in repo.revisions
        }
        strategy = cache.delete_revisions(*commits)
    else:
        strategy = cache.delete_files(*(file for each in chosen for file in each.files.values()))
    strategy.execute()
    return strategy.expected_freed_size
