// What the page does by itself: colours, which parts are shown, which token is chosen, and the tokens' text.
// Nothing is loaded from anywhere, and no text becomes HTML: tokens are set as text.
(function () {
  "use strict";

  const noUpdate = () => window.dash_clientside.no_update;
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const names = ["attention", "cuts", "training", "state"];
  let choice = "system";

  function modeOf(chosen) {
    choice = chosen || "system";
    const mode = choice === "system" ? (system.matches ? "dark" : "light") : choice;
    document.documentElement.dataset.mode = mode;
    return mode;
  }

  modeOf("system");
  system.addEventListener("change", () => {
    if (choice === "system") window.dash_clientside.set_props("mode", { data: modeOf("system") });
  });

  function selection(run, step, layer, reading, units, head, values) {
    return { run, step, layer, reading, units, head, values };
  }

  // One character more than is accepted: the server says that it is too long, and no more of it is sent.
  function begin(text, most) {
    return text.length > most ? Array.from(text.slice(0, 2 * (most + 1))).slice(0, most + 1).join("") : text;
  }

  function triggered() {
    const found = window.dash_clientside.callback_context.triggered;
    return found.length ? found[0].prop_id : "";
  }

  // Width that the views have, in steps, so that a dragged window does not draw anew at every pixel.
  function tellRoom() {
    const main = document.querySelector("main");
    if (!main) return;
    const room = Math.floor(main.clientWidth / 20) * 20;
    if (room !== told) window.dash_clientside.set_props("room", { data: (told = room) });
  }

  let told = null;
  let waiting = null;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(tellRoom, 200);
  });

  function show(tab) {
    window.dash_clientside.set_props("tab", { data: tab.dataset.tab });
  }

  function choose(position) {
    window.dash_clientside.set_props("selected", { data: position });
  }

  function button(cell) {
    const token = document.createElement("button");
    token.type = "button";
    token.className = "token" + (cell.target ? " target" : "");
    token.textContent = cell.text;
    token.title = cell.title;
    token.dir = "auto";
    token.dataset.position = cell.position;
    token.style.backgroundColor = cell.background;
    token.style.color = cell.ink;
    token.setAttribute("aria-pressed", cell.selected);
    // One stop for the Tab key; arrow keys move inside.
    token.tabIndex = cell.selected ? 0 : -1;
    return token;
  }

  function fill(name, strip) {
    const place = document.getElementById(name);
    if (!place) return;
    const focused = place.contains(document.activeElement);
    const parts = [];
    for (const cell of strip ? strip.cells : []) {
      parts.push(button(cell));
      if (cell.text.includes("↵")) parts.push(document.createElement("br"));
    }
    place.replaceChildren(...parts);
    if (focused) place.querySelector("[aria-pressed=true]")?.focus();
    const limits = document.getElementById(name + "-limits");
    if (limits) limits.textContent = strip ? strip.limits : "";
  }

  document.addEventListener("click", (event) => {
    const token = event.target.closest?.("[data-position]");
    if (token) choose(Number(token.dataset.position));
    const tab = event.target.closest?.("[data-tab]");
    if (tab) show(tab);
  });

  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target.id === "prompt-text") {
      document.getElementById("prompt-read").click();
      return;
    }
    const move = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    const tab = event.target.closest?.("[data-tab]");
    if (tab && move) {
      const tabs = [...tab.parentElement.children];
      const next = tabs[(tabs.indexOf(tab) + move + tabs.length) % tabs.length];
      next.focus();
      show(next);
    }
    const token = event.target.closest?.("[data-position]");
    if (!token || !move) return;
    event.preventDefault();
    const next = Number(token.dataset.position) + move;
    if (token.parentElement.querySelector(`[data-position="${next}"]`)) choose(next);
  });

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    dashboard: {
      mode: modeOf,
      select_a: (compare, ...parts) => selection(...parts),
      select_b: (compare, ...parts) => (compare.length ? selection(...parts) : null),
      comparing: (compare) => (compare.length ? "page comparing" : "page"),
      // Only the view in front asks the server for anything.
      requests: (tab, a, b, prompt, mode) =>
        names.map((name) => (name === tab && a && prompt && mode ? { a, b, prompt, mode } : noUpdate())),
      panels: (tab) => {
        setTimeout(tellRoom, 0);
        return [...names.map((name) => name !== tab), ...names.map((name) => String(name === tab))];
      },
      fields: (kind) => ["probe", "sample", "typed"].map((name) => name !== kind),
      step_label: (index, steps) =>
        index == null || steps[index] == null
          ? ""
          : `step ${steps[index].toLocaleString("en")} (${index + 1} of ${steps.length})`,
      prompt: (kind, period, repeats, seed, sample, clicks, text, most) => ({
        kind, period, repeats, seed, sample, text: kind === "typed" ? begin(text || "", most) : "",
      }),
      play: (clicks, run, stopped) => {
        const start = triggered().endsWith("n_clicks") && clicks > 0 && stopped;
        return [!start, start ? "Pause" : "Play"];
      },
      move: (ticks, click, step, steps) => {
        if (triggered().endsWith("clickData")) {
          const found = click ? steps.indexOf(click.points[0].customdata) : -1;
          return found < 0 ? noUpdate() : found;
        }
        return (step + 1) % steps.length;
      },
      choose_unit: (...clicks) => {
        const which = triggered();
        const click = clicks[which.includes("previous_token") ? 1 : 0];
        if (!click) return [noUpdate(), noUpdate()];
        const point = click.points[0];
        return [point.customdata, point.x];
      },
      pick: (prompt, a, b) => {
        const which = triggered();
        const click = which.startsWith("a-map") ? a : which.startsWith("b-map") ? b : null;
        return click ? Math.round(click.points[0].y) : null;
      },
      draw_strips: (strips) => {
        for (const side of ["a", "b"]) {
          for (const direction of ["reads", "read_by"]) {
            fill(`${side}-${direction}`, strips?.[side]?.[direction]);
          }
        }
        return noUpdate();
      },
    },
  });
})();
