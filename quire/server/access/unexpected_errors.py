from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.encoding import escape_log_text
from quire.server.error_responses import SERVER_ERROR_TYPE, UNEXPECTED_MESSAGE, ErrorInfo, error_response

logger = logging.getLogger("quire.server")


class UnexpectedErrorMiddleware:
    """Starlette's handler runs outside all middleware, so its answer would lack CORS headers, and pages of other
    origins could not read it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        has_started = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception as error:
            if has_started:
                raise
            record = scope.get("request_record")
            extra = {"request_id": None if record is None else record.request_id}
            logger.error("%s %s failed", scope["method"], escape_log_text(scope["path"]), exc_info=error, extra=extra)
            info = ErrorInfo(500, UNEXPECTED_MESSAGE, SERVER_ERROR_TYPE, None, "internal_error")
            await error_response(scope["path"], info)(scope, receive, send)
