"""The pages in a real browser: they show what they were given, in every state, and talk to nobody else."""

from __future__ import annotations

import contextlib
import time
from datetime import UTC, datetime, timedelta

import pytest
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.keys import Keys

from dashboards import words
from dashboards.app import create_app
from dashboards.fleet_reading import FleetReader
from pipelines.store import Store
from tests import dashboard_world as world

REFRESH_S = 3.0  # a page that asks again before it has its answer never settles on a machine with more to do


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dashboards")
    with Store.open(f"sqlite:{folder}/catalogue.sqlite", str(folder / "data")) as store:
        world.fill(store, datetime.now(UTC), 32, hours=2)
        yield store


class Site:
    """A served application whose hints and store the test sets, and the browser that looks at it.

    All tests share one port, so that the browser keeps the scripts it has compiled; each has an application of its own.
    """

    def __init__(self, driver):
        self.driver = driver
        self.application = None
        self.is_gone = False
        self.served = world.Served(self._serve)

    def _serve(self, environ, start_response):
        if self.is_gone:
            raise ConnectionAbortedError("nobody answers")
        return self.application(environ, start_response)

    def start(self, store, clusters=("sim",), refresh_s=REFRESH_S):
        """A new application on a store, with new hints."""
        self.hints = world.FakeHints(clusters)
        self.is_broken = self.is_gone = False
        query = world.query_of(store, lambda: self.is_broken)
        self.application = create_app(self.hints, query, clusters=clusters, refresh_s=refresh_s).server
        self.driver.get("about:blank")  # a page left open goes on asking its server, which may have ended
        self.errors()
        return self

    def open(self, path: str, ready: str = "!document.querySelector('.page:not([hidden]) .place:empty')"):
        self.driver.get(self.served.url + path)
        self.until(f"!!document.querySelector('.page:not([hidden])') && {ready}")

    def run(self, script: str, *args):
        return self.driver.execute_script(script, *args)

    def until(self, condition: str, timeout_s: float = 60.0):
        """Wait for a condition in JavaScript; fails with what the page shows."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(Exception):
                if self.run(f"return {condition}"):
                    return
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout_s} s: {condition}\n{self.text('body')[:2000]}")
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def rows(self, table: str) -> list[list[str]]:
        """Cells of a table as they can be seen, but for what only narrow screens show."""
        return self.run(
            "return [...document.querySelectorAll(arguments[0] + ' tbody tr')].map((row) =>"
            " [...row.cells].map((cell) => cell.innerText.trim().replace(/\\s+/g, ' ')))",
            f"#{table}",
        )

    def errors(self) -> list[str]:
        """Errors of the browser's console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def hosts(self) -> set[str]:
        """Hosts of everything that the page has loaded, and of everything that it names."""
        return set(
            self.run(
                "const named = [...document.querySelectorAll('[src], [href]')].map((e) => e.src || e.href);"
                "const loaded = performance.getEntriesByType('resource').map((e) => e.name);"
                "return [...named, ...loaded].filter((u) => /^[a-z]+:\\/\\//.test(u)).map((u) => new URL(u).host)"
            )
        )


@pytest.fixture(scope="module")
def browsed(chromium):
    made = Site(chromium)
    yield made
    chromium.get("about:blank")
    made.served.stop()


@pytest.fixture
def site(browsed, store):
    yield browsed.start(store)
    browsed.driver.get("about:blank")


def test_fleet_page_shows_the_number_of_the_store(site, store):
    expected = FleetReader(store.query).now(["sim"], datetime.now(UTC))
    site.hints.jobs = [{"cluster": "sim", "queue": "train", "wait": {"q50_s": 1900}}]
    site.open("/")

    assert site.text("#fleet-goodness") == words.percent(expected.goodness.value, 1)
    assert "141" in site.text(".headline")
    factors = [line for line in site.text(".factors").splitlines() if line.endswith("%")]
    good = expected.goodness
    assert factors == [
        words.percent(part, 1) for part in (good.available, good.allocated, good.productive, good.unthrottled)
    ]
    losses = site.text(".losses")
    assert "64 GPUs free while 3 jobs wait for 208 GPUs" in losses
    assert "16 GPUs allocated but idle for" in losses
    assert "in job 4712 (grace)" in losses
    assert "8 GPUs down or drained" in losses
    assert "n5 — drained: bad NVLink" in losses
    racks = {row[0]: row for row in site.rows("fleet-group-table")}
    assert len(racks) == 8
    assert racks["r7"][2:4] == ["32", "0 %"]
    queues = {row[0]: row[1:] for row in site.rows("fleet-queue-table")}
    assert queues["train"][:4] == ["2", "120", "2", "80"]
    assert queues["train"][5] == "≈ 31 min"
    sources = {row[0]: row[-1] for row in site.rows("fleet-source-table")}
    assert sources["GPU samples in the store"] == "fresh"
    assert sources["Hints: bottlenecks"] == "fresh"
    assert site.run("return document.querySelectorAll('#fleet-trend .barlayer .trace').length") >= 4
    assert site.run("return document.title") == "Is my fleet good? · Weatherglass"
    assert site.hosts() == {site.served.url.removeprefix("http://")}
    assert site.errors() == []


def test_demand_ahead_is_drawn_and_follows_the_address(site):
    site.hints.demand = world.demand(None, 180) + world.demand("train", 140)
    site.open("/", "document.querySelectorAll('#fleet-demand .scatterlayer .trace').length > 3")
    site.until("document.querySelectorAll('#fleet-demand-table tbody tr').length === 2")
    assert site.rows("fleet-demand-table")[0][:3] == ["all queues", "176", "180 (166–194)"]
    assert "of the cluster are in service" in site.text("#fleet-demand-about")
    site.open("/?queue=train", "document.querySelectorAll('#fleet-demand .scatterlayer .trace').length > 3")
    site.until("document.querySelector('#fleet-demand-label').innerText.includes('ahead of train')")
    site.hints.demand = []
    assert site.errors() == []


def test_bottlenecks_page_shows_the_hints_most_urgent_first(site):
    site.hints.bottlenecks = [
        world.bottleneck(1, in_s=80),
        world.bottleneck(2, in_s=30, node="n9", bottleneck_class="nvlink_saturation", action="retry_elsewhere"),
        world.bottleneck(3, node="n12", is_active=True, reasons=["slowdown set for 2 min"]),
    ]
    site.hints.risks = [world.risk("n1", 0.01), world.risk("n2", 0.2)]
    site.open("/bottlenecks")

    summary = site.text("#bottlenecks-summary")
    assert "2 bottlenecks foreseen within 120 s, the first in" in summary
    assert "1 condition active now" in summary
    first, second = site.rows("bottlenecks-table")
    assert first[1:3] == ["NVLink saturation", "n9 GPU 4 r1 · p1"], "the index of the GPU comes from the store"
    assert second[1:3] == ["Thermal throttle", "n3 GPU 4 r1 · p1"]
    assert second[3:] == [
        "4711", "31 %", "62 %", "84 %", "91 %", "Reserve spare nodes",
        "margin 3 °C, closing by 0.06 °C/s; inlet 34 °C",
    ]  # fmt: skip
    assert "in" in first[0]
    assert "baseline: trend" in site.text("#bottlenecks-list")
    assert "A baseline is a rule, not yet a trained model" in site.text("#bottlenecks-list")
    assert site.rows("active-table") == [
        ["Thermal throttle", "n12 GPU 4 r1 · p1", "4711", "Reserve spare nodes", "slowdown set for 2 min"]
    ]
    assert [row[0] for row in site.rows("risk-table")] == ["n2", "n1"]
    assert site.rows("class-table")[0][:4] == ["Thermal throttle", "1", "1", "91 %"]
    assert "41 s to act" in site.text("#bottlenecks-horizon")
    assert "Map of 32 nodes" in site.run("return document.getElementById('bottlenecks-map-label').textContent")
    assert site.run("return document.querySelectorAll('#bottlenecks-map .hm').length") >= 1
    assert site.hosts() == {site.served.url.removeprefix("http://")}
    assert site.errors() == []


def test_a_new_hint_appears_without_a_reload_and_time_goes_on(site):
    site.hints.bottlenecks = [world.bottleneck(1, in_s=80)]
    site.hints.risks = [world.risk(f"n{i}", i / 100) for i in range(1, 13)]
    site.open("/bottlenecks", "document.querySelectorAll('#bottlenecks-map .hm').length > 0")
    site.until("document.documentElement.scrollHeight > innerHeight + 300")
    site.run("window.notReloaded = true; window.scrollTo(0, 200)")
    site.run("document.querySelector('#bottlenecks-table .where').focus({preventScroll: true})")
    before = site.rows("bottlenecks-table")[0][0]
    site.hints.bottlenecks = [world.bottleneck(2, in_s=20, node="n9"), *site.hints.bottlenecks]
    site.hints.version += 1

    site.until("document.querySelectorAll('#bottlenecks-table tbody tr').length === 2")
    site.until(f"document.querySelectorAll('#bottlenecks-table .countdown')[1].innerText !== '{before}'")
    assert [row[2].split()[0] for row in site.rows("bottlenecks-table")] == ["n9", "n3"]
    assert site.run("return window.notReloaded") is True
    assert site.run("return window.scrollY") > 150, "where it was, but for what came in above"
    assert site.run("return document.activeElement.classList.contains('where')"), "focus stays in the table"
    assert site.text("#link-state").startswith("Live")
    assert site.errors() == []


def test_filters_live_in_the_address(site):
    low = {"30": 0.1, "60": 0.2, "90": 0.5, "120": 0.7}
    site.hints.bottlenecks = [
        world.bottleneck(1),
        world.bottleneck(2, bottleneck_class="nvlink_saturation", probabilities=low),
        world.bottleneck(3, node="n9"),
    ]
    site.open("/bottlenecks?class=thermal_throttle&min_probability=0.6&horizon_s=60&colour=red")
    assert len(site.rows("bottlenecks-table")) == 2
    assert "colour = “red” was left out" in site.text("#bottlenecks-alerts")
    assert [row[1] for row in site.rows("class-table")] == ["2", *"0000000"], "60 s and 60 %, whatever the class"
    chosen = site.run(
        "return [...document.querySelectorAll('.page:not([hidden]) .choice[aria-current]')].map(e => e.text)"
    )
    assert chosen == ["sim", "Thermal throttle", "60 s", "≥ 60 %", "Bottleneck"]

    site.run("window.notReloaded = true")
    site.run("[...document.querySelectorAll('.choice')].find((e) => e.text === 'NVLink saturation').click()")
    site.until("new URLSearchParams(location.search).get('class') === 'nvlink_saturation'")
    site.until("document.getElementById('bottlenecks-list').innerText.includes('Nothing matches these filters')")
    assert "3 bottlenecks foreseen outside of them" in site.text("#bottlenecks-list")
    site.driver.back()
    site.until("document.querySelectorAll('#bottlenecks-table tbody tr').length === 2")
    site.run("document.querySelector('#bottlenecks-table .where').click()")
    site.until("document.querySelectorAll('#bottlenecks-table tbody tr').length === 1")
    assert "node=n" in site.run("return location.search")
    assert site.run("return window.notReloaded") is True
    href = site.run("return document.querySelector('#bottlenecks-csv a').getAttribute('href')")
    assert href.startswith("/export/bottlenecks.csv?")
    assert "class=thermal_throttle" in href
    assert site.errors() == []


def click_on_map(site, node):
    """Move the mouse to a node's cell and click."""
    x, y = site.run(
        "const graph = document.querySelector('#bottlenecks-map .js-plotly-plot');"
        "graph.scrollIntoView({block: 'center'});"
        "const map = graph.data.find((trace) => trace.type === 'heatmap' && trace.showscale !== false);"
        "const y = map.customdata.findIndex((line) => line.some((cell) => cell && cell[1] === arguments[0]));"
        "const x = map.customdata[y].findIndex((cell) => cell && cell[1] === arguments[0]);"
        "const box = graph.querySelector('.nsewdrag').getBoundingClientRect();"
        "const {xaxis, yaxis} = graph._fullLayout;"
        "return [Math.round(box.left + xaxis.l2p(x)), Math.round(box.top + yaxis.l2p(y))]",
        node,
    )
    actions = ActionBuilder(site.driver)
    actions.pointer_action.move_to_location(x - 1, y).move_to_location(x, y).pause(0.2).click()
    actions.perform()


def test_a_click_on_the_map_narrows_the_page(site):
    site.hints.bottlenecks = [world.bottleneck(1), world.bottleneck(2, node="n9")]
    site.open("/bottlenecks", "document.querySelectorAll('#bottlenecks-map .hm').length > 0")
    for _ in range(6):  # a click that meets a refresh is lost
        click_on_map(site, "n9")
        with contextlib.suppress(AssertionError):
            site.until("new URLSearchParams(location.search).get('node') === 'n9'", 2)
            break
    site.until("new URLSearchParams(location.search).get('node') === 'n9'")
    site.until("document.querySelectorAll('#bottlenecks-table tbody tr').length === 1")


def test_nothing_foreseen_says_what_was_checked(site):
    site.open("/bottlenecks")
    shown = site.text("#nothing-foreseen")
    assert "Nothing foreseen" in shown
    assert "248 of 256 GPUs had fresh samples and were checked" in shown
    assert "Thermal throttle, NVLink saturation, Memory exhaustion at 30, 60, 90, 120 s" in shown
    assert "1 node out of service left out" in shown
    assert "baseline: trend" in shown
    assert site.errors() == []


def test_stale_hints_are_not_shown_and_come_back(site):
    site.hints.bottlenecks = [world.bottleneck(1)]
    site.hints.state = "stale"
    site.open("/bottlenecks")
    assert "Hints are 40 s old, expired 10 s ago: nothing is shown as valid" in site.text("#bottlenecks-list")
    assert "No statement can be made" in site.text("#bottlenecks-summary")
    assert site.rows("bottlenecks-table") == []
    assert site.text("#bottlenecks-csv") == ""
    site.hints.state = "fresh"
    site.until("document.querySelectorAll('#bottlenecks-table tbody tr').length === 1")
    assert site.errors() == []


def test_an_api_that_is_down_is_an_answer_too(site):
    site.hints.state = "down"
    site.open("/bottlenecks")
    assert "No answer from the hints API" in site.text("#bottlenecks-list")
    assert "http://127.0.0.1:8700 refused the connection" in site.text("#bottlenecks-list")
    site.open("/")
    assert site.text("#fleet-goodness").endswith("%")
    assert ["Hints API", "–", "not answering"] in site.rows("fleet-source-table")
    assert site.errors() == []


def test_one_stale_cluster_of_several_is_named(site):
    site.hints.stale_shards = ["west"]
    site.open("/bottlenecks")
    assert "No fresh hints of west" in site.text("#bottlenecks-alerts")


def test_hints_expire_in_the_browser_when_nobody_answers(site):
    site.hints.bottlenecks = [world.bottleneck(1)]
    site.hints.ttl_s, site.hints.age_s = 7.0, 5.0
    site.open("/bottlenecks", "document.querySelectorAll('#bottlenecks-table tbody tr').length === 1")
    site.run("document.body.dataset.lostS = 2")
    site.is_gone = True
    site.until("!document.getElementById('link-lost').hidden")
    site.until("document.querySelector('#bottlenecks-list .expiring').classList.contains('expired')")
    assert "Expired: nothing is shown as valid" in site.text("#bottlenecks-list")
    assert not site.run("return document.getElementById('bottlenecks-table').checkVisibility()")
    assert "has not answered for" in site.text("#link-lost")
    assert site.text("#link-state") == "No answer"


def test_newer_hints_are_fetched_before_the_shown_ones_expire(site, store):
    site.start(store, refresh_s=60)
    site.hints.bottlenecks = [world.bottleneck(1)]
    site.hints.ttl_s, site.hints.age_s = 8.0, 0.5
    site.open("/bottlenecks", "document.querySelectorAll('#bottlenecks-table tbody tr').length === 1")
    site.run(
        "window.wasExpired = false; setInterval(() => {"
        "if (document.querySelector('.expired')) window.wasExpired = true}, 20)"
    )
    time.sleep(8.5)
    assert site.run("return window.wasExpired") is False
    assert len(site.rows("bottlenecks-table")) == 1


def test_several_clusters_are_told_apart(site, store):
    site.start(store, ("sim", "west"))
    site.hints.bottlenecks = [world.bottleneck(1), world.bottleneck(2, cluster="west", node="w1")]
    site.open("/bottlenecks")
    assert {row[2] for row in site.rows("bottlenecks-table")} == {
        "n3 GPU 4 r1 · p1 · sim",
        "w1 GPU w1-4 r1 · p1 · west",
    }
    site.run("[...document.querySelectorAll('.page-head .choice')].find((e) => e.text === 'west').click()")
    site.until("document.querySelectorAll('#bottlenecks-table tbody tr').length === 1")
    assert site.run("return location.search") == "?cluster=west"
    site.open("/")
    assert "No samples of west in the last 14 days" in site.text("#fleet-alerts")
    assert {row[0] for row in site.rows("fleet-group-table")} == {"sim"}
    assert site.errors() == []


def test_a_store_that_is_down_leaves_the_numbers_and_says_so(site):
    site.open("/", "document.getElementById('fleet-goodness')?.innerText.endsWith('%')")
    shown = site.text("#fleet-goodness")
    site.is_broken = True
    site.until("document.getElementById('fleet-alerts').innerText.includes('The store cannot be read')")
    assert "disk I/O error" in site.text("#fleet-alerts")
    assert site.text("#fleet-goodness") == shown
    site.open("/bottlenecks")
    assert "Nothing foreseen" in site.text("#bottlenecks-list"), "hints need no store"
    assert site.errors() == []


def test_a_store_that_was_never_up_is_told_too(site):
    site.is_broken = True
    site.open("/")
    assert "The store cannot be read" in site.text("#fleet-alerts")
    assert "Not known while the store cannot be read" in site.text("#fleet-answer")
    site.is_broken = False
    site.until("document.getElementById('fleet-goodness')?.innerText.endsWith('%')")
    assert site.text("#fleet-alerts") == ""
    assert site.errors() == []


def test_an_empty_store_is_no_error_and_an_old_one_is_called_old(site, tmp_path):
    with Store.open(f"sqlite:{tmp_path}/catalogue.sqlite", str(tmp_path / "data")) as other:
        site.start(other).open("/")
        assert "Nothing measured yet" in site.text("#fleet-answer")
        assert "No nodes in the inventory yet" in site.text("#fleet-groups")
        site.until("document.getElementById('fleet-trend').innerText.includes('No samples in these hours')")
        world.fill(other, datetime.now(UTC) - timedelta(hours=3), 8, hours=1)
        site.until("document.getElementById('fleet-alerts').innerText.includes('Samples of sim stopped 3 h')")
        assert {row[0]: row[-1] for row in site.rows("fleet-source-table")}["GPU samples in the store"] == "old"
        site.until("document.querySelector('.page-head .pill').classList.contains('old')")
        assert site.errors() == []
        site.driver.get("about:blank")


def test_themes_follow_the_system_and_the_reader(site):
    def media(value):
        site.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": value}]}
        )

    def ink():
        return site.run(
            "return [getComputedStyle(document.body).backgroundColor,"
            " document.querySelector('#fleet-trend .ytick text').style.fill]"
        )

    drawn = "document.querySelector('#fleet-trend .ytick text')"
    try:
        media("dark")
        site.open("/", drawn)
        assert ink() == ["rgb(12, 19, 26)", "rgb(230, 237, 243)"]
        media("light")
        site.until(f"{drawn}?.style.fill === 'rgb(21, 32, 43)'")
        assert ink() == ["rgb(243, 245, 247)", "rgb(21, 32, 43)"]
        for _ in range(2):
            site.run("document.getElementById('theme-toggle').click()")
        site.until(f"{drawn}?.style.fill === 'rgb(230, 237, 243)'")
        site.open("/", drawn)
        assert ink() == ["rgb(12, 19, 26)", "rgb(230, 237, 243)"], "the choice outlives a reload"
        assert site.text("#theme-toggle") == "Dark"
    finally:
        site.run("localStorage.clear()")
        site.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_keyboard_and_names_for_screen_readers(site):
    site.hints.bottlenecks = [world.bottleneck(1)]
    site.open("/bottlenecks")
    seen = []
    for _ in range(18):
        site.driver.switch_to.active_element.send_keys(Keys.TAB)
        seen.append(site.run("return document.activeElement.innerText.trim()"))
    assert seen[0] == "Skip to content"
    assert seen[1:6] == ["Weatherglass", "Is my fleet good?", "What is about to go wrong?", "Pause", "Auto"]
    assert {"sim", "All", "Thermal throttle", "30 s"} <= set(seen)
    site.run("[...document.querySelectorAll('.choice')].find((e) => e.text === '60 s').focus()")
    site.driver.switch_to.active_element.send_keys(Keys.ENTER)
    site.until("location.search === '?horizon_s=60'")
    site.run("document.getElementById('pause').click()")
    site.until("document.getElementById('link-state').innerText === 'Paused'")
    calls = len(site.hints.calls)
    time.sleep(3 * REFRESH_S)
    assert len(site.hints.calls) <= calls + 2, "a paused page asks for nothing more"
    faults = site.run(
        "const faults = [];"
        "for (const table of document.querySelectorAll('.page:not([hidden]) table')) {"
        " if (!table.caption?.textContent) faults.push('caption of ' + table.id);"
        " if ([...table.querySelectorAll('thead th')].some((c) => c.scope !== 'col')) faults.push('columns');"
        " if ([...table.querySelectorAll('tbody tr')].some((r) => r.cells[0].scope !== 'row')) faults.push('rows');}"
        "for (const element of document.querySelectorAll('a, button')) if (element.checkVisibility())"
        " if (!element.innerText && !element.ariaLabel && !element.title) faults.push(element.outerHTML);"
        "for (const id of document.querySelectorAll('[aria-labelledby]'))"
        " if (!document.getElementById(id.getAttribute('aria-labelledby'))) faults.push(id.outerHTML.slice(0, 80));"
        "const ids = [...document.querySelectorAll('[id]')].map((e) => e.id);"
        "if (new Set(ids).size !== ids.length) faults.push('ids are not unique');"
        "if (document.documentElement.lang !== 'en') faults.push('lang');"
        "if (document.querySelectorAll('.page:not([hidden]) h1').length !== 1) faults.push('h1');"
        "return faults"
    )
    assert faults == []


@pytest.mark.parametrize("path", ["/", "/bottlenecks"])
def test_narrow_screens_do_not_scroll_sideways(site, path):
    site.hints.bottlenecks = [world.bottleneck(1)]
    try:
        site.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {"width": 800, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        )
        site.open(path)
        assert site.run("return document.documentElement.scrollWidth <= window.innerWidth")
    finally:
        site.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_another_path_names_the_pages(site):
    site.open("/nowhere")
    assert "No such page" in site.text("#page-none")
    assert "What is about to go wrong?" in site.text("#page-none")
    site.run("document.querySelector('#page-none a[href=\"/bottlenecks\"]').click()")
    site.until("!document.getElementById('page-bottlenecks').hidden")
    assert site.run("return document.querySelector('nav [aria-current]').textContent") == "What is about to go wrong?"
