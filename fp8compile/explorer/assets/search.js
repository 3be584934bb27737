// @ts-check
"use strict";
/** Search by module, operation, node, and by what the report says (reasons, formats). */

/** @param {any} app */
X.searchOf = (app) => {
  const input = X.byId("search"), list = X.byId("found");
  /** @type {any[]} */ let found = [];
  let at = -1;

  const find = (/** @type {string} */ text) => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean), all = [];
    if (!words.length) return [];
    const fits = (/** @type {string} */ ...texts) => { const t = texts.join(" ").toLowerCase(); return words.every((w) => t.includes(w)); };
    for (const [key, box] of app.view.tree.byKey) if (key && box.kind !== "group" && fits(key) && all.length < 12) {
      all.push({ what: "module", text: X.pathOf(box), more: X.count(box.nodes.fw + box.nodes.bw, "operation"), go: () => app.view.reveal({ node: null, box }) });
    }
    let many = 0;
    for (const table of app.data.tables) for (const row of table.rows) if (fits(table.title, ...row.cells.map(String)) && many < 12) {
      many++;
      all.push({ what: table.title, text: `${row.cells[0] || "model"}`, more: row.cells.slice(1, -2).map((/** @type {any} */ c, /** @type {number} */ n) => app.cell(c, table.columns[n + 1][1])).join(" · "), go: () => app.goTo(row) });
    }
    let nodes = 0;
    for (const node of app.view.stage.nodes) if (fits(node.name, node.op, node.value, node.module, node.spliced, node.source) && nodes < 20) {
      nodes++;
      all.push({ what: node.side === "fw" ? "forward" : "backward", text: `${node.name}: ${X.short(node.op)} ${node.value}`, more: node.module, go: () => app.view.reveal({ node, box: app.view.tree.home.get(node) }) });
    }
    return all;
  };
  const draw = () => {
    found = find(input.value);
    at = found.length ? 0 : -1;
    list.textContent = "";
    list.hidden = !input.value.trim();
    if (!found.length) list.append(X.el("div", { class: "none", text: "nothing has all these words" }));
    list.append(...found.map((each, n) => X.el("div", { role: "option", id: `found-${n}`, "aria-selected": String(n === at), on: { pointerdown: (/** @type {any} */ e) => { e.preventDefault(); take(n); } } }, [
      X.el("span", { class: "what", text: each.what }), X.el("b", { text: each.text }), X.el("span", { class: "more", text: each.more })])));
    input.setAttribute("aria-expanded", String(!list.hidden));
    mark();
  };
  const mark = () => {
    [...list.querySelectorAll("[role=option]")].forEach((row, n) => row.setAttribute("aria-selected", String(n === at)));
    input.setAttribute("aria-activedescendant", at >= 0 ? `found-${at}` : "");
    X.byId(`found-${at}`)?.scrollIntoView({ block: "nearest" });
  };
  const take = (/** @type {number} */ n) => {
    list.hidden = true;
    input.setAttribute("aria-expanded", "false");
    app.tab("graph");
    found[n].go();
  };
  input.addEventListener("input", draw);
  input.addEventListener("focus", () => { if (input.value) draw(); });
  input.addEventListener("blur", () => { list.hidden = true; });
  input.addEventListener("keydown", (/** @type {any} */ e) => {
    if (e.key === "ArrowDown") { at = Math.min(found.length - 1, at + 1); mark(); } else if (e.key === "ArrowUp") { at = Math.max(0, at - 1); mark(); }
    else if (e.key === "Enter") { if (at >= 0) take(at); } else if (e.key === "Escape") { input.value = ""; draw(); input.blur(); } else return;
    e.preventDefault();
  });
  return { find };
};
