// @ts-check
"use strict";
/** Bytes alive at each operation, stacked by kind: plain Inductor above, ours below, on one scale. */

const KIND_COLOURS = ["--stored", "--left", "--forward", "--backward"];

/** @param {any} app */
X.timelineOf = (app) => {
  const host = X.byId("memory");
  /** @type {any[]} */ let charts = [];

  const draw = () => {
    host.textContent = "";
    const graph = app.view.graph, { ours, plain } = graph.timelines;
    if (!ours.lives.length && !plain.lives.length) {
      host.append(X.el("p", { class: "empty", text: graph.kind === "inference" ? "An inference graph saves nothing for a backward."
        : "This report has no timeline. fp8compile.explain(model, args) makes one; the report of a running model has none." }));
      return;
    }
    const pair = [[plain, "plain Inductor"], [ours, "fp8compile"]].map(([line, title]) => measured(line, title));
    const most = Math.max(...pair.map((p) => p.most));
    host.append(X.el("h2", { text: "Memory in a step: bytes alive at each operation" }),
      X.el("p", { class: "soft", text: "Predicted from the graph, beside parameters, their gradients and optimizer states. The forward comes first, then the backward. Move over a chart, or use the arrow keys, to see what is alive; a click keeps the place." }),
      X.el("div", { class: "legend" }, ours.kinds.map((/** @type {string} */ kind, /** @type {number} */ k) => X.el("span", {}, [X.el("i", { style: `background:var(${KIND_COLOURS[k]})` }), kind]))));
    charts = pair.map((p) => chart(p, most, app));
    host.append(...charts.map((c) => c.element));
    charts.forEach((c) => c.paint());
  };
  const again = () => charts.forEach((c) => c.paint());
  new ResizeObserver(again).observe(host);
  return { draw, again, charts: () => charts };
};

/** @param {any} line @param {string} title */
function measured(line, title) {
  const n = line.operations.length, kinds = line.kinds.length;
  const sums = Array.from({ length: kinds }, () => new Float64Array(n + 1));
  for (const life of line.lives) { sums[life.kind][life.start] += life.nbytes; sums[life.kind][life.end + 1] -= life.nbytes; }
  sums.forEach((sum) => { for (let at = 1; at <= n; at++) sum[at] += sum[at - 1]; });
  let most = 0, peak = 0;
  for (let at = 0; at < n; at++) { const all = sums.reduce((total, sum) => total + sum[at], 0); if (all > most) { most = all; peak = at; } }
  return { line, title, sums, most, peak, n };
}

/** @param {any} p @param {number} most @param {any} app */
function chart(p, most, app) {
  const canvas = X.el("canvas", { class: "chart", tabindex: "0", role: "img", "aria-label": `${p.title}: the peak is ${X.human(p.most)} at operation ${p.peak + 1} of ${p.n}` });
  const list = X.el("div", { class: "alive" });
  const element = X.el("section", { class: "timeline", "data-peak": p.most, "data-name": p.line.name }, [
    X.el("h3", { text: `${p.title}: peak ${X.human(p.most)}` }), canvas, list]);
  const left = 70, bottom = 22, top = 20;
  let at = p.peak, held = p.peak;
  const wide = () => Math.max(10, canvas.clientWidth - left - 10), x = (/** @type {number} */ op) => left + (wide() * (op + 0.5)) / p.n;
  const high = 170, y = (/** @type {number} */ bytes) => top + (high - top - bottom) * (1 - bytes / most);

  const paint = () => {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    canvas.width = width * ratio; canvas.height = high * ratio;
    const c = canvas.getContext("2d");
    c.scale(ratio, ratio);
    const columns = Math.round(wide()), below = new Float64Array(columns);
    p.sums.forEach((/** @type {Float64Array} */ sum, /** @type {number} */ k) => {
      c.fillStyle = X.colour(KIND_COLOURS[k]);
      for (let col = 0; col < columns; col++) {
        const op = column(p, col, columns), value = sum[op];
        if (value > 0) c.fillRect(left + col, y(below[col] + value), 1, y(below[col]) - y(below[col] + value) + 0.5);
        below[col] += value;
      }
    });
    c.strokeStyle = c.fillStyle = X.colour("--soft");
    c.font = "11px system-ui, sans-serif";
    c.textAlign = "right";
    for (const share of [0, 0.5, 1]) { c.fillText(X.human(Math.round(most * share)), left - 6, y(most * share) + 4); c.fillRect(left, y(most * share), wide(), 0.5); }
    const turn = x(p.line.forward - 0.5);
    c.fillRect(turn, top, 1, high - top - bottom);
    c.textAlign = "center";
    c.fillText("forward", (left + turn) / 2, high - 6); c.fillText("backward", (turn + left + wide()) / 2, high - 6);
    mark(c, p.peak, X.colour("--accent"), `peak ${X.human(p.most)}`);
    if (at !== p.peak) mark(c, at, X.colour("--text"), "");
  };
  const mark = (/** @type {any} */ c, /** @type {number} */ op, /** @type {string} */ colour, /** @type {string} */ text) => {
    c.fillStyle = colour;
    c.fillRect(x(op) - 0.75, top - 16, 1.5, high - top - bottom + 16);
    c.textAlign = x(op) > left + wide() * 0.8 ? "right" : "left";
    if (text) c.fillText(text, x(op) + (c.textAlign === "left" ? 5 : -5), top - 6);
  };
  const tell = () => {
    const lives = p.line.lives.filter((/** @type {any} */ l) => l.start <= at && at <= l.end).sort((/** @type {any} */ a, /** @type {any} */ b) => b.nbytes - a.nbytes);
    const total = lives.reduce((/** @type {number} */ sum, /** @type {any} */ l) => sum + l.nbytes, 0);
    list.textContent = "";
    list.append(X.el("p", {}, [X.el("b", { text: at === p.peak ? "At the peak: " : `At operation ${at + 1}: ` }), `${X.human(total)} in ${X.count(lives.length, "tensor")}, while `,
      X.el("code", { text: p.line.operations[at] || "" }), at < p.line.forward ? " of the forward runs" : " of the backward runs"]),
    X.el("ol", {}, lives.slice(0, 8).map((/** @type {any} */ l) => X.el("li", {}, [X.el("i", { style: `background:var(${KIND_COLOURS[l.kind]})` }),
      X.el("button", { type: "button", class: "link", text: l.name, on: { click: () => app.goToName(l.name, l.module, (/** @type {any} */ n) => n.value === l.value && (n.side === "bw") === (l.start >= p.line.forward)) } }), ` ${l.value} `, X.el("b", { text: X.human(l.nbytes) }),
      ` ${l.module || "the model itself"}, ${p.line.kinds[l.kind]}`]))),
    lives.length > 8 ? X.el("p", { class: "soft", text: `and ${lives.length - 8} smaller ones` }) : "");
  };
  const go = (/** @type {number} */ to) => { const next = Math.max(0, Math.min(p.n - 1, to)); if (next !== at) { at = next; paint(); tell(); } };
  const opAt = (/** @type {any} */ e) => Math.floor(((e.clientX - canvas.getBoundingClientRect().left - left) / wide()) * p.n);
  canvas.addEventListener("pointermove", (/** @type {any} */ e) => go(opAt(e)));
  canvas.addEventListener("pointerleave", () => go(held));
  canvas.addEventListener("click", (/** @type {any} */ e) => { go(opAt(e)); held = at; });
  canvas.addEventListener("keydown", (/** @type {any} */ e) => {
    const step = e.key === "ArrowRight" ? 1 : e.key === "ArrowLeft" ? -1 : 0;
    if (step) { go(at + step * (e.shiftKey ? 50 : 1)); held = at; e.preventDefault(); }
    if (e.key === "Home") { go(p.peak); held = at; }
  });
  tell();
  return { element, paint, peak: p.peak, most: p.most };
}

/** The operation of a column that has the most bytes alive. @param {any} p @param {number} col @param {number} columns */
function column(p, col, columns) {
  const from = Math.floor((col * p.n) / columns), to = Math.max(from + 1, Math.floor(((col + 1) * p.n) / columns));
  let best = from, most = -1;
  for (let op = from; op < to && op < p.n; op++) {
    const all = p.sums.reduce((/** @type {number} */ sum, /** @type {Float64Array} */ s) => sum + s[op], 0);
    if (all > most) { most = all; best = op; }
  }
  return best;
}
