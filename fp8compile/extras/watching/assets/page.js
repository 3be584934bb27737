"use strict";
// The page: what is shown, what is selected, and in a live page the questions for new lines.

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const find = (id) => document.getElementById(id);
  const runs = [];
  const built = new Map(); // by card, what it was built from
  const state = { selected: null, run: null, dark: matchMedia("(prefers-color-scheme: dark)").matches };
  const MOST_AT_ONCE = 8; // answers of a run before it is drawn
  const MOST_MARKS = 200; // overflows that are marked in the charts
  Run.schema = data.schema;

  const shown = () => runs.filter((run) => run.shown && run.records.length);
  const hooks = { select: (step) => select(step), marks };
  const charts = CHARTS.map((spec) => new Chart(spec, hooks));
  find("charts").append(...charts.map((chart) => chart.figure));
  find("title").textContent = data.title;

  function marks() {
    const lines = overflowsOf(shown()).slice(0, MOST_MARKS).map(({ record }) => ({ step: record.step, name: isOfScale(record) ? "--warn" : "--bad", dashed: true }));
    if (state.selected !== null) lines.push({ step: state.selected, name: "--accent" });
    return { lines, skipped: shown().flatMap((run) => run.skips) };
  }

  function draw() {
    for (const run of runs) {
      if (run.drawn === run.version) continue;
      run.drawn = run.version;
      run.begun = run.overflows;
      run.skips = run.skipped.map((record) => record.step);
    }
    charts.forEach((chart) => chart.update(shown(), state.dark));
    drawRuns();
    drawTiles();
    drawSide();
    drawMessage();
  }

  function drawMessage() {
    const said = runs.filter((run) => run.other).map((run) =>
      `${run.name} is written as ${run.other}, and this page reads ${data.schema}: look at it with the fp8compile that wrote it.`);
    if (!runs.length) said.push(data.live ? "There is no run in this folder yet. The page shows it as soon as it begins." : "There is no run in this page.");
    else if (!said.length && !runs.some((run) => run.records.length)) said.push("The run has begun. Its first step is written when the second one ends.");
    said.push(...runs.flatMap((run) => run.remarks.map((remark) => `${run.name}: ${remark}.`)));
    find("message").textContent = said.join(" ");
    find("message").hidden = !said.length;
  }

  // Boxes stay where they are while the run goes on: one that is replaced under the pointer takes no click.
  function drawRuns() {
    for (const run of runs) {
      const notes = [`${number(run.records.length)} step${run.records.length === 1 ? "" : "s"}`];
      if (run.corrupt) notes.push(`${run.corrupt} corrupt line${run.corrupt > 1 ? "s" : ""} left out`);
      if (run.left_out) notes.push(`${number(run.left_out)} lines left out`);
      if (run.cut) notes.push(`of a long run the last ${bytes(data.tail)}: the first ${bytes(run.cut)} left out`);
      if (run.rest.trim()) notes.push("its last line is being written");
      run.label = run.label || labelOf(run);
      run.label.classList.toggle("bad", Boolean(run.other));
      run.label.lastChild.textContent = notes.join(", ");
      if (!run.label.isConnected) find("runs").append(run.label);
    }
  }

  function labelOf(run) {
    const box = element("input", { type: "checkbox", checked: run.shown, on: { change: (event) => { run.shown = event.target.checked; draw(); } } });
    return element("label", {}, box, element("span", { class: "swatch", style: { background: `var(--run${run.index % 8})` } }), run.name,
      element("span", { class: "soft" }));
  }

  function drawTiles() {
    const run = state.run && state.run.records.length ? state.run : shown()[0];
    const tiles = [];
    if (run) {
      const last = run.last;
      const value = (key, format) => wordAt(last, key) || format(last[key]);
      const bad = (key) => Boolean(wordAt(last, key));
      const add = (name, text, isBad) => tiles.push(element("div", { class: `tile${isBad ? " bad" : ""}` }, element("b", { text }), element("span", { text: name })));
      add("last step", number(last.step));
      if ("loss" in last) add("loss", value("loss", number), bad("loss"));
      if ("scale" in last) add("loss scale", power(last.scale));
      if ("skipped" in last) add("steps skipped", number(run.skips.length), run.skips.length > 0);
      if ("headroom" in last) add("headroom", number(last.headroom, 3));
      if ("clipped" in last) add("clipped", number(run.records.reduce((sum, record) => sum + (record.clipped || 0), 0)));
      if ("tokens_per_s" in last) add("tokens/s", number(last.tokens_per_s, 3));
      if ("seconds" in last) add("time of a step", seconds(last.seconds));
      if ("memory" in last) add("memory", bytes(last.memory));
    }
    find("tiles").replaceChildren(...tiles);
    const all = overflowsOf(shown());
    find("overflow").hidden = !all.length;
    find("overflow").textContent = all.length === 1 ? `overflow at step ${number(all[0].record.step)}` : `${number(all.length)} overflows: next`;
  }

  function drawSide() {
    const visible = shown();
    if (state.selected !== null && !(state.run && visible.includes(state.run) && state.run.at(state.selected)))
      state.run = visible.find((run) => run.at(state.selected)) || null;
    const record = state.run && state.selected !== null ? state.run.at(state.selected) : null;
    const hint = state.selected === null ? "Click a chart to see the record of a step." : `Step ${state.selected} is not in the run.`;
    const names = visible.map((run) => run.name);
    renew("record", [record, state.run && state.run.name, names.length, hint], () => (record ? recordCard(state.run, record, visible.length > 1)
      : [element("h2", { text: "Record of a step" }), element("span", { class: "soft", text: hint })]));
    const begun = overflowsOf(visible).map(({ run, record: { step }, last }) => `${run.name} ${step} ${last}`).join();
    renew("overflows", [begun, state.selected, names.length], () => overflowsCard(visible, state.selected, select));
    renew("about", [names.join(), visible.reduce((sum, run) => sum + run.headers.length, 0)], () => aboutCard(visible));
  }

  // Build a card anew where what it depends on has changed.
  function renew(id, depends, build) {
    const before = built.get(id);
    if (before && before.length === depends.length && before.every((each, at) => each === depends[at])) return;
    built.set(id, depends);
    find(id).replaceChildren(...build().filter(Boolean));
  }

  function select(step, run) {
    state.selected = step;
    if (run) state.run = run;
    history.replaceState(null, "", step === null ? "#" : `#step=${step}`);
    find("step").value = step === null ? "" : step;
    drawSide();
    charts.forEach((chart) => chart.redraw());
  }

  // The step ``by`` places further in the run that is looked at.
  function move(by) {
    const run = state.run || shown()[0];
    if (!run) return;
    const { records } = run;
    let at = state.selected === null ? (by > 0 ? -1 : records.length) : records.findIndex((record) => record.step >= state.selected);
    at = Math.min(records.length - 1, Math.max(0, (at < 0 && state.selected !== null ? records.length : at) + by));
    select(records[at].step, run);
  }

  // The next one of the list behind the one that is looked at; behind the last the first.
  function selectNextOverflow() {
    const all = overflowsOf(shown());
    if (!all.length) return;
    const at = all.findIndex(({ run, record, last }) => run === state.run && record.step <= state.selected && state.selected <= last);
    const { run, record } = all[(state.selected === null ? 0 : at + 1) % all.length];
    select(record.step, run);
  }

  function byHash() {
    const found = /^#step=(\d{1,15})$/.exec(location.hash);
    if (found) select(Number(found[1]));
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT)$/.test(event.target.tagName) && event.target.type !== "checkbox") return;
    const far = event.shiftKey ? 10 : 1;
    const keys = { ArrowLeft: () => move(-far), ArrowRight: () => move(far), Home: () => move(-Infinity), End: () => move(Infinity), f: selectNextOverflow, Escape: () => select(null) };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  find("goto").addEventListener("submit", (event) => {
    event.preventDefault();
    const step = Number(find("step").value);
    if (Number.isSafeInteger(step) && step > 0) select(step);
  });
  find("overflow").addEventListener("click", selectNextOverflow);
  find("theme").addEventListener("click", () => { state.dark = !state.dark; paint(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => { state.dark = event.matches; paint(); });
  addEventListener("hashchange", byHash);

  function paint() {
    document.documentElement.dataset.theme = state.dark ? "dark" : "light";
    find("theme").setAttribute("aria-pressed", String(state.dark));
    draw();
  }

  function runNamed(name) {
    let run = runs.find((each) => each.name === name);
    if (!run) runs.push(run = new Run(name, runs.length));
    return run;
  }

  function tellStatus(text, kind) {
    find("status").textContent = text;
    find("status").className = `pill ${kind}`;
  }

  // The new lines of one run; returns whether there were any.
  async function fetchLines(run, size) {
    if (size < run.offset) run.clear();
    if (run.offset === 0 && size > data.tail) {
      const text = new TextDecoder().decode(await linesFrom(run.name, 0));
      run.take(text.slice(0, text.indexOf("\n") + 1));
      run.skipTo(size - data.tail);
    }
    const before = run.offset;
    for (let answers = 0; run.offset < size && answers < MOST_AT_ONCE; answers += 1) {
      const body = await linesFrom(run.name, run.offset);
      if (!body.byteLength) break;
      run.offset += body.byteLength;
      run.take(new TextDecoder().decode(body));
    }
    return run.offset > before;
  }

  // Whole lines of a run from a byte on; none where the server has none.
  async function linesFrom(name, from) {
    const answer = await fetch(`lines?run=${encodeURIComponent(name)}&from=${from}`);
    return answer.ok ? answer.arrayBuffer() : new ArrayBuffer(0);
  }

  async function ask() {
    try {
      if (document.hidden) return;
      const answer = await fetch("runs");
      if (!answer.ok) throw new Error(await answer.text());
      const listed = await answer.json();
      let news = listed.length !== runs.length || !state.asked;
      for (const { name, size } of listed) news = (await fetchLines(runNamed(name), size)) || news;
      state.asked = true;
      tellStatus("live", "live");
      if (news) draw();
      if (news && state.selected === null) byHash();
    } catch {
      tellStatus("no answer; asks again", "lost");
    } finally {
      setTimeout(ask, data.every);
    }
  }

  for (const { name, text, left_out } of data.runs) {
    const run = runNamed(name);
    run.take(text);
    run.left_out = left_out;
  }
  tellStatus(data.live ? "begins" : "snapshot", "");
  paint();
  byHash();
  if (data.live) ask();
})();
