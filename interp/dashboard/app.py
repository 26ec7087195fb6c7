"""The Dash app: page, callbacks, and headers that keep the browser from loading anything from elsewhere."""

from pathlib import Path
from typing import Any

from dash import Dash
from flask import Response

from interp.dashboard import callbacks, map_callbacks, training_callbacks, view_callbacks
from interp.dashboard.desk import Desk
from interp.dashboard.incoming import refuse_malformed
from interp.dashboard.layout import page, page_without_model
from interp.dashboard.messages import attempt

# Longest request: a prompt of the longest text, and room.
MOST_REQUEST_BYTES = 4 << 20
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def make_app(desk: Desk) -> Dash:
    """The app of open runs. It keeps no state of a window and serves no file but its own assets."""
    app = Dash(
        "attention-dashboard",
        title="Attention dashboard",
        update_title="",
        assets_folder=str(Path(__file__).parent / "assets"),
        serve_locally=True,
        add_log_handler=False,
        enable_mcp=False,
    )

    def fresh_page() -> Any:
        desk.look_again()
        made, error = attempt(lambda: page(desk))
        return made if error is None else page_without_model(error)

    app.layout = fresh_page
    for part in (callbacks, map_callbacks, view_callbacks, training_callbacks):
        part.register(app, desk)
    refuse_malformed(app)
    app.server.config["MAX_CONTENT_LENGTH"] = MOST_REQUEST_BYTES
    policy = _policy(app)

    @app.server.after_request
    def with_headers(response: Response) -> Response:
        response.headers.update(_HEADERS)
        response.headers["Content-Security-Policy"] = policy
        return response

    return app


def _policy(app: Dash) -> str:
    """Scripts of this server and Dash's own inline ones; nothing from any other host, no frames around it."""
    scripts = " ".join(app.csp_hashes())
    return (
        f"default-src 'none'; script-src 'self' {scripts}; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
