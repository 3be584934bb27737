// @ts-check
"use strict";
/** The tables: sorted by a click on a title, filtered by words, written as CSV. */

const MOST_ROWS = 400;

/** @param {any} app */
X.tablesOf = (app) => {
  const host = X.byId("tables-body"), tabs = X.byId("tables-tabs"), filter = X.byId("filter"), sum = X.byId("tables-sum");
  const state = { name: app.data.tables[0]?.name || "", column: -1, down: false, all: false };

  const table = () => app.data.tables.find((/** @type {any} */ t) => t.name === state.name);
  const rows = () => {
    const t = table(), words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = t.rows.filter((/** @type {any} */ row) => { const text = row.cells.join(" ").toLowerCase(); return words.every((/** @type {string} */ w) => text.includes(w)); });
    if (state.column >= 0) {
      const at = state.column, sign = state.down ? -1 : 1, isText = t.columns[at][1] === "text";
      kept.sort((/** @type {any} */ a, /** @type {any} */ b) => sign * (isText ? natural(a.cells[at], b.cells[at]) : a.cells[at] - b.cells[at]));
    }
    return kept;
  };

  const draw = () => {
    tabs.textContent = host.textContent = "";
    if (!table()) { host.append(X.el("p", { class: "empty", text: "The report has no entries: nothing was rewritten, and nothing was left for a reason." })); return; }
    tabs.append(...app.data.tables.map((/** @type {any} */ t) => X.el("button", { type: "button", role: "tab", "aria-selected": String(t.name === state.name),
      text: `${t.title} (${t.rows.length})`, on: { click: () => open(t.name) } })));
    const t = table(), found = rows(), shown = state.all ? found : found.slice(0, MOST_ROWS);
    const head = X.el("tr", {}, t.columns.map(([title, kind], /** @type {number} */ at) => X.el("th", { scope: "col", class: kind,
      "aria-sort": state.column === at ? (state.down ? "descending" : "ascending") : "none" }, [
      X.el("button", { type: "button", text: `${title}${state.column === at ? (state.down ? " ↓" : " ↑") : ""}`, on: { click: () => sort(at, kind) } })])));
    const body = shown.map((/** @type {any} */ row) => X.el("tr", { tabindex: "0", on: { click: () => app.goTo(row), keydown: (/** @type {any} */ e) => { if (e.key === "Enter") app.goTo(row); } } },
      row.cells.map((/** @type {any} */ cell, /** @type {number} */ at) => X.el("td", { class: t.columns[at][1], title: t.columns[at][1] === "bytes" ? `${cell.toLocaleString("en")} bytes` : null,
        text: app.cell(cell, t.columns[at][1]) }))));
    host.append(X.el("table", { "aria-label": t.title }, [X.el("thead", {}, [head]), X.el("tbody", {}, body)]));
    if (shown.length < found.length) host.append(X.el("button", { type: "button", text: `Show all ${found.length} rows`, on: { click: () => { state.all = true; draw(); } } }));
    sum.textContent = summary(t, found);
  };
  const summary = (/** @type {any} */ t, /** @type {any[]} */ found) => [`${found.length} of ${t.rows.length}`, ...t.columns.flatMap(([title, kind], /** @type {number} */ at) => (kind === "bytes"
    ? [`${title} ${X.human(found.reduce((total, row) => total + row.cells[at], 0))}`] : []))].join(" · ");
  const sort = (/** @type {number} */ at, /** @type {string} */ kind) => {
    state.down = state.column === at ? !state.down : kind !== "text";
    state.column = at;
    draw();
    app.changed();
  };
  const open = (/** @type {string} */ name) => {
    if (!app.data.tables.some((/** @type {any} */ t) => t.name === name)) return;
    Object.assign(state, { name, column: -1, down: false, all: false });
    draw();
    app.changed();
  };
  const csv = () => {
    const t = table(), quoted = (/** @type {any} */ value) => { const text = guarded(value); return /[",\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text; };
    return [t.columns.map((/** @type {string[]} */ c) => quoted(c[0])), ...rows().map((/** @type {any} */ row) => row.cells.map(quoted))].map((line) => line.join(",")).join("\r\n");
  };
  X.byId("csv").addEventListener("click", () => {
    if (!table()) return;
    const address = URL.createObjectURL(new Blob([csv()], { type: "text/csv" }));
    X.el("a", { href: address, download: `fp8compile-${state.name}.csv` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  });
  filter.addEventListener("input", draw);
  draw();
  return { open, draw, state, csv, rows };
};

/** Numbers in texts by their size: `layers.2` before `layers.10`. @param {any} a @param {any} b */
function natural(a, b) {
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

/** A text that a spreadsheet would run as a formula gets a quote before it. @param {any} value */
function guarded(value) {
  return typeof value === "string" && /^[=+\-@]./.test(value) ? `'${value}` : String(value);
}
