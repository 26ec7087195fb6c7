// Puts the chosen numbers into the page's figures: every change redraws what depends on it.
(() => {
  "use strict";
  const root = document.documentElement;
  const at = (id) => document.getElementById(id);
  const data = JSON.parse(at("data").textContent);
  const figures = JSON.parse(at("figures").textContent);
  const config = {
    displaylogo: false, responsive: true, showSendToCloud: false, plotlyServerURL: "",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  };
  const still = { ...config, displayModeBar: false };
  const chosen = { prompt: 0, step: data.steps.length - 1, layer: 0, unit: 0, reading: "", token: 0 };

  // Figures: the light form, and what dark writes over it.
  const overlaid = (light, dark) => {
    if (dark === null || dark === undefined) return light;
    if (Object.prototype.hasOwnProperty.call(dark, "=")) return dark["="];
    const copy = Array.isArray(light) ? light.slice() : { ...light };
    for (const key of Object.keys(dark)) copy[key] = overlaid(light[key], dark[key]);
    return copy;
  };
  const mode = () => root.dataset.mode;
  const theme = () => data.themes[mode()];
  const figure = (name) => {
    const entry = figures[name];
    return JSON.parse(JSON.stringify(mode() === "dark" ? overlaid(entry.figure, entry.dark) : entry.figure));
  };
  const number = (value, digits = 3) => {
    const short = value === 0 || Math.abs(value) >= 0.01 ? value.toFixed(digits) : value.toPrecision(digits);
    return Number(short) === 0 ? "0" : String(short).replace("-", "−");
  };

  // Choices.
  const layer = () => data.layers[chosen.layer];
  const prompt = () => data.prompts[chosen.prompt];
  const place = () => `${chosen.prompt}.${chosen.step}.${layer().layer}.${chosen.reading}`;
  const readings = () => {
    const start = `${chosen.prompt}.${chosen.step}.${layer().layer}.`;
    return Object.keys(data.maps).filter((key) => key.startsWith(start)).map((key) => key.slice(start.length));
  };
  const base = () => chosen.reading.replace(", signed", "");
  const remembered = new Map();
  const weights = () => {
    const entry = data.maps[place()];
    const unit = entry.units[chosen.unit];
    const key = `${place()}.${chosen.unit}`;
    if (!remembered.has(key)) {
      const bytes = Uint8Array.from(atob(unit.bytes), (letter) => letter.charCodeAt(0));
      remembered.set(key, new Int16Array(bytes.buffer));
      if (remembered.size > 64) remembered.delete(remembered.keys().next().value);
    }
    const whole = remembered.get(key);
    // Row i of the lower triangle begins after 1 + 2 + ... + i entries.
    const read = (dest, src) => (src > dest ? 0 : (whole[(dest * (dest + 1)) / 2 + src] / data.levels) * unit.limit);
    return { read, limit: unit.limit, signed: entry.signed, quantity: entry.quantity };
  };
  const targetsOf = (dest) => {
    const ids = prompt().ids, found = [];
    for (let src = 1; src <= dest; src += 1) if (ids[src - 1] === ids[dest]) found.push(src);
    return found;
  };
  // A percentile of the sizes that are not zero, between the two nearest of them.
  const reach = ({ read, limit }, n) => {
    const share = Number(at("contrast").value) / 100;
    if (share === 1) return limit;
    const sizes = [];
    for (let i = 0; i < n; i += 1) for (let j = 0; j <= i; j += 1) if (read(i, j) !== 0) sizes.push(Math.abs(read(i, j)));
    sizes.sort((a, b) => a - b);
    const where = share * (sizes.length - 1), low = Math.floor(where);
    return sizes.length ? sizes[low] + (sizes[Math.min(low + 1, sizes.length - 1)] - sizes[low]) * (where - low) : limit;
  };
  const named = (place) => `‘${prompt().tokens[place]}’ @${place}`;

  // Attention map.
  function drawMap() {
    const { read, limit: largest, signed, quantity } = weights();
    const n = prompt().ids.length, limit = reach({ read, limit: largest }, n);
    const shown = figure(`map-${chosen.prompt}-${signed ? "signed" : "plain"}`);
    const [cells, outlines] = shown.data;
    cells.z = Array.from({ length: n }, (_, i) => Array.from({ length: n }, (_, j) => (j > i ? null : read(i, j))));
    if (shown.layout.meta.marked) cells.text = cells.z.map((row) => row.map((value) => (value !== null && value <= -0.1 * limit ? "−" : "")));
    const ends = signed ? [-limit, 0, limit] : [0, limit / 2, limit];
    Object.assign(cells, { zmin: ends[0], zmax: limit });
    Object.assign(cells.colorbar, { tickvals: ends, ticktext: ends.map((end) => number(end, 2)) });
    if (!at("targets").checked) Object.assign(outlines, { x: [null], y: [null] });
    const { l, r, t, b } = shown.layout.margin;
    const side = Math.max(Math.min(at("map").clientWidth - l - r, 620), 200);
    Object.assign(shown.layout, { width: side + l + r, height: side + t + b, uirevision: `${chosen.prompt}` });
    shown.layout.shapes = [{
      type: "rect", xref: "x", yref: "y", x0: -0.5, x1: n - 0.5, y0: chosen.token - 0.5, y1: chosen.token + 0.5,
      line: { color: theme().ink, width: 1, dash: "dot" },
    }];
    const first = !at("map").data;
    Plotly.react(at("map"), shown.data, shown.layout, config);
    if (first) at("map").on("plotly_click", (event) => chooseToken(Math.round(event.points[0].y)));
    at("map-caption").textContent = `${n.toLocaleString("en")} tokens. Colours: ${quantity}, from ${number(ends[0])} to ${number(limit)}.${limit < largest ? ` The largest weight is ${number(largest)}; those beyond have the last colour.` : ""} Dotted: the chosen row.`;
  }

  // The prompt as text.
  const rgb = (colour) => [1, 3, 5].map((k) => parseInt(colour.slice(k, k + 2), 16));
  const mixed = (share, signed) => {
    const colours = signed ? theme().diverging : theme().sequential;
    const where = Math.min(Math.max(share, 0), 1) * (colours.length - 1);
    const low = Math.min(Math.floor(where), colours.length - 2);
    const [a, b] = [rgb(colours[low]), rgb(colours[low + 1])];
    return a.map((part, k) => Math.round(part + (b[k] - part) * (where - low)));
  };
  const inkOn = ([r, g, b]) => (0.2126 * (r / 255) ** 2.2 + 0.7152 * (g / 255) ** 2.2 + 0.0722 * (b / 255) ** 2.2 > 0.2 ? "#12161b" : "#ffffff");
  function drawStrip(id, values, signed, marked, verb) {
    const top = Math.max(...values.map(Math.abs)) || 1, low = signed ? -top : 0;
    const focused = at(id).contains(document.activeElement);
    at(id).replaceChildren(...values.map((value, position) => {
      const token = document.createElement("button");
      const colour = mixed((value - low) / (top - low), signed);
      token.type = "button";
      token.textContent = prompt().tokens[position];
      token.dataset.position = position;
      token.title = `${named(position)}${verb} ${number(value, 4)}`;
      token.tabIndex = position === chosen.token ? 0 : -1;
      token.style.background = `rgb(${colour})`;
      token.style.color = inkOn(colour);
      token.classList.toggle("chosen", position === chosen.token);
      token.classList.toggle("target", marked.has(position));
      token.classList.toggle("minus", signed && value <= -0.1 * top);
      return token;
    }));
    if (focused) at(id).children[chosen.token].focus();
    at(`${id}-limits`).textContent = `Colours from ${number(low)} to ${number(top)}.`;
  }
  function drawText() {
    const { read, signed } = weights();
    const n = prompt().ids.length, token = chosen.token, on = at("targets").checked;
    const reads = Array.from({ length: n }, (_, j) => read(token, j));
    const readBy = Array.from({ length: n }, (_, i) => read(i, token));
    const back = new Set(on ? Array.from({ length: n }, (_, i) => i).filter((i) => targetsOf(i).includes(token)) : []);
    drawStrip("reads", reads, signed, new Set(on ? targetsOf(token) : []), `: @${token} reads`);
    drawStrip("read-by", readBy, signed, back, ` reads @${token}:`);
    const order = reads.map((value, j) => [Math.abs(value), j]).filter(([size]) => size > 0).sort((a, b) => b[0] - a[0] || a[1] - b[1]).slice(0, 3);
    const most = order.map(([, j]) => `${named(j)} (${number(reads[j])})`).join(", ");
    at("summary").textContent = order.length ? `${named(token)} reads most from ${most}.` : `${named(token)} reads nothing.`;
  }
  for (const id of ["reads", "read-by"]) {
    at(id).addEventListener("click", (event) => {
      const token = event.target.closest("[data-position]");
      if (token) chooseToken(Number(token.dataset.position));
    });
    at(id).addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      chooseToken(Math.min(Math.max(chosen.token + step, 0), prompt().ids.length - 1));
    });
  }
  function chooseToken(position) {
    chosen.token = position;
    drawMap();
    drawText();
  }
  // The token to begin with: one with an induction target, nearest the middle; else the last.
  function startToken() {
    const n = prompt().ids.length;
    const found = Array.from({ length: n }, (_, i) => i).filter((i) => targetsOf(i).length);
    return found.sort((a, b) => Math.abs(a - n / 2) - Math.abs(b - n / 2) || a - b)[0] ?? n - 1;
  }

  // Bars by offset.
  function put(id, name, entry, values, remark, extra = {}) {
    const empty = !entry;
    at(id).hidden = empty;
    at(`${id}-caption`).textContent = empty ? remark : entry.caption ?? remark;
    if (empty) return;
    const shown = figure(name);
    values.forEach((row, k) => { if (shown.data[k]) shown.data[k].y = row; });
    (shown.layout.shapes || []).forEach((line) => Object.assign(line, { y0: entry.control, y1: entry.control }));
    (shown.layout.annotations || []).forEach((note) => { note.y = entry.control; });
    if (entry.errors) shown.data[0].error_y.array = entry.errors;
    if (extra.yTitle) shown.layout.yaxis.title.text = extra.yTitle;
    Plotly.react(at(id), shown.data, shown.layout, still);
  }
  function drawOffsets() {
    const weight = (data.weights[place()] || {})[chosen.unit];
    const said = weight ? "On this prompt. Offset +1 is the token after the earlier copy; dotted: the mean of all earlier tokens." : "No token comes again in this prompt.";
    put("weight", `weight-${chosen.prompt}`, weight, weight ? [weight.values] : [], said, { yTitle: `mean ${data.maps[place()].quantity}` });
    const cut = data.cuts[`${chosen.step}.${layer().layer}.${base()}.${chosen.unit}`];
    put("cut", `cut-${layer().layer}`, cut, cut ? cut.values : [], data.cuts.remark || "Not measured.");
  }

  // Norms of the state.
  function drawState() {
    const entry = data.states[`${chosen.prompt}.${chosen.step}.${layer().layer}`];
    at("state").hidden = !entry;
    at("state-caption").textContent = entry ? entry.caption : data.states.remark || "Not measured.";
    if (!entry) return;
    const shown = figure(`state-${chosen.prompt}-${layer().layer}`);
    const byUnit = shown.data.length === layer().n_units;
    shown.data.forEach((trace, row) => {
      trace.y = entry.values[row];
      trace.customdata = shown.layout.meta.names;
      if (byUnit) trace.line.width = row === chosen.unit ? 3 : 1.3;
    });
    Plotly.react(at("state"), shown.data, shown.layout, still);
  }

  // Training: cursor of the phase plot, frames of the matrices.
  function drawTraining() {
    if (!data.training) return;
    const step = String(data.steps[chosen.step]), shown = figure("phase");
    const x = figures.phase.places[step];
    const line = { color: theme().ink, width: 1.4 };
    shown.layout.shapes = (shown.layout.shapes || []).concat([{ type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line }]);
    const first = !at("phase").data;
    Plotly.react(at("phase"), shown.data, shown.layout, config);
    if (first) at("phase").on("plotly_click", (event) => chooseNearest(Number(event.points[0].customdata)));
    for (const group of document.querySelectorAll(".matrices")) {
      group.hidden = group.dataset.reading !== base();
      if (group.hidden) continue;
      for (const plot of group.querySelectorAll(".plot")) {
        const entry = figures[plot.id], matrix = figure(plot.id);
        const frames = mode() === "dark" ? overlaid(entry.frames, entry.dark_frames) : entry.frames;
        const traces = matrix.data.map((trace, k) => ({ ...trace, ...frames[step][k] }));
        const unseen = !plot.data;
        Plotly.react(plot, traces, matrix.layout, still);
        if (unseen) plot.on("plotly_click", (event) => chooseUnit(event.points[0].customdata, event.points[0].x));
      }
    }
  }
  function buildMatrices() {
    at("training").hidden = !data.training;
    for (const [reading, scores] of Object.entries(data.training ? data.training.matrices : {})) {
      const group = document.createElement("div");
      group.className = "grid matrices";
      group.dataset.reading = reading;
      for (const [, id] of scores) {
        const card = document.createElement("figure"), plot = document.createElement("div");
        plot.className = "plot";
        plot.id = id;
        card.append(plot);
        group.append(card);
      }
      at("matrices").append(group);
    }
  }
  function chooseNearest(step) {
    const far = data.steps.map((one) => Math.abs(one - step));
    chooseStep(far.indexOf(Math.min(...far)));
  }
  function chooseUnit(number, unit) {
    const index = data.layers.findIndex((one) => one.layer === number && one.units.includes(unit));
    if (index < 0) return;
    Object.assign(chosen, { layer: index, unit });
    fill();
    draw();
  }

  // Controls.
  const options = (id, entries, value) => {
    at(id).replaceChildren(...entries.map(([key, text]) => {
      const option = document.createElement("option");
      Object.assign(option, { value: key, textContent: text, selected: String(key) === String(value) });
      return option;
    }));
  };
  function fill() {
    if (!layer().units.includes(chosen.unit)) chosen.unit = layer().units[0];
    const there = readings();
    if (!there.includes(chosen.reading)) chosen.reading = there.includes("block") && !there.includes("pattern") ? "block" : there[0];
    options("prompt", data.prompts.map((one, k) => [k, one.label]), chosen.prompt);
    options("layer", data.layers.map((one, k) => [k, one.label]), chosen.layer);
    options("unit", layer().units.map((unit, k) => [unit, layer().names[k]]), chosen.unit);
    const label = (name) => {
      const plain = name.replace(", signed", "");
      return (data.reading_labels[plain] || plain) + (plain === name ? "" : " (signed values)");
    };
    options("reading", there.map((name) => [name, label(name)]), chosen.reading);
    at("step").max = data.steps.length - 1;
    at("step").value = chosen.step;
    at("steps").hidden = data.steps.length < 2;
    at("step-label").textContent = `step ${data.steps[chosen.step].toLocaleString("en")} (${chosen.step + 1} of ${data.steps.length})`;
    at("prompt-note").textContent = [`${prompt().ids.length} tokens, ${new Set(prompt().ids).size} different.`, ...prompt().notes].join(" ");
    const parts = [data.name, ...(data.steps.length > 1 ? [`step ${data.steps[chosen.step].toLocaleString("en")}`] : [])];
    at("heading").textContent = [...parts, layer().names[layer().units.indexOf(chosen.unit)], chosen.reading].join(" · ");
  }
  function draw() {
    drawMap();
    drawText();
    drawOffsets();
    drawTraining();
    drawState();
    root.dataset.drawn = String(Number(root.dataset.drawn || 0) + 1);
  }
  function chooseStep(step) {
    chosen.step = step;
    fill();
    draw();
  }
  for (const id of ["prompt", "layer", "unit", "reading"]) {
    at(id).addEventListener("change", () => {
      chosen[id] = id === "reading" ? at(id).value : Number(at(id).value);
      if (id === "prompt") chosen.token = startToken();
      fill();
      draw();
    });
  }
  at("contrast").addEventListener("change", drawMap);
  at("targets").addEventListener("change", () => { drawMap(); drawText(); });
  let timer = null;
  const stop = () => { clearInterval(timer); timer = null; at("play").textContent = "Play"; };
  at("step").addEventListener("input", () => { stop(); chooseStep(Number(at("step").value)); });
  at("play").addEventListener("click", () => {
    if (timer) return stop();
    let next = chosen.step >= data.steps.length - 1 ? 0 : chosen.step + 1;
    at("play").textContent = "Pause";
    timer = setInterval(() => {
      chooseStep(next);
      next += 1;
      if (next >= data.steps.length) stop();
    }, 600);
  });

  // Light and dark: the system's choice until one is made here.
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  let fixed = /[#&](light|dark)\b/.exec(location.hash);
  const show = (name) => {
    root.dataset.mode = name;
    at("mode").textContent = name === "dark" ? "Light mode" : "Dark mode";
    draw();
  };
  at("mode").addEventListener("click", () => { fixed = true; show(mode() === "dark" ? "light" : "dark"); });
  system.addEventListener("change", () => fixed || show(system.matches ? "dark" : "light"));
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    drawMap();
  });

  chosen.layer = data.layers.findIndex((one) => one.layer === data.first[0]);
  chosen.unit = data.first[1];
  chosen.token = startToken();
  buildMatrices();
  fill();
  show(fixed ? fixed[1] : system.matches ? "dark" : "light");
})();
