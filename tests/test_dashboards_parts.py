"""Filters, words, freshness and the cache behind the pages; no browser."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

from dashboards import bottlenecks_parts, filters, fleet_parts, foresight, words
from dashboards.app import create_app
from dashboards.hints_reading import HintList, HintsReader
from dashboards.markup import markup
from dashboards.reading import Cache, attempt, reason
from dashboards.risk_table import risk_table
from features.fleet import Loss
from tests import dashboard_world as world

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


def text_of(component) -> str:
    """All the text of a component, in order."""
    if component is None:
        return ""
    if isinstance(component, str | int | float):
        return str(component)
    if isinstance(component, list | tuple):
        return "".join(text_of(part) for part in component)
    return text_of(getattr(component, "children", None))


# --- filters ------------------------------------------------------------------------------------------------------

CHECKS = {"cluster": filters.one_of(["sim", "b"]), "min_probability": filters.probability, "node": filters.name}


def test_filters_come_from_the_address_and_go_back_into_it():
    asked = filters.read("?cluster=sim&min_probability=0.7&node=n%201", CHECKS)
    assert asked.values == {"cluster": "sim", "min_probability": "0.7", "node": "n 1"}
    assert asked.problems == ()
    assert asked.number("min_probability", 0) == 0.7
    assert filters.read(asked.search(), CHECKS) == asked
    assert asked.search(node=None, cluster="b") == "?cluster=b&min_probability=0.7"
    assert filters.read("", CHECKS).search() == ""


@pytest.mark.parametrize(
    ("search", "words_"),
    [
        ("?cluster=other", "choose one of: sim, b"),
        ("?min_probability=2", "number from 0 to 1"),
        ("?min_probability=nan", "number from 0 to 1"),
        ("?min_probability=x", "number from 0 to 1"),
        ("?node=" + "n" * 300, "at most 253"),
        ("?node=%00", "at most 253"),
        ("?colour=red", "it has: cluster, min_probability, node"),
        ("?" + "&".join(f"a{i}=1" for i in range(60)), "too many parameters"),
    ],
)
def test_a_wrong_filter_is_left_out_and_named(search, words_):
    asked = filters.read(search, CHECKS)
    assert asked.values == {}
    assert words_ in asked.problems[0]


# --- words --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.613, 0, "61 %"), (0.613, 1, "61.3 %"), (0.0, 0, "0 %"), (1.0, 1, "100.0 %"), (0.0001, 1, "<0.1 %"),
        (0.9999, 0, ">99 %"), (None, 0, "–"), (float("nan"), 0, "–"),
    ],
)  # fmt: skip
def test_percent(value, digits, text):
    assert words.percent(value, digits) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (45.4, "45 s"), (119, "119 s"), (120, "2 min"), (754, "12 min"), (150, "2 min 30 s"),
        (3600, "1 h"), (7300, "2 h 1 min"), (200_000, "2 d 7 h"), (-3, "0 s"), (None, "–"),
    ],
)  # fmt: skip
def test_duration(seconds, text):
    assert words.duration(seconds) == text


def test_the_browser_words_durations_as_the_server_does(chromium):
    """`assets/weatherglass.js` carries ages on; its words must not jump when the server's arrive."""
    from pathlib import Path

    import dashboards

    script = (Path(dashboards.__file__).parent / "assets" / "weatherglass.js").read_text()
    start = script.index("function duration(")
    function = script[start : script.index("\n  }\n", start) + 4]
    seconds = [0, 1, 59, 60, 119, 120, 121, 599, 600, 601, 3599, 3600, 3661, 7300, 86_399, 86_400, 90_000, 200_000]
    found = chromium.execute_script(f"{function}; return arguments[0].map((s) => duration(1000 * s));", seconds)
    assert found == [words.duration(value) for value in seconds]


def test_gpus_and_names():
    assert words.gpus(1) == "1 GPU"
    assert words.gpus(12.34) == "12.3 GPUs"
    assert words.gpus(12_345.6) == "12,346 GPUs"
    assert words.names(["a", "b", "c"], 2) == "a, b and 1 more"
    assert words.sentence("no fresh hints") == "No fresh hints."
    assert words.sentence("http://x refused") == "http://x refused."


# --- losses in words ----------------------------------------------------------------------------------------------


def test_losses_in_words():
    idle = Loss(
        "unproductive", "sim", 12, since=NOW - timedelta(minutes=30), job_id="123", user="ada", job_gpus=16,
        nodes=("n3", "n4"),
    )  # fmt: skip
    what, why = fleet_parts.loss_text(idle, NOW, several=False)
    assert what == "12 GPUs allocated but idle for 30 min in job 123 (ada)"
    assert why == "n3, n4; of the job's 16 GPUs; 6 GPU-hours so far"
    bound = Loss("unproductive", "sim", 8, NOW - timedelta(hours=6, minutes=2), True, "9", None, 8, ("n1",))
    what, why = fleet_parts.loss_text(bound, NOW, several=True)
    assert what == "8 GPUs allocated but idle for over 6 h in job 9"
    assert why.startswith("sim: n1; the whole job does nothing")
    free = Loss("idle", "sim", 40, waiting_jobs=1, waiting_gpus=64, free_nodes=1)
    assert fleet_parts.loss_text(free, NOW, several=False)[0] == "40 GPUs free while 1 job waits for 64 GPUs"
    assert fleet_parts.loss_text(Loss("idle", "sim", 40), NOW, several=False)[1].endswith("no job waits")
    out = Loss("out", "sim", 8, nodes=("n5",), state="drained: bad NVLink")
    assert fleet_parts.loss_text(out, NOW, several=False) == ("8 GPUs down or drained", "n5 — drained: bad NVLink")


# --- foresight ----------------------------------------------------------------------------------------------------


def test_the_most_urgent_comes_first():
    items = [
        world.bottleneck(1, in_s=90), world.bottleneck(2, in_s=20), world.bottleneck(3, in_s=50),
        {**world.bottleneck(4), "expected_onset": None}, world.bottleneck(5, is_active=True),
    ]  # fmt: skip
    found = foresight.select(items)
    assert [item["id"] for item in found.coming] == ["b2", "b3", "b1", "b4"]
    assert [item["id"] for item in found.active] == ["b5"]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, {"b1", "b2", "b3"}),
        ({"bottleneck_class": "nvlink_saturation"}, {"b2"}),
        ({"node": "n9"}, {"b3"}),
        ({"rack": "r7"}, {"b2"}),
        ({"min_probability": 0.9}, {"b1", "b3"}),
        ({"min_probability": 0.6, "horizon_s": 60}, {"b1", "b3"}),
        ({"min_probability": 0.6, "horizon_s": 30}, set()),
    ],
)
def test_filters_of_bottlenecks(asked, expected):
    low = {"30": 0.1, "60": 0.2, "90": 0.5, "120": 0.7}
    items = [
        world.bottleneck(1),
        world.bottleneck(2, bottleneck_class="nvlink_saturation", rack="r7", probabilities=low),
        world.bottleneck(3, node="n9"),
    ]
    assert {item["id"] for item in foresight.select(items, **asked).coming} == expected


def test_a_small_probability_never_hides_what_is_there_already():
    found = foresight.select([world.bottleneck(1, is_active=True, probabilities={})], min_probability=0.99)
    assert len(found.active) == 1


def test_classes_are_counted():
    items = [
        world.bottleneck(1), world.bottleneck(2, is_active=True),
        world.bottleneck(3, bottleneck_class="memory_exhaustion", probabilities={"120": 0.99}),
    ]  # fmt: skip
    assert foresight.by_class(foresight.select(items)) == [
        ("memory_exhaustion", 1, 0, 0.99),
        ("thermal_throttle", 1, 1, 0.91),
    ]


# --- hints: freshness ---------------------------------------------------------------------------------------------


def test_an_expired_hint_is_never_handed_on():
    clock = [100.0]
    hints = world.FakeHints()
    hints.bottlenecks = [world.bottleneck(1)]
    reader = HintsReader(hints, clock_s=lambda: clock[0])
    fresh = reader.list("bottlenecks", None, NOW)
    assert fresh.freshness == "fresh"
    assert len(fresh.items) == 1
    assert fresh.expires_at == NOW + timedelta(seconds=26)

    def slow(path, params):
        answer = hints(path, params)
        clock[0] += 27
        return answer

    late = HintsReader(slow, clock_s=lambda: clock[0]).list("bottlenecks", None, NOW)
    assert (late.freshness, list(late.items)) == ("stale", [])
    hints.state = "stale"
    stale = reader.list("bottlenecks", None, NOW + timedelta(seconds=27))
    assert (stale.freshness, list(stale.items), list(stale.stale_clusters)) == ("stale", [], ["sim"])
    assert stale.last_expired_at == NOW + timedelta(seconds=26)


def test_an_api_that_is_down_is_told_apart_from_a_stale_one():
    hints = world.FakeHints()
    hints.state = "down"
    reader = HintsReader(hints)
    found = reader.list("bottlenecks", None, NOW)
    assert found.freshness == "down"
    assert "refused the connection" in found.message
    assert not found.is_valid


@pytest.mark.parametrize("answer", [None, [], "text", {"error": "no dict"}, {}])
def test_nonsense_from_the_api_is_not_valid(answer):
    found = HintsReader(lambda path, params: answer).list("bottlenecks", None, NOW)
    assert not found.is_valid
    assert list(found.items) == []


def test_stale_hints_say_how_old_they_are():
    hints = world.FakeHints()
    hints.state = "stale"
    reader = HintsReader(hints)
    made = bottlenecks_parts.stale_notice(reader.list("bottlenecks", None, NOW), reader.status(), NOW)
    assert "Hints are 40 s old, expired 10 s ago: nothing is shown as valid" in text_of(made)


@pytest.mark.parametrize(
    ("horizon_s", "expected"),
    [
        (25.0, "every horizon is offered"),
        (41.0, "horizons of 60 s and more are offered"),
        (130.0, "shown for people only"),
        (None, "not known yet"),
    ],
)
def test_note_on_the_actionable_horizon(horizon_s, expected):
    assert expected in bottlenecks_parts.horizon_note(HintList("fresh", actionable_horizon_s=horizon_s))


# --- cache --------------------------------------------------------------------------------------------------------


def test_one_thread_reads_while_others_wait():
    cache, calls, gate = Cache(), [], threading.Event()

    def make():
        calls.append(1)
        gate.wait(5)
        return len(calls)

    found = []
    threads = [threading.Thread(target=lambda: found.append(cache.get("k", 60, make))) for _ in range(8)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(5)
    assert found == [1] * 8


def test_a_slow_value_is_handed_out_once_more_while_the_next_is_made():
    clock, calls, done = [0.0], [], threading.Event()
    cache = Cache(lambda: clock[0])

    def make():
        calls.append(1)
        if len(calls) == 2:
            done.set()
        return len(calls)

    assert cache.get("k", 5, make, stale_s=60) == 1
    clock[0] = 4.0
    assert cache.get("k", 5, make, stale_s=60) == 1
    clock[0] = 20.0
    assert cache.get("k", 5, make, stale_s=60) == 1
    assert done.wait(5)
    for thread in threading.enumerate():
        if thread.name == "reading":
            thread.join(5)
    assert cache.get("k", 5, make, stale_s=60) == 2
    clock[0] = 100.0
    assert cache.get("k", 5, make, stale_s=60) == 3, "too old to be handed out at all"


def test_a_failure_becomes_a_sentence():
    assert attempt("x", lambda: 1 // 0).error == "integer division or modulo by zero"
    assert reason(RuntimeError()) == "RuntimeError"
    assert reason(ValueError("a\nb")) == "a"
    assert len(reason(ValueError("x" * 999))) == 300


# --- markup -------------------------------------------------------------------------------------------------------


def test_markup_escapes_everything():
    from dash import dcc, html

    made = html.Div(
        ["<b>", html.Span(3, title='"x" & y', hidden=True, className="a b"), None, [html.Br(), 1.5]],
        id="i", style={"maxWidth": "3px", "--height": "1px"}, key="k", tabIndex="0", **{"data-x": "<"},
    )  # fmt: skip
    assert markup(made) == (
        '<div id="i" data-key="k" style="max-width:3px;--height:1px" tabindex="0" data-x="&lt;">&lt;b&gt;'
        '<span class="a b" hidden title="&quot;x&quot; &amp; y">3</span><br>1.5</div>'
    )
    assert markup(None) == ""
    with pytest.raises(TypeError, match="cannot be written as HTML"):
        markup(html.Div(dcc.Link("x", href="/")))
    with pytest.raises(TypeError, match="attribute title is a dict"):
        markup(html.Div(title={}))


def test_names_from_outside_are_text_on_the_page():
    nasty = "<script>alert(1)</script>"
    item = world.bottleneck(1, node=nasty, rack=nasty, job_ids=[nasty], reasons=[nasty], model_version=nasty)
    foreseen = foresight.select([item])
    hints = HintList("fresh", items=[item])
    made = bottlenecks_parts.foreseen_table(foreseen, hints, {}, filters.Filters(), NOW, several=True)
    assert "<script" not in markup(made)
    assert markup(made).count("&lt;script&gt;") >= 5


def test_a_merged_hint_names_its_place_its_cause_and_who_has_to_know_and_stands_on_all_its_nodes():
    cause = {"kind": "rack", "id": "<r1>", "share_explained": 1.0, "share_affected": 0.9, "evidence": "hot aisle <r1>"}
    other = {**cause, "kind": "job", "id": "4711"}
    wide = {"node": None, "gpu_uuid": None, "members": 27, "nodes": ["n4", "n5"]}
    items = [
        world.bottleneck(
            1, **wide, scope="rack", rack="<r1>", severity="page", causes=[cause, other], advice="Cool it."
        ),
        world.bottleneck(2, **wide, scope="job", rack=None, bottleneck_class="nvlink_saturation", causes=[other]),
        world.bottleneck(3, node="n9", severity="info"),
    ]
    foreseen = foresight.select(items)
    made = markup(
        bottlenecks_parts.foreseen_table(foreseen, HintList("fresh"), {}, filters.Filters(), NOW, several=False)
    )
    text = text_of(
        bottlenecks_parts.foreseen_table(foreseen, HintList("fresh"), {}, filters.Filters(), NOW, several=False)
    )
    assert "27 GPUs on 2 nodes" in text
    assert "likely hot aisle <r1> (or: job)" in text
    assert "job 4711" in text
    assert made.count("badge bad") == 1
    assert 'title="Cool it."' in made
    assert "<r1>" not in made
    assert [item["id"] for item in foresight.select(items, node="n5").coming] == ["b1", "b2"]
    nodes = pl.DataFrame(
        {
            "cluster": ["sim"] * 3,
            "node": ["n4", "n5", "n9"],
            "rack": ["r1"] * 3,
            "pod": ["p1"] * 3,
            "state": ["IDLE"] * 3,
        }
    )
    values = foresight.bottleneck_values(nodes, foreseen, 120).sort("node")
    assert values.select("node", "value", "foreseen").rows() == [("n4", 0.91, 2), ("n5", 0.91, 2), ("n9", 0.91, 1)]


def test_equal_climatologies_are_one_sentence_and_a_risky_node_is_a_table():
    rate = {"is_climatology": True, "model_version": "baseline:climatology"}
    calm = [world.risk(f"n{i}", 0.004, reasons=[], **rate) for i in range(16)]
    made = risk_table(HintList("fresh", items=calm), filters.Filters(), NOW, several=False)
    assert "No node stands out" in text_of(made)
    assert "16 nodes: 0.4 % within 24 h" in text_of(made)
    risky = [*calm, world.risk("n99", 0.3)]
    made = risk_table(HintList("fresh", items=risky), filters.Filters(), NOW, several=False)
    assert "<table" in markup(made)
    assert markup(made).index("n99") < markup(made).index("n0")
    assert "lemon" not in markup(made)
    gpu = {"gpu_uuid": "GPU-5d4c9a1e-0000", "p_24h": 0.2, "reasons": ["2 × XID 63 in 28 d"]}
    risky[-1] |= {"lemon_score": 0.5, "gpus": [gpu]}
    told = markup(risk_table(HintList("fresh", items=risky), filters.Filters(), NOW, several=False))
    assert all(word in told for word in ("lemon", "GPU-5d4c9a1e", "2 × XID 63 in 28 d"))


def test_what_is_known_of_a_node_is_told_before_a_model_weighs_it():
    rate = {"is_climatology": True, "model_version": "baseline:climatology"}
    calm = [world.risk(f"n{i}", 0.118, reasons=[], **rate) for i in range(16)]
    calm[7] |= {"reasons": ["2 faults in 28 d, fleet median 0"]}
    of_gpu = "2 of them on GPU GPU-056ecf9a-6096-210f-f695-90e0f04f619a"
    calm[9] |= {"reasons": ["31 faults in 28 d, fleet median 0", of_gpu], "lemon_score": 0.5}
    made = risk_table(HintList("fresh", items=calm), filters.Filters(), NOW, several=False)
    assert "No node stands out" not in text_of(made)
    assert "nothing is known" not in markup(made)
    told = [text_of(made).index(word) for word in ("31 faults in 28 d", "2 faults in 28 d, fleet", "n0")]
    assert told == sorted(told)  # all are as likely by that rate: lemons stand first, then what has reasons
    assert "lemon" in text_of(made)
    assert "2 of them on GPU-056ecf9a " in text_of(made)  # the whole one is its title
    assert of_gpu in markup(made)


# --- the application without a browser ----------------------------------------------------------------------------


def test_nothing_names_another_host_and_the_policy_forbids_it():
    app = create_app(world.FakeHints(), world.query_of(None), clusters=["sim"], refresh_s=5)
    client = app.server.test_client()
    page = client.get("/")
    html = page.get_data(as_text=True)
    assert "http://" not in html.replace("http://www.w3.org", "")
    assert "https://" not in html
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "http" not in policy
    assert "unsafe-eval" not in policy
    layout = json.dumps(client.get("/_dash-layout").get_json())
    assert "http" not in layout
    assert '"plotlyServerURL": ""' in layout
    assert client.get("/_mcp").status_code == 404 or b"react-entry-point" in client.get("/_mcp").data


def test_refresh_must_be_positive():
    with pytest.raises(ValueError, match="refresh_s is 0"):
        create_app(world.FakeHints(), world.query_of(None), clusters=[], refresh_s=0)


def test_csv_of_bottlenecks_follows_the_filters_and_is_no_formula():
    hints = world.FakeHints()
    hints.bottlenecks = [
        world.bottleneck(1, reasons=["=cmd()"]), world.bottleneck(2, bottleneck_class="nvlink_saturation"),
    ]  # fmt: skip
    client = create_app(hints, world.query_of(None), clusters=["sim"], refresh_s=5).server.test_client()
    answer = client.get("/export/bottlenecks.csv?class=thermal_throttle")
    lines = answer.get_data(as_text=True).splitlines()
    assert answer.mimetype == "text/csv"
    assert len(lines) == 2
    assert lines[0].startswith("cluster,bottleneck_class,scope,node")
    assert "'=cmd()" in lines[1]
    wrong = client.get("/export/bottlenecks.csv?class=heat")
    assert wrong.status_code == 400
    assert ", ".join(words.CLASS_WORDS) in wrong.get_data(as_text=True)
    hints.risks = [world.risk("n1", 0.01), world.risk("n2", 0.3)]
    risks = client.get("/export/node-risks.csv").get_data(as_text=True).splitlines()
    assert [line.split(",")[1] for line in risks[1:]] == ["n2", "n1"]


def test_csv_is_refused_when_there_is_nothing_valid():
    hints = world.FakeHints()
    hints.state = "stale"
    client = create_app(hints, world.query_of(None, lambda: True), clusters=["sim"], refresh_s=5).server.test_client()
    assert client.get("/export/bottlenecks.csv").status_code == 503
    assert client.get("/export/fleet.csv").status_code == 503
    assert b"disk I/O error" in client.get("/export/fleet.csv").data
