// Keeps a page alive between refreshes: ages, countdowns, expiry, the theme, and whether the server still answers.
// Content comes from the server; nothing here fetches anything.
(function () {
  "use strict";

  const LISTED = (document.body.dataset.pages || "").split(" ").map((entry) => entry.split("="));
  const ORDER = LISTED.map(([name]) => name);
  const PAGES = Object.fromEntries(LISTED.map(([name, path]) => [path, name]));
  const THEME_KEY = "weatherglass-theme";
  const root = document.documentElement;

  // --- time: the server's clock, carried forward on a monotonic one, so that a wrong or stepped clock of the
  // viewer's machine neither revives nor kills a hint ------------------------------------------------------------
  let offset = null; // server milliseconds minus performance.now()
  let lastBeat = null;
  let lastAsked = 0;
  let isPaused = false;

  function now() {
    return offset === null ? Date.now() : performance.now() + offset;
  }

  function onBeat(text) {
    const served = Number(text);
    if (!served) return;
    // The fastest answer is the truest: delays only make the server look late.
    const seen = served - performance.now();
    offset = offset === null || seen > offset || seen < offset - 5000 ? seen : offset;
    lastBeat = performance.now();
  }

  function duration(milliseconds) {
    const whole = Math.max(0, Math.round(milliseconds / 1000));
    if (whole < 120) return whole + " s";
    if (whole < 3600) {
      const minutes = Math.floor(whole / 60);
      const rest = whole % 60;
      return minutes < 10 && rest ? minutes + " min " + rest + " s" : minutes + " min";
    }
    if (whole < 86400) {
      const minutes = Math.floor(whole / 60);
      const rest = minutes % 60;
      return Math.floor(minutes / 60) + " h" + (rest ? " " + rest + " min" : "");
    }
    const hours = Math.floor(whole / 3600);
    const rest = hours % 24;
    return Math.floor(hours / 24) + " d" + (rest ? " " + rest + " h" : "");
  }

  function write(element, text) {
    if (element.textContent !== text) element.textContent = text;
  }

  function tick() {
    const at = now();
    for (const element of document.querySelectorAll("[data-age-of]")) {
      const age = at - Number(element.dataset.ageOf);
      write(element, duration(age) + (element.dataset.suffix || ""));
      const pill = element.closest("[data-late-s]");
      if (pill) {
        pill.classList.toggle("late", age > 1000 * Number(pill.dataset.lateS));
        pill.classList.toggle("old", age > 1000 * Number(pill.dataset.oldS));
      }
    }
    for (const element of document.querySelectorAll("[data-until]")) {
      const left = Number(element.dataset.until) - at;
      const isNow = Math.abs(left) < 500;
      write(element, isNow ? "now" : left > 0 ? "in " + duration(left) : "due " + duration(-left) + " ago");
      element.classList.toggle("soon", left < 30000 && left > -500);
      element.classList.toggle("past", left <= -500);
    }
    for (const element of document.querySelectorAll("[data-left]")) {
      const left = Number(element.dataset.left) - at;
      write(element, left > 0 ? duration(left) : "expired");
      element.closest(".pill")?.classList.toggle("old", left <= 0);
    }
    let isExpiring = false;
    for (const element of document.querySelectorAll(".page:not([hidden]) [data-expires]")) {
      const left = Number(element.dataset.expires) - at;
      element.classList.toggle("expired", left <= 0);
      isExpiring = isExpiring || left < 2500;
    }
    if (isExpiring) askEarly();
    write(document.getElementById("utc-clock") || document.createElement("span"),
      new Date(at).toISOString().slice(11, 19) + " UTC");
    showLink();
  }

  // Newer hints are there as a rule before the shown ones expire: ask for them then, not at the next refresh.
  function askEarly() {
    if (isPaused || document.hidden || performance.now() - lastAsked < 1000) return;
    lastAsked = performance.now();
    window.dash_clientside.set_props("tick", { n_intervals: -Math.round(lastAsked) });
  }

  function showLink() {
    const state = document.getElementById("link-state");
    const lost = document.getElementById("link-lost");
    if (!state || !lost) return;
    const refresh = Number(document.body.dataset.refreshS) * 1000;
    const silent = lastBeat === null ? null : performance.now() - lastBeat;
    const isLost = !isPaused && silent !== null && silent > 1000 * Number(document.body.dataset.lostS);
    state.classList.toggle("live", !isLost && !isPaused && silent !== null);
    state.classList.toggle("paused", isPaused);
    state.classList.toggle("lost", isLost);
    if (isPaused) write(state, "Paused");
    else if (silent === null) write(state, "Connecting…");
    else if (isLost) write(state, "No answer");
    else write(state, "Live, every " + duration(refresh));
    lost.hidden = !isLost;
    if (isLost) {
      write(lost, "The dashboard server has not answered for " + duration(silent) +
        ". What you see is from then; hints that have expired since are hidden.");
    }
  }

  // --- mending: changes only what differs, so that focus, selection and scroll stay ------------------------------
  function nameOf(node) {
    return node.nodeType === Node.ELEMENT_NODE ? node.id || node.dataset.key || "" : "";
  }

  function isAlike(one, other) {
    return one.nodeType === other.nodeType && one.nodeName === other.nodeName && nameOf(one) === nameOf(other);
  }

  function mendChildren(place, wanted) {
    const named = new Map();
    for (const child of place.childNodes) if (nameOf(child)) named.set(nameOf(child), child);
    let at = place.firstChild;
    for (const child of [...wanted.childNodes]) {
      const same = nameOf(child) ? named.get(nameOf(child)) : null;
      if (same && isAlike(same, child)) {
        if (same === at) at = at.nextSibling;
        else place.insertBefore(same, at);
        mend(same, child);
      } else if (at && isAlike(at, child)) {
        const next = at.nextSibling;
        mend(at, child);
        at = next;
      } else place.insertBefore(child, at);
    }
    while (at) {
      const next = at.nextSibling;
      at.remove();
      at = next;
    }
  }

  function mend(old, wanted) {
    if (old.nodeType !== Node.ELEMENT_NODE) {
      if (old.nodeValue !== wanted.nodeValue) old.nodeValue = wanted.nodeValue;
      return;
    }
    for (const { name } of [...old.attributes]) if (!wanted.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of wanted.attributes) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    mendChildren(old, wanted);
  }

  // --- theme ----------------------------------------------------------------------------------------------------
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");

  function chosenTheme() {
    try {
      return localStorage.getItem(THEME_KEY);
    } catch (error) {
      return null;
    }
  }

  function effectiveTheme() {
    const chosen = chosenTheme();
    return chosen === "light" || chosen === "dark" ? chosen : prefersDark.matches ? "dark" : "light";
  }

  function showTheme() {
    const chosen = chosenTheme();
    if (chosen === "light" || chosen === "dark") root.setAttribute("data-theme", chosen);
    else root.removeAttribute("data-theme");
    const button = document.getElementById("theme-toggle");
    if (button) {
      const name = chosen === "light" ? "Light" : chosen === "dark" ? "Dark" : "Auto";
      write(button, name);
      button.setAttribute("aria-label", "Theme: " + name + ". Change it");
      button.title = "Theme: " + name + ". Click for the next of auto, light, dark";
    }
  }

  function nextTheme() {
    const order = [null, "light", "dark"];
    const next = order[(order.indexOf(chosenTheme()) + 1) % order.length];
    try {
      if (next === null) localStorage.removeItem(THEME_KEY);
      else localStorage.setItem(THEME_KEY, next);
    } catch (error) {
      root.setAttribute("data-theme", next || effectiveTheme());
    }
    showTheme();
    window.dash_clientside.set_props("theme", { data: effectiveTheme() });
  }

  prefersDark.addEventListener("change", function () {
    showTheme();
    window.dash_clientside.set_props("theme", { data: effectiveTheme() });
  });

  // --- pause, links ---------------------------------------------------------------------------------------------
  function togglePause() {
    isPaused = !isPaused;
    window.dash_clientside.set_props("tick", { disabled: isPaused });
    const button = document.getElementById("pause");
    write(button, isPaused ? "Resume" : "Pause");
    button.title = isPaused ? "Refresh this page again" : "Stop refreshing this page";
    if (!isPaused) lastBeat = performance.now();
    showLink();
  }

  document.addEventListener("click", function (event) {
    if (event.target.closest?.("#pause")) return togglePause();
    if (event.target.closest?.("#theme-toggle")) return nextTheme();
    const link = event.target.closest?.("a[data-soft]");
    if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
    const target = new URL(link.href, location.href);
    if (target.origin !== location.origin) return;
    event.preventDefault();
    const isOtherPage = target.pathname !== location.pathname;
    if (target.href !== location.href) {
      history.pushState({}, "", target.href);
      window.dispatchEvent(new CustomEvent("_dashprivate_pushstate"));
    }
    if (isOtherPage) {
      window.scrollTo(0, 0);
      document.getElementById("main")?.focus({ preventScroll: true });
    }
  });

  // --- what Dash calls ------------------------------------------------------------------------------------------
  window.dash_clientside = window.dash_clientside || {};
  const none = function () {
    return window.dash_clientside.no_update;
  };

  window.dash_clientside.weatherglass = {
    showPage: function (pathname) {
      const shown = PAGES[pathname] || "none";
      let title = "No such page";
      for (const link of document.querySelectorAll(".nav-link")) {
        const isCurrent = new URL(link.href).pathname === pathname;
        if (isCurrent) {
          link.setAttribute("aria-current", "page");
          title = link.textContent;
        } else link.removeAttribute("aria-current");
      }
      document.title = title + " · Weatherglass";
      showTheme();
      return ORDER.concat("none").map((name) => name !== shown);
    },

    // Beats only for the page that is shown, so that the others cost nothing.
    pulse: function (n, pathname, search, theme) {
      const shown = PAGES[pathname];
      const data = { n: n || 0, search: search || "", theme: theme || effectiveTheme() };
      return ORDER.map((name) => (name === shown ? data : none()));
    },

    // Works what the server sent into the page, and confirms it.
    refresh: function (sent) {
      if (!sent) return none();
      for (const [id, text] of Object.entries(sent.parts)) {
        const place = document.getElementById(id);
        if (!place) continue;
        const wanted = document.createElement("template");
        wanted.innerHTML = text;
        mendChildren(place, wanted.content);
        place.removeAttribute("aria-busy");
      }
      onBeat(sent.at);
      tick();
      return sent.seen ?? none();
    },

    // A click on a cell of the map narrows the page to that node or rack; a second click on it widens it again.
    nodeOf: function (click, figure) {
      const point = click?.points?.[0];
      const cell = figure?.data?.[point?.curveNumber]?.customdata?.[point?.y]?.[point?.x];
      if (!cell || !cell[1]) return none();
      const query = new URLSearchParams(location.search);
      const isSame = query.get(cell[2]) === cell[1];
      query.delete("node");
      query.delete("rack");
      if (!isSame) query.set(cell[2], cell[1]);
      const text = query.toString();
      return text ? "?" + text : "";
    },
  };

  setInterval(tick, 500);
})();
