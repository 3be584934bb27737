// @ts-check
"use strict";
/** The bytes saved for the backward, from plain Inductor's to ours; and the frontiers of memory budgets. */

/** @param {any} app */
X.barsOf = (app) => {
  const { plain, ours, changes, parts } = app.data.waterfall, host = X.byId("bars");
  const whole = Math.max(plain, ours, 1);
  const row = (/** @type {string} */ label, /** @type {number} */ bytes, /** @type {number} */ from, /** @type {number} */ to, /** @type {string} */ kind, /** @type {number} */ tensors) => X.el("div",
    { class: `step ${kind}`, role: "row", "data-bytes": bytes }, [
      X.el("span", { class: "label", role: "cell", text: label, title: label }),
      X.el("span", { class: "track", role: "cell", "aria-hidden": "true" }, [X.el("i", { style: `left:${(100 * Math.min(from, to)) / whole}%;width:${Math.max(0.2, (100 * Math.abs(to - from)) / whole)}%` })]),
      X.el("span", { class: "bytes", role: "cell", text: X.human(bytes), title: `${bytes.toLocaleString("en")} bytes` }),
      X.el("span", { class: "tensors", role: "cell", text: tensors ? X.count(tensors, "tensor") : "" }),
    ]);
  if (!plain && !ours) {
    host.append(X.el("p", { class: "empty", text: "Nothing is saved for a backward: there is no training graph." }));
    return;
  }
  let at = plain, filled = 0;
  const down = changes.map(([label, bytes, tensors]) => { const made = row(label, bytes, at, at + bytes, bytes <= 0 ? "less" : "more", tensors); at += bytes; return made; });
  const up = [...parts].sort((a, b) => b[1] - a[1]).map(([label, bytes, tensors]) => { const made = row(label, bytes, filled, filled + bytes, "part", tensors); filled += bytes; return made; });
  host.append(X.el("h2", { text: "Saved for the backward, in a step" }),
    X.el("div", { class: "steps", role: "table", "aria-label": "from plain Inductor's bytes to ours" }, [row("plain Inductor", plain, 0, plain, "whole", 0), ...down, row("fp8compile", ours, 0, ours, "ours", 0)]),
    X.el("p", { class: "big", text: plain ? `${((100 * ours) / plain).toFixed(0)} % of plain Inductor` : "" }),
    X.el("h2", { text: "What ours hold" }), X.el("div", { class: "steps", role: "table", "aria-label": "what ours hold" }, up),
    ...app.data.frontiers.flatMap(frontier));
};

/** Peak against time of each state under a budget. @param {any} f */
function frontier(f) {
  const made = [X.el("h2", { text: "Memory budget" }), X.el("p", { text: f.text })];
  if (!f.points.length) return made;
  const w = 640, h = 260, pad = 70, peaks = f.points.map((/** @type {number[]} */ p) => p[1]), times = f.points.map((/** @type {number[]} */ p) => p[2]);
  const most = Math.max(...peaks, f.target), last = Math.max(1, ...times);
  const x = (/** @type {number} */ us) => pad + ((w - pad - 20) * us) / last, y = (/** @type {number} */ peak) => h - 40 - ((h - 60) * peak) / most;
  const svg = (/** @type {string} */ tag, /** @type {Record<string, any>} */ props, /** @type {string} */ text = "") => {
    const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.entries(props).forEach(([name, value]) => e.setAttribute(name, value));
    e.textContent = text;
    return e;
  };
  const root = svg("svg", { viewBox: `0 0 ${w} ${h}`, class: "frontier", role: "img", "aria-label": `${f.points.length} states: predicted peak against time of repeating` });
  root.append(svg("line", { x1: pad, x2: w - 20, y1: y(f.target), y2: y(f.target), class: "target" }), svg("text", { x: w - 20, y: y(f.target) - 5, "text-anchor": "end" }, `asked for: ${X.human(f.target)}`),
    svg("polyline", { points: f.points.map((/** @type {number[]} */ p) => `${x(p[2])},${y(p[1])}`).join(" "), class: "line" }),
    ...f.points.map((/** @type {number[]} */ p, /** @type {number} */ at) => { const dot = svg("circle", { cx: x(p[2]), cy: y(p[1]), r: at === f.chosen ? 7 : 4, class: at === f.chosen ? "chosen" : "" });
      dot.append(svg("title", {}, `peak ${X.human(p[1])}, saved ${X.human(p[0])}, repeating ${p[2].toFixed(0)} us (predicted)`)); return dot; }),
    svg("text", { x: pad - 8, y: y(most) + 4, "text-anchor": "end" }, X.human(most)), svg("text", { x: pad - 8, y: y(0) + 4, "text-anchor": "end" }, "0"),
    svg("text", { x: w / 2, y: h - 8, "text-anchor": "middle" }, `predicted time of repeating: 0 to ${last.toFixed(0)} us`));
  return [...made, root];
}
