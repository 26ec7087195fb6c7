// The views of one side of the page, A or B: each puts the numbers of the side's choice into a figure.
// A side is { tag, name, model, step, layer, unit, reading }; `tag` ends the ids of its elements.
"use strict";
const makeViews = ({ data, figures, chosen, at, act }) => {
  const root = document.documentElement;
  const config = {
    displaylogo: false, responsive: true, showSendToCloud: false, plotlyServerURL: "",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  };
  const still = { ...config, displayModeBar: false };

  // Figures: the light form, and what dark writes over it.
  const overlaid = (light, dark) => {
    if (dark === null || dark === undefined) return light;
    if (Object.prototype.hasOwnProperty.call(dark, "=")) return dark["="];
    const copy = Array.isArray(light) ? light.slice() : { ...light };
    for (const key of Object.keys(dark)) copy[key] = overlaid(light[key], dark[key]);
    return copy;
  };
  const isDark = () => root.dataset.mode === "dark";
  const theme = () => data.themes[root.dataset.mode];
  const figure = (name) => {
    const entry = figures[name];
    return JSON.parse(JSON.stringify(isDark() ? overlaid(entry.figure, entry.dark) : entry.figure));
  };
  const number = (value, digits = 3) => {
    const short = value === 0 || Math.abs(value) >= 0.01 ? value.toFixed(digits) : value.toPrecision(digits);
    return Number(short) === 0 ? "0" : String(short).replace("-", "−");
  };
  const draw = (side, id, shown, how) => Plotly.react(at(id + side.tag), shown.data, shown.layout, how);

  // What a side has chosen.
  const model = (side) => data.models[side.model];
  const layer = (side) => model(side).layers[side.layer];
  const prompt = (side) => model(side).prompts[chosen.prompt];
  const token = (side) => Math.min(chosen.token, prompt(side).ids.length - 1);
  const place = (side) => `${chosen.prompt}.${side.step}.${layer(side).layer}.${side.reading}`;
  const base = (side) => side.reading.replace(", signed", "");
  const remembered = new Map();
  const weights = (side) => {
    const entry = model(side).maps[place(side)];
    const unit = entry.units[side.unit];
    const key = `${side.model}.${place(side)}.${side.unit}`;
    if (!remembered.has(key)) {
      const bytes = Uint8Array.from(atob(unit.bytes), (letter) => letter.charCodeAt(0));
      remembered.set(key, new Int16Array(bytes.buffer));
      if (remembered.size > 64) remembered.delete(remembered.keys().next().value);
    }
    const whole = remembered.get(key);
    // Row i of the lower triangle begins after 1 + 2 + ... + i entries.
    const read = (dest, src) => (src > dest ? 0 : (whole[(dest * (dest + 1)) / 2 + src] / data.levels) * unit.limit);
    return { read, n: prompt(side).ids.length, limit: unit.limit, signed: entry.signed, quantity: entry.quantity };
  };
  const targetsOf = (side, dest) => {
    const ids = prompt(side).ids, found = [];
    for (let src = 1; src <= dest; src += 1) if (ids[src - 1] === ids[dest]) found.push(src);
    return found;
  };
  // A percentile of the sizes that are not zero, between the two nearest of them.
  const reach = (all) => {
    const share = Number(at("contrast").value) / 100, largest = Math.max(...all.map((one) => one.limit));
    if (share === 1) return largest;
    const sizes = [];
    for (const { read, n } of all) {
      for (let i = 0; i < n; i += 1) for (let j = 0; j <= i; j += 1) if (read(i, j) !== 0) sizes.push(Math.abs(read(i, j)));
    }
    sizes.sort((a, b) => a - b);
    const where = share * (sizes.length - 1), low = Math.floor(where);
    return sizes.length ? sizes[low] + (sizes[Math.min(low + 1, sizes.length - 1)] - sizes[low]) * (where - low) : largest;
  };
  const named = (side, position) => `‘${prompt(side).tokens[position]}’ @${position}`;

  // Attention maps: two of the same quantity share their colours.
  function drawMaps(sides) {
    const all = sides.map(weights);
    const shared = all.length > 1 && all[0].quantity === all[1].quantity;
    sides.forEach((side, k) => drawMap(side, all[k], reach(shared ? all : [all[k]]), shared));
  }
  // The figure is made for one wide map: in less room fewer labels, as LABEL_PX of views.py has it.
  function thinLabels(axes, cell) {
    for (const axis of axes) {
      const { tickvals, ticktext, tickfont } = axis;
      const every = tickvals.length > 1 ? Math.ceil((1.3 * tickfont.size) / (cell * (tickvals[1] - tickvals[0]))) : 1;
      const kept = (_, k) => k % every === 0;
      Object.assign(axis, { tickvals: tickvals.filter(kept), ticktext: ticktext.filter(kept) });
    }
  }
  function drawMap(side, { read, n, limit: largest, signed, quantity }, limit, shared) {
    const map = at("map" + side.tag);
    const shown = figure(`map-${side.model}-${chosen.prompt}-${signed ? "signed" : "plain"}`);
    const [cells, outlines] = shown.data;
    cells.z = Array.from({ length: n }, (_, i) => Array.from({ length: n }, (_, j) => (j > i ? null : read(i, j))));
    if (shown.layout.meta.marked) cells.text = cells.z.map((row) => row.map((value) => (value !== null && value <= -0.1 * limit ? "−" : "")));
    const ends = signed ? [-limit, 0, limit] : [0, limit / 2, limit];
    Object.assign(cells, { zmin: ends[0], zmax: limit });
    Object.assign(cells.colorbar, { tickvals: ends, ticktext: ends.map((end) => number(end, 2)) });
    if (!at("targets").checked) Object.assign(outlines, { x: [null], y: [null] });
    const { l, r, t, b } = shown.layout.margin;
    const room = Math.max(Math.min(map.clientWidth - l - r, 620), 200);
    Object.assign(shown.layout, { width: room + l + r, height: room + t + b, uirevision: `${chosen.prompt}` });
    thinLabels([shown.layout.xaxis2, shown.layout.yaxis2], room / n);
    shown.layout.shapes = [{
      type: "rect", xref: "x", yref: "y", x0: -0.5, x1: n - 0.5, y0: token(side) - 0.5, y1: token(side) + 0.5,
      line: { color: theme().ink, width: 1, dash: "dot" },
    }];
    const first = !map.data;
    draw(side, "map", shown, config);
    if (first) map.on("plotly_click", (event) => act.token(Math.round(event.points[0].y)));
    const beyond = limit < largest ? ` The largest weight is ${number(largest)}; those beyond have the last colour.` : "";
    at("map-caption" + side.tag).textContent = `${n.toLocaleString("en")} tokens. Colours: ${quantity}, from ${number(ends[0])} to ${number(limit)}${shared ? " on both maps" : ""}.${beyond} Dotted: the chosen row.`;
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
  function drawStrip(side, id, values, signed, marked, verb) {
    const strip = at(id + side.tag), top = Math.max(...values.map(Math.abs)) || 1, low = signed ? -top : 0;
    const focused = strip.contains(document.activeElement);
    strip.replaceChildren(...values.map((value, position) => {
      const cell = document.createElement("button");
      const colour = mixed((value - low) / (top - low), signed);
      cell.type = "button";
      cell.textContent = prompt(side).tokens[position];
      cell.dataset.position = position;
      cell.title = `${named(side, position)}${verb} ${number(value, 4)}`;
      cell.tabIndex = position === token(side) ? 0 : -1;
      cell.style.background = `rgb(${colour})`;
      cell.style.color = inkOn(colour);
      cell.classList.toggle("chosen", position === token(side));
      cell.classList.toggle("target", marked.has(position));
      cell.classList.toggle("minus", signed && value <= -0.1 * top);
      return cell;
    }));
    if (focused) strip.children[token(side)].focus();
    at(`${id}-limits${side.tag}`).textContent = `Colours from ${number(low)} to ${number(top)}.`;
  }
  function drawText(side) {
    const { read, n, signed } = weights(side);
    const here = token(side), on = at("targets").checked;
    const reads = Array.from({ length: n }, (_, j) => read(here, j));
    const readBy = Array.from({ length: n }, (_, i) => read(i, here));
    const back = new Set(on ? Array.from({ length: n }, (_, i) => i).filter((i) => targetsOf(side, i).includes(here)) : []);
    drawStrip(side, "reads", reads, signed, new Set(on ? targetsOf(side, here) : []), `: @${here} reads`);
    drawStrip(side, "read-by", readBy, signed, back, ` reads @${here}:`);
    const order = reads.map((value, j) => [Math.abs(value), j]).filter(([size]) => size > 0).sort((a, b) => b[0] - a[0] || a[1] - b[1]).slice(0, 3);
    const most = order.map(([, j]) => `${named(side, j)} (${number(reads[j])})`).join(", ");
    at("summary" + side.tag).textContent = order.length ? `${named(side, here)} reads most from ${most}.` : `${named(side, here)} reads nothing.`;
  }
  // The token to begin with: one with an induction target, nearest the middle; else the last.
  function startToken(side) {
    const n = prompt(side).ids.length;
    const found = Array.from({ length: n }, (_, i) => i).filter((i) => targetsOf(side, i).length);
    return found.sort((a, b) => Math.abs(a - n / 2) - Math.abs(b - n / 2) || a - b)[0] ?? n - 1;
  }

  // Bars by offset.
  function put(side, id, name, entry, values, remark, yTitle) {
    at(id + side.tag).hidden = !entry;
    at(`${id}-caption${side.tag}`).textContent = entry ? entry.caption ?? remark : remark;
    if (!entry) return;
    const shown = figure(name);
    values.forEach((row, k) => { if (shown.data[k]) shown.data[k].y = row; });
    (shown.layout.shapes || []).forEach((line) => Object.assign(line, { y0: entry.control, y1: entry.control }));
    (shown.layout.annotations || []).forEach((note) => { note.y = entry.control; });
    if (entry.errors) shown.data[0].error_y.array = entry.errors;
    if (yTitle) shown.layout.yaxis.title.text = yTitle;
    draw(side, id, shown, still);
  }
  function drawOffsets(side) {
    const { weights: bars, maps, cuts } = model(side);
    const weight = (bars[place(side)] || {})[side.unit];
    const said = weight ? "On this prompt. Offset +1 is the token after the earlier copy; dotted: the mean of all earlier tokens." : "No token comes again in this prompt.";
    put(side, "weight", `weight-${side.model}-${chosen.prompt}`, weight, weight ? [weight.values] : [], said, `mean ${maps[place(side)].quantity}`);
    const cut = cuts[`${side.step}.${layer(side).layer}.${base(side)}.${side.unit}`];
    put(side, "cut", `cut-${side.model}-${layer(side).layer}`, cut, cut ? cut.values : [], cuts.remark || "Not measured.");
  }

  // Norms of the state.
  function drawState(side) {
    const states = model(side).states, entry = states[`${chosen.prompt}.${side.step}.${layer(side).layer}`];
    at("state" + side.tag).hidden = !entry;
    at("state-caption" + side.tag).textContent = entry ? entry.caption : states.remark || "Not measured.";
    if (!entry) return;
    const shown = figure(`state-${side.model}-${chosen.prompt}-${layer(side).layer}`);
    const byUnit = shown.data.length === layer(side).n_units;
    shown.data.forEach((trace, row) => {
      trace.y = entry.values[row];
      trace.customdata = shown.layout.meta.names;
      if (byUnit) trace.line.width = row === side.unit ? 3 : 1.3;
    });
    draw(side, "state", shown, still);
  }

  // Training: cursors of the phase plot, frames of the matrices. `other` is the other side, where it is of this run.
  function drawTraining(side, other) {
    const training = model(side).training;
    at("training" + side.tag).hidden = !training;
    if (!training) return;
    const shown = figure(training.phase), cursors = [[side, "solid"], ...(other ? [[other, "dot"]] : [])];
    const lines = cursors.map(([one, dash]) => {
      const x = figures[training.phase].places[String(model(one).steps[one.step])];
      return { type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line: { color: theme().ink, width: 1.4, dash } };
    });
    shown.layout.shapes = (shown.layout.shapes || []).concat(lines.reverse());
    const plot = at("phase" + side.tag), first = !plot.data;
    draw(side, "phase", shown, config);
    if (first) plot.on("plotly_click", (event) => act.nearest(side, Number(event.points[0].customdata)));
    drawMatrices(side, training.matrices[base(side)] || []);
  }
  function drawMatrices(side, scores) {
    const place = at("matrices" + side.tag), step = String(model(side).steps[side.step]);
    const ids = scores.map(([, id]) => id + side.tag);
    if (place.dataset.ids !== String(ids)) {
      place.dataset.ids = String(ids);
      place.className = "grid matrices";
      place.replaceChildren(...ids.map((id) => {
        const card = document.createElement("figure"), plot = document.createElement("div");
        plot.className = "plot";
        plot.id = id;
        card.append(plot);
        return card;
      }));
    }
    for (const [, id] of scores) {
      const entry = figures[id], matrix = figure(id), plot = at(id + side.tag), unseen = !plot.data;
      const frames = isDark() ? overlaid(entry.frames, entry.dark_frames) : entry.frames;
      matrix.data = matrix.data.map((trace, k) => ({ ...trace, ...frames[step][k] }));
      draw(side, id, matrix, still);
      if (unseen) plot.on("plotly_click", (event) => act.unit(side, event.points[0].customdata, event.points[0].x));
    }
  }
  return { model, layer, prompt, token, startToken, drawMaps, drawText, drawOffsets, drawState, drawTraining };
};
