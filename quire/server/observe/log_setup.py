from __future__ import annotations

import json
import logging
import sys
import time

from quire.server.config import ServerConfig

EXTRA_FIELDS = ("request_id", "answer_id", "tenant", "method", "path", "status", "milliseconds")


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({name: getattr(record, name) for name in EXTRA_FIELDS if getattr(record, name, None) is not None})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


_HTTP_CLIENT_LOGGERS = ("httpx", "httpx2")


def set_up_logging(config: ServerConfig) -> None:
    """What a failing engine writes to stderr keeps its own format."""
    handler = logging.StreamHandler(sys.stderr)
    if config.log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    if config.log_level == "info":
        for name in _HTTP_CLIENT_LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)
