// @ts-check
"use strict";
/** Which moment of the graph is shown: the result, or before or after a pass, its changes marked. */

/** @param {any} app */
X.passesOf = (app) => {
  const list = X.byId("pass"), before = X.byId("before"), after = X.byId("after"), summary = X.byId("summary");
  const fill = () => {
    list.textContent = "";
    list.append(X.el("option", { value: "", text: "the result, after all passes" }), ...app.view.graph.passes.map((/** @type {any} */ p) => X.el("option", { value: p.name,
      text: `${p.number}. ${p.name}${p.before === p.after ? " (no change)" : ""}` })));
    show();
  };
  const when = () => (before.getAttribute("aria-pressed") === "true" ? "before" : "after");
  const show = () => {
    const isPass = app.view.pass >= 0;
    before.hidden = after.hidden = !isPass;
    summary.textContent = "";
    if (!isPass) return;
    const { added, removed, changed } = app.view.sums;
    summary.append(...(added + removed + changed ? [X.el("span", { class: "added", text: `${added} added` }), X.el("span", { class: "removed", text: `${removed} removed` }),
      X.el("span", { class: "changed", text: `${changed} changed` })] : [X.el("span", { text: "changes nothing" })]));
  };
  const choose = (/** @type {string} */ name, /** @type {string} */ at = "after") => {
    const number = app.view.graph.passes.findIndex((/** @type {any} */ p) => p.name === name);
    list.value = number < 0 ? "" : name;
    before.setAttribute("aria-pressed", String(at === "before"));
    after.setAttribute("aria-pressed", String(at !== "before"));
    app.view.setStage(number < 0 ? app.view.graph.last : app.view.graph.passes[number][at], number);
    app.panel.show(app.view.selected);
    show();
    app.changed();
  };
  list.addEventListener("change", () => choose(list.value));
  before.addEventListener("click", () => choose(list.value, "before"));
  after.addEventListener("click", () => choose(list.value, "after"));
  fill();
  return { fill, choose, when };
};
