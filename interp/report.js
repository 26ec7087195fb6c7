// Draws the embedded figures, follows the colour mode, and moves all score matrices with one slider a run.
(() => {
  "use strict";
  const root = document.documentElement;
  const stored = {};
  document.querySelectorAll("script.figures").forEach((s) => Object.assign(stored, JSON.parse(s.textContent)));
  const config = {
    displaylogo: false, responsive: true, showSendToCloud: false, plotlyServerURL: "",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  };
  const plain = { ...config, displayModeBar: false };
  const drawn = new Set();
  const at = {};

  const overlaid = (light, dark) => {
    if (dark === null || dark === undefined) return light;
    if (Object.prototype.hasOwnProperty.call(dark, "=")) return dark["="];
    const copy = Array.isArray(light) ? light.slice() : { ...light };
    for (const key of Object.keys(dark)) copy[key] = overlaid(light[key], dark[key]);
    return copy;
  };
  const dark = () => root.dataset.mode === "dark";
  const clone = (value) => JSON.parse(JSON.stringify(value));

  function draw(div) {
    const entry = stored[div.id];
    const figure = clone(dark() ? overlaid(entry.figure, entry.dark) : entry.figure);
    const step = at[div.dataset.run];
    let data = figure.data;
    if (step !== undefined && entry.role === "matrix") {
      const frames = dark() ? overlaid(entry.frames, entry.dark_frames) : entry.frames;
      if (step in frames) data = data.map((trace, index) => ({ ...trace, ...frames[step][index] }));
    }
    if (step !== undefined && entry.role === "phase" && step in entry.places) {
      const x = entry.places[step];
      const line = { color: dark() ? "#e6e9ed" : "#1c2128", width: 1.2 };
      const cursor = { type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line };
      figure.layout.shapes = (figure.layout.shapes || []).concat([cursor]);
    }
    if (entry.role === "map") {
      // Cells stay square: the side is what the card leaves.
      const { l, r, t, b } = figure.layout.margin;
      const side = Math.max(Math.min(div.clientWidth - l - r, 720), 180);
      Object.assign(figure.layout, { width: side + l + r, height: side + t + b });
    }
    if (entry.role === "matrix") {
      // The page gives the heading, so its room goes.
      Object.assign(figure.layout, { title: undefined, height: figure.layout.height - 30 });
      figure.layout.margin.t = 12;
    }
    const first = !drawn.has(div.id);
    drawn.add(div.id);
    const done = Plotly.react(div, data, figure.layout, entry.role === "matrix" ? plain : config);
    if (first && entry.role === "phase") {
      done.then(() => div.on("plotly_click", (event) => choose(div.dataset.run, String(event.points[0].customdata))));
    }
    return done;
  }
  const open = (div) => !div.closest("details:not([open])");
  const plots = (scope) => [...scope.querySelectorAll(".plot")].filter((div) => div.id in stored);
  const redraw = () => plots(document).forEach((div) => open(div) && draw(div));

  function choose(run, step) {
    const control = document.querySelector(`.steps[data-run="${CSS.escape(run)}"]`);
    if (!control) return;
    const steps = JSON.parse(control.dataset.steps);
    const index = steps.indexOf(Number(step));
    if (index < 0) return;
    control.querySelector("input").value = index;
    at[run] = step;
    const words = [document.createElement("b"), document.createTextNode(` · checkpoint ${index + 1} of ${steps.length}`)];
    words[0].textContent = `step ${Number(step).toLocaleString("en")}`;
    control.querySelector("output").replaceChildren(...words);
    plots(document).forEach((div) => div.dataset.run === run && stored[div.id].role && open(div) && draw(div));
  }
  document.querySelectorAll(".steps").forEach((control) => {
    const steps = JSON.parse(control.dataset.steps);
    const input = control.querySelector("input");
    const button = control.querySelector("button");
    let timer = null;
    const stop = () => { clearInterval(timer); timer = null; button.textContent = "Play"; };
    input.addEventListener("input", () => { stop(); choose(control.dataset.run, String(steps[input.value])); });
    button.addEventListener("click", () => {
      if (timer) return stop();
      let index = Number(input.value) >= steps.length - 1 ? 0 : Number(input.value);
      button.textContent = "Pause";
      timer = setInterval(() => {
        choose(control.dataset.run, String(steps[index]));
        index += 1;
        if (index >= steps.length) stop();
      }, 350);
    });
    choose(control.dataset.run, String(steps[steps.length - 1]));
  });

  const toggle = document.getElementById("mode");
  const show = (mode) => {
    root.dataset.mode = mode;
    toggle.textContent = mode === "dark" ? "Light mode" : "Dark mode";
    redraw();
  };
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = /[#&](light|dark)\b/.exec(location.hash);
  toggle.addEventListener("click", () => { chosen = true; show(dark() ? "light" : "dark"); });
  system.addEventListener("change", () => chosen || show(system.matches ? "dark" : "light"));
  document.querySelectorAll("details").forEach((d) => d.addEventListener("toggle", () => {
    if (d.open) plots(d).forEach((div) => open(div) && draw(div));
  }));
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    redraw();
  });
  let before = null;
  window.addEventListener("beforeprint", () => { before = root.dataset.mode; if (dark()) show("light"); });
  window.addEventListener("afterprint", () => before && show(before));
  show(chosen ? chosen[1] : system.matches ? "dark" : "light");
  root.dataset.drawn = String(drawn.size);
})();
