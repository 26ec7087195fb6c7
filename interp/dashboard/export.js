// What is chosen on the page, for sides A and B: every change redraws what depends on it.
(() => {
  "use strict";
  const root = document.documentElement;
  const at = (id) => document.getElementById(id);
  const data = JSON.parse(at("data").textContent);
  const figures = JSON.parse(at("figures").textContent);
  const side = (name, tag) => ({ name, tag, model: 0, step: 0, layer: 0, unit: 0, reading: "" });
  const chosen = { prompt: 0, token: 0 };
  const [a, b] = [side("A", ""), side("B", "-b")];
  const act = {
    token: (position) => chooseToken(position),
    nearest(one, step) {
      const far = data.models[one.model].steps.map((there) => Math.abs(there - step));
      chooseStep(one, far.indexOf(Math.min(...far)));
    },
    unit(one, number, unit) {
      const index = data.models[one.model].layers.findIndex((there) => there.layer === number && there.units.includes(unit));
      if (index < 0) return;
      Object.assign(one, { layer: index, unit });
      fill();
      draw();
    },
  };
  const views = makeViews({ data, figures, chosen, at, act });
  const { model, layer, prompt, token } = views;
  const comparing = () => at("compare").checked;
  const sides = () => (comparing() ? [a, b] : [a]);

  function chooseToken(position) {
    chosen.token = position;
    views.drawMaps(sides());
    sides().forEach(views.drawText);
  }
  for (const one of [a, b]) {
    for (const id of ["reads", "read-by"]) {
      const strip = at(id + one.tag);
      strip.addEventListener("click", (event) => {
        const cell = event.target.closest("[data-position]");
        if (cell) chooseToken(Number(cell.dataset.position));
      });
      strip.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!step) return;
        event.preventDefault();
        chooseToken(Math.min(Math.max(token(one) + step, 0), prompt(one).ids.length - 1));
      });
    }
  }

  // What the controls offer.
  const options = (id, entries, value) => {
    at(id).replaceChildren(...entries.map(([key, text]) => {
      const option = document.createElement("option");
      Object.assign(option, { value: key, textContent: text, selected: String(key) === String(value) });
      return option;
    }));
  };
  const readings = (one) => {
    const start = `${chosen.prompt}.${one.step}.${layer(one).layer}.`;
    return Object.keys(model(one).maps).filter((key) => key.startsWith(start)).map((key) => key.slice(start.length));
  };
  const label = (name) => {
    const plain = name.replace(", signed", "");
    return (data.reading_labels[plain] || plain) + (plain === name ? "" : " (signed values)");
  };
  function fillSide(one) {
    const { tag } = one, { steps, layers, name } = model(one);
    if (!layer(one).units.includes(one.unit)) one.unit = layer(one).units[0];
    const there = readings(one);
    if (!there.includes(one.reading)) one.reading = there.includes("block") && !there.includes("pattern") ? "block" : there[0];
    at("models" + tag).hidden = data.models.length < 2;
    options("model" + tag, data.models.map((each, k) => [k, each.name]), one.model);
    options("layer" + tag, layers.map((each, k) => [k, each.label]), one.layer);
    options("unit" + tag, layer(one).units.map((unit, k) => [unit, layer(one).names[k]]), one.unit);
    options("reading" + tag, there.map((each) => [each, label(each)]), one.reading);
    at("step" + tag).max = steps.length - 1;
    at("step" + tag).value = one.step;
    at("steps" + tag).hidden = steps.length < 2;
    const step = `step ${steps[one.step].toLocaleString("en")}`;
    at("step-label" + tag).textContent = `${step} (${one.step + 1} of ${steps.length})`;
    const unit = layer(one).names[layer(one).units.indexOf(one.unit)];
    const said = [name, ...(steps.length > 1 ? [step] : []), unit, one.reading].join(" · ");
    for (const part of ["map", "text", "offsets", "training", "state"]) at(`${part}-heading${tag}`).textContent = `${one.name}  ${said}`;
    return said;
  }
  function promptNote() {
    const notes = sides().map((one) => [`${prompt(one).ids.length} tokens, ${new Set(prompt(one).ids).size} different.`, ...prompt(one).notes.map((note) => `${note[0].toUpperCase()}${note.slice(1)}.`)].join(" "));
    if (!comparing() || a.model === b.model) return notes[0];
    const [mine, other] = sides().map((one) => prompt(one).tokens);
    const same = mine.length === other.length && mine.every((text, k) => text === other[k]);
    const begin = (tokens) => tokens.slice(0, 6).map((text) => `‘${text}’`).join(" ") + (tokens.length > 6 ? " ..." : "");
    const which = same ? "Both read the same tokens." : `They read different tokens: A ${begin(mine)}, B ${begin(other)}`;
    return `A: ${notes[0]} B: ${notes[1]} ${which}`;
  }
  function fill() {
    options("prompt", model(a).prompts.map((one, k) => [k, one.label]), chosen.prompt);
    at("heading").textContent = fillSide(a);
    fillSide(b);
    at("prompt-note").textContent = promptNote();
  }
  function draw() {
    const shown = sides(), apart = comparing() && a.model !== b.model;
    views.drawMaps(shown);
    for (const one of shown) for (const view of [views.drawText, views.drawOffsets, views.drawState]) view(one);
    at("training-section").hidden = !shown.some((one) => model(one).training);
    views.drawTraining(a, comparing() && !apart ? b : null);
    if (apart) views.drawTraining(b, null);
    else at("training-b").hidden = true;
    root.dataset.drawn = String(Number(root.dataset.drawn || 0) + 1);
  }

  // Controls.
  function chooseStep(one, step) {
    one.step = step;
    fill();
    draw();
  }
  function open(one, index) {
    const { steps, layers, first } = data.models[index];
    Object.assign(one, { model: index, step: steps.length - 1, layer: layers.findIndex((each) => each.layer === first[0]), unit: first[1], reading: "" });
  }
  at("prompt").addEventListener("change", () => {
    chosen.prompt = Number(at("prompt").value);
    chosen.token = views.startToken(a);
    fill();
    draw();
  });
  at("compare").addEventListener("change", () => {
    root.toggleAttribute("data-compare", comparing());
    fill();
    draw();
  });
  at("contrast").addEventListener("change", () => views.drawMaps(sides()));
  at("targets").addEventListener("change", () => { views.drawMaps(sides()); sides().forEach(views.drawText); });
  for (const one of [a, b]) {
    for (const id of ["model", "layer", "unit", "reading"]) {
      const control = at(id + one.tag);
      control.addEventListener("change", () => {
        stop();
        if (id === "model") open(one, Number(control.value));
        else one[id] = id === "reading" ? control.value : Number(control.value);
        fill();
        draw();
      });
    }
    const play = at("play" + one.tag), slider = at("step" + one.tag);
    let timer = null;
    const stop = () => { clearInterval(timer); timer = null; play.textContent = "Play"; };
    slider.addEventListener("input", () => { stop(); chooseStep(one, Number(slider.value)); });
    play.addEventListener("click", () => {
      if (timer) return stop();
      const last = model(one).steps.length - 1;
      let next = one.step >= last ? 0 : one.step + 1;
      play.textContent = "Pause";
      timer = setInterval(() => {
        chooseStep(one, next);
        next += 1;
        if (next > last) stop();
      }, 600);
    });
  }

  // Light and dark: the system's choice until one is made here.
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  let fixed = /[#&](light|dark)\b/.exec(location.hash);
  const show = (name) => {
    root.dataset.mode = name;
    at("mode").textContent = name === "dark" ? "Light mode" : "Dark mode";
    draw();
  };
  at("mode").addEventListener("click", () => { fixed = true; show(root.dataset.mode === "dark" ? "light" : "dark"); });
  system.addEventListener("change", () => fixed || show(system.matches ? "dark" : "light"));
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    views.drawMaps(sides());
  });

  open(a, 0);
  open(b, data.models.length - 1);
  // Two models are there to be compared.
  at("compare").checked = data.models.length > 1;
  root.toggleAttribute("data-compare", comparing());
  chosen.token = views.startToken(a);
  fill();
  show(fixed ? fixed[1] : system.matches ? "dark" : "light");
})();
