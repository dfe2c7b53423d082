"""The application: its frame, navigation, refresh, theme and security headers. Pages stand in `*_page.py`.

Nothing here loads anything from another host, at start or in the browser: scripts and styles are served from this
process, and the content security policy forbids every other origin.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

import dash
import flask
from dash import ClientsideFunction, Input, Output, State, dcc, html

from dashboards import bottlenecks_page, export, fleet_page
from dashboards.components import attributes, soft_link
from dashboards.fleet_reading import FleetReader
from dashboards.hints_reading import HintsReader
from dashboards.page import Context, Page, utc_now
from dashboards.reading import Cache, Hints, Query
from dashboards.theme import css_variables

PAGES: tuple[Page, ...] = (fleet_page.PAGE, bottlenecks_page.PAGE)

_ASSETS = Path(str(resources.files("dashboards") / "assets"))

# Runs before anything is painted, so that a chosen theme does not flash in from the other one.
_THEME_SCRIPT = (
    "try{var t=localStorage.getItem('weatherglass-theme');"
    "if(t==='light'||t==='dark')document.documentElement.setAttribute('data-theme',t)}catch(e){}"
)

_INDEX = """<!DOCTYPE html>
<html lang="en">
<head>
{%metas%}
<title>{%title%}</title>
<link rel="icon" type="image/svg+xml" href="ICON">
<script>THEME_SCRIPT</script>
<style>VARIABLES</style>
{%css%}
</head>
<body data-refresh-s="REFRESH_S" data-lost-s="LOST_S" data-pages="PAGES">
<noscript>The dashboards need JavaScript. The same facts are in the hints API, as JSON.</noscript>
{%app_entry%}
<footer>{%config%}{%scripts%}{%renderer%}</footer>
</body>
</html>"""


def create_app(
    hints: Hints,
    query: Query,
    *,
    clusters: Sequence[str],
    refresh_s: float,
    clock: Callable[[], datetime] = utc_now,
) -> dash.Dash:
    """Make the dashboards.

    Args:
        hints: `hints(path, params)` gives the parsed JSON of the hints API; raises with `.code` and `.message` on an
            error; gives the error's dict on 503.
        query: `query(sql, params)` reads the store; tables by bare name, parameters bound.
        clusters: Names of the clusters, in the order shown.
        refresh_s: Pages ask this often, s.
        clock: Present time, UTC.

    Returns:
        The application; `app.server` is the WSGI application to serve.

    Raises:
        ValueError: `refresh_s` is not positive.
    """
    if refresh_s <= 0:
        raise ValueError(f"refresh_s is {refresh_s!r}; give a number of seconds above 0")
    context = Context(tuple(clusters), refresh_s, HintsReader(hints), FleetReader(query), Cache(), clock)
    variables = css_variables()
    app = dash.Dash(
        __name__,
        title="Weatherglass",
        update_title="",  # no flicker in the tab at each refresh
        assets_folder=str(_ASSETS),
        serve_locally=True,
        suppress_callback_exceptions=True,
        compress=False,
        add_log_handler=False,
        enable_mcp=False,
        use_pages=False,
        meta_tags=[
            {"name": "viewport", "content": "width=device-width, initial-scale=1"},
            {"name": "description", "content": "Forecasts and state of a GPU training cluster"},
        ],
        index_string=_INDEX.replace("THEME_SCRIPT", _THEME_SCRIPT)
        .replace("VARIABLES", variables)
        .replace("REFRESH_S", f"{refresh_s:g}")
        .replace("LOST_S", f"{max(15.0, 3 * refresh_s):g}")
        .replace("PAGES", " ".join(f"{page.name}={page.path}" for page in PAGES))
        .replace("ICON", "/assets/glass.svg"),
    )
    app.layout = _layout(context)
    _add_frame_callbacks(app)
    for page in PAGES:
        page.register(app, context)
    export.register(app.server, context)
    _prefetch_on_arrival(app, context)
    _add_security_headers(app)
    return app


def _layout(context: Context) -> html.Div:
    return html.Div(
        [
            dcc.Location(id="url", refresh=False),
            dcc.Interval(id="tick", interval=round(context.refresh_s * 1000)),
            dcc.Store(id="theme"),
            *[dcc.Store(id=f"pulse-{page.name}") for page in PAGES],
            *[dcc.Store(id=f"{store}{end}") for page in PAGES for store in page.stores for end in ("", "-seen")],
            html.A("Skip to content", href="#main", className="skip"),
            html.Header(
                [
                    html.A(
                        [html.Span(className="brand-glass", **attributes(aria_hidden="true")), "Weatherglass"],
                        href=PAGES[0].path,
                        className="brand",
                        **attributes(data_soft=""),
                    ),
                    html.Nav(
                        [soft_link(page.question, page.path, class_="nav-link") for page in PAGES],
                        **attributes(aria_label="Pages"),
                    ),
                    html.Div(
                        [
                            html.Span("Connecting…", id="link-state", className="link-state", role="status"),
                            html.Span("", id="utc-clock", className="num", title="Present time; every time is in UTC"),
                            html.Button("Pause", id="pause", type="button", title="Stop refreshing this page"),
                            html.Button("Theme", id="theme-toggle", type="button"),
                        ],
                        className="tools",
                    ),
                ],
                className="top",
            ),
            html.Div(id="link-lost", className="link-lost", role="alert", hidden=True),
            html.Main(
                [
                    *[html.Div(page.layout(), id=f"page-{page.name}", className="page", hidden=True) for page in PAGES],
                    html.Div(_not_found(), id="page-none", className="page", hidden=True),
                ],
                id="main",
                tabIndex="-1",
            ),
        ],
        id="frame",
    )  # fmt: skip


def _not_found() -> list[Any]:
    return [
        html.H1("No such page"),
        html.P("The address names no page. There are:"),
        html.Ul([html.Li(soft_link(page.question, page.path)) for page in PAGES]),
    ]


def _add_frame_callbacks(app: dash.Dash) -> None:
    names = [page.name for page in PAGES]
    app.clientside_callback(
        ClientsideFunction("weatherglass", "showPage"),
        *[Output(f"page-{name}", "hidden") for name in (*names, "none")],
        Input("url", "pathname"),
    )
    app.clientside_callback(
        ClientsideFunction("weatherglass", "pulse"),
        *[Output(f"pulse-{name}", "data") for name in names],
        Input("tick", "n_intervals"),
        Input("url", "pathname"),
        Input("url", "search"),
        Input("theme", "data"),
    )
    for page in PAGES:
        for store in page.stores:
            app.clientside_callback(
                ClientsideFunction("weatherglass", "refresh"), Output(f"{store}-seen", "data"), Input(store, "data")
            )
    app.clientside_callback(
        ClientsideFunction("weatherglass", "nodeOf"),
        Output("url", "search"),
        Input("bottlenecks-map", "clickData"),
        State("bottlenecks-map", "figure"),
        prevent_initial_call=True,
    )


def _prefetch_on_arrival(app: dash.Dash, context: Context) -> None:
    pages = {page.path: page for page in PAGES}

    @app.server.before_request
    def prefetch() -> None:
        page = pages.get(flask.request.path)
        if page is not None and flask.request.method == "GET":
            page.prefetch(context, flask.request.query_string.decode("utf-8", "replace"))


def _add_security_headers(app: dash.Dash) -> None:
    digest = base64.b64encode(hashlib.sha256(_THEME_SCRIPT.encode()).digest()).decode()
    scripts = " ".join([f"'sha256-{digest}'", *app.csp_hashes()])
    policy = (
        f"default-src 'self'; script-src 'self' {scripts}; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self'; connect-src 'self'; object-src 'none'; base-uri 'self'; "
        "form-action 'self'; frame-ancestors 'self'"
    )

    @app.server.after_request
    def secure(response: flask.Response) -> flask.Response:
        response.headers.setdefault("Content-Security-Policy", policy)
        response.headers.setdefault("X-Content-Type-Options", "nosniff")
        response.headers.setdefault("Referrer-Policy", "same-origin")
        return response
