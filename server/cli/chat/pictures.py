"""Pictures that `quire chat` sends: a file as a data: URL."""

from __future__ import annotations

import base64
from pathlib import Path

from quire.engine.errors import ConfigError


def data_url(name: str) -> str:
    """Of the file `name`, as people type it or drop it on a terminal: in quotes, or with backslashes before spaces.
    Raises ConfigError for one that cannot be read, and InvalidRequest for one that the server would not read."""
    from quire.engine.images.decode import MOST_BYTES, opened  # imported only when needed: pictures are rare

    quoted = len(name) > 1 and name[0] == name[-1] and name[0] in "'\""
    path = Path(name[1:-1] if quoted else name.replace("\\ ", " ")).expanduser()
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    kind = opened(content, str(path)).format or ""
    return f"data:image/{kind.lower()};base64,{base64.b64encode(content).decode()}"
